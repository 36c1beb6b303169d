//! Keys and values of 8 and 4 bits: less memory, and the laws of 16 bits hold.

mod common;

use common::{all_logits, demo, engine, relative_error, runtime};
use keel_array::{Category, Compute, KvFormat};
use keel_engine::{
    Depth, Engine, EngineError, EngineOptions, GenerateOptions, MtpTokenIterator, SpeculationOptions,
    TokenIterator,
};

const CODED: [KvFormat; 2] = [KvFormat::Bits8, KvFormat::Bits4];

fn options(kv: KvFormat) -> EngineOptions {
    EngineOptions { context: 512, sequences: 2, all_logits: true, kv: Some(kv), ..EngineOptions::default() }
}

fn prompt() -> Vec<u32> {
    (0..300).map(|i| (i * 37 + i / 7) % 4000).collect()
}

#[test]
fn steps_and_threads_do_not_change_a_bit() {
    for kv in CODED {
        let logits = |prefill_step, threads| {
            let options = EngineOptions { prefill_step, ..options(kv) };
            all_logits(&mut engine(&demo(), &runtime(threads), options), &prompt(), false, false).0
        };
        let whole = logits(2048, 2);
        for (step, threads) in [(64, 1), (128, 3)] {
            assert!(logits(step, threads) == whole, "{kv:?}, step {step}, {threads} threads");
        }
    }
}

#[test]
fn a_saved_cache_continues_with_the_same_bits_and_no_other_form_takes_it() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let path = dir.path().join("cache");
    let ids = prompt();
    for (kv, other) in [(KvFormat::Bits8, KvFormat::Bits4), (KvFormat::Bits4, KvFormat::F16)] {
        let whole = all_logits(&mut engine(&demo(), &runtime(2), options(kv)), &ids, false, false).0;
        let mut first = engine(&demo(), &runtime(2), options(kv));
        let mut sequence = first.open().expect("a slot is free");
        first.prefill(&mut sequence, &ids[..64], &mut Vec::new(), &mut |_| ()).expect("runs");
        first.cache().save(&sequence, &ids[..64], "demo", &path).expect("saves");
        assert!(engine(&demo(), &runtime(1), options(other)).cache_mut().load("demo", &path).is_err());
        let mut second = engine(&demo(), &runtime(1), options(kv));
        let (mut sequence, _) = second.cache_mut().load("demo", &path).expect("loads");
        let mut rest = Vec::new();
        let mut sink = |row: &[f32]| {
            rest.extend_from_slice(row);
            Ok(())
        };
        second.all_logits(&mut sequence, &ids[64..], false, &mut sink, None).expect("runs");
        assert!(rest == whole[whole.len() - rest.len()..], "{kv:?}: the continuation differs");
        second.release(sequence);
    }
}

fn plain(engine: &mut Engine, prompt: &[u32], options: GenerateOptions) -> Vec<u32> {
    let sequence = engine.open().expect("a slot is free");
    let mut tokens = TokenIterator::new(engine, sequence, prompt, options, &mut |_| ()).expect("fits");
    let got = tokens.by_ref().collect::<Result<_, _>>().expect("every step runs");
    tokens.release();
    got
}

#[test]
fn drafts_change_no_token() {
    for kv in CODED {
        let mut engine = engine(&demo(), &runtime(2), EngineOptions { drafts: 3, ..options(kv) });
        let options = || GenerateOptions { max_tokens: 120, ..GenerateOptions::default() };
        let want = plain(&mut engine, &prompt()[..70], options());
        let sequence = engine.open().expect("a slot is free");
        let speculation = SpeculationOptions { depth: Depth::Fixed(3), ..SpeculationOptions::default() };
        let mut tokens = MtpTokenIterator::new(
            &mut engine,
            sequence,
            &prompt()[..70],
            options(),
            speculation,
            &mut |_| (),
        )
        .expect("fits");
        let got: Vec<u32> = tokens.by_ref().collect::<Result<_, _>>().expect("every round runs");
        tokens.release();
        assert_eq!(got, want, "{kv:?}");
    }
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
    assert!(errors[0] > 0.0 && errors[1] < 0.02 && errors[2] < 0.2, "{errors:?}");
    assert!(errors[1] < errors[2], "{errors:?}");
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
