//! Keys and values of 8 and 4 bits: less memory, and the laws of 16 bits hold.

use crate::common::forms::{
    expect_drafts_to_change_no_token, expect_same_bits_for_all_steps_and_threads, expect_saved_to_continue,
    prompt,
};
use crate::common::{all_logits, demo, engine, relative_error, runtime};
use keel_array::{Category, Compute, KvFormat};
use keel_engine::{Engine, EngineError, EngineOptions};

const CODED: [KvFormat; 2] = [KvFormat::Bits8, KvFormat::Bits4];

fn options(kv: KvFormat) -> EngineOptions {
    EngineOptions { context: 512, sequences: 2, all_logits: true, kv: Some(kv), ..EngineOptions::default() }
}

#[test]
fn steps_and_threads_do_not_change_a_bit() {
    CODED.into_iter().map(options).for_each(expect_same_bits_for_all_steps_and_threads);
}

#[test]
fn a_saved_cache_continues_with_the_same_bits_and_no_other_form_takes_it() {
    for (kv, other) in [(KvFormat::Bits8, KvFormat::Bits4), (KvFormat::Bits4, KvFormat::F16)] {
        expect_saved_to_continue(options(kv), options(other));
    }
}

#[test]
fn drafts_change_no_token() {
    CODED.into_iter().map(options).for_each(expect_drafts_to_change_no_token);
}

/// Each form takes its own number of bytes, and the values stay near. A form with fewer bits is farther off.
#[test]
fn fewer_bits_take_less_memory_and_stay_near() {
    let run = |kv| {
        let runtime = runtime(2);
        let mut engine = engine(&demo(), &runtime, EngineOptions { compute: Compute::F32, ..options(kv) });
        let bytes = runtime.ledger().active().get(Category::Kv);
        (bytes, all_logits(&mut engine, &prompt(), false, false).0)
    };
    let (full_bytes, want) = run(KvFormat::F32);
    let mut errors = Vec::new();
    for (kv, part) in [(KvFormat::F16, (1, 2)), (KvFormat::Bits8, (17, 64)), (KvFormat::Bits4, (9, 64))] {
        let (bytes, logits) = run(kv);
        assert_eq!(bytes, full_bytes * part.0 / part.1, "{kv:?}");
        errors.push(relative_error(&logits, &want));
    }
    assert!(errors[0] < 1e-3 && errors[1] < 0.02 && errors[2] < 0.2, "{errors:?}");
    assert!(0.0 < errors[0] && errors[0] < errors[1] && errors[1] < errors[2], "{errors:?}");
}

#[test]
fn heads_that_are_no_groups_are_refused() {
    let mut config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(demo().join("config.json")).expect("there")).expect("JSON");
    let text = if config["text_config"].is_object() { &mut config["text_config"] } else { &mut config };
    text["head_dim"] = 48.into();
    let parameters = keel_models::loading::RandomParameters {
        format: keel_array::WeightFormat::Dense(keel_array::DType::BF16),
    };
    let load = |kv| Engine::load(&runtime(1), &parameters, &config, options(kv), &|_| ());
    assert!(load(KvFormat::F16).is_ok());
    let Err(error @ EngineError::Cache(_)) = load(KvFormat::Bits8) else { panic!("48 is no multiple of 32") };
    assert!(error.to_string().contains("a head has 48 values"), "{error}");
}
