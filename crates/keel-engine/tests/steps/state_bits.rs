//! Recurrent states in f16: half of their memory, and every law of f32 holds.

use crate::common::forms::{
    expect_drafts_to_change_no_token, expect_same_bits_for_all_steps_and_threads, expect_saved_to_continue,
    prompt,
};
use crate::common::{all_logits, demo, engine, recurrent_bytes, relative_error, runtime};
use keel_array::{Category, Compute, DType};
use keel_cache::LayerStorage;
use keel_engine::{Engine, EngineError, EngineOptions};

fn options() -> EngineOptions {
    EngineOptions {
        context: 512,
        sequences: 2,
        checkpoints: 2,
        all_logits: true,
        state: DType::F16,
        ..EngineOptions::default()
    }
}

#[test]
fn steps_and_threads_do_not_change_a_bit() {
    expect_same_bits_for_all_steps_and_threads(options());
}

#[test]
fn a_saved_cache_continues_with_the_same_bits_and_no_other_form_takes_it() {
    let error = expect_saved_to_continue(options(), EngineOptions { state: DType::F32, ..options() });
    assert!(error.contains("layers.0.state") && error.contains("f16"), "{error}");
}

#[test]
fn drafts_change_no_token() {
    expect_drafts_to_change_no_token(options());
}

#[test]
fn a_checkpoint_a_fork_and_a_parked_sequence_bring_back_every_bit() {
    let mut engine = engine(&demo(), &runtime(2), EngineOptions { swap_bytes: 16 << 20, ..options() });
    let mut sequence = engine.open().expect("a slot is free");
    let run = |engine: &mut Engine, sequence: &mut _, ids: &[u32]| {
        engine.prefill(sequence, ids, &mut Vec::new(), &mut |_| ()).expect("runs");
    };
    run(&mut engine, &mut sequence, &prompt()[..128]);
    let saved = recurrent_bytes(&engine, &sequence);
    let twin = engine.cache_mut().fork(&sequence).expect("a slot is free");
    assert!(recurrent_bytes(&engine, &twin) == saved, "the fork differs");
    drop(twin);
    engine.cache_mut().park(&mut sequence).expect("there is room");
    // Another sequence uses the slot meanwhile.
    let mut other = engine.open().expect("a slot is free");
    run(&mut engine, &mut other, &prompt()[64..128]);
    drop(other);
    engine.cache_mut().unpark(&mut sequence).expect("a slot is free");
    assert!(recurrent_bytes(&engine, &sequence) == saved, "the parked sequence differs");
    engine.cache_mut().checkpoint(&mut sequence).expect("there is room");
    run(&mut engine, &mut sequence, &prompt()[128..200]);
    assert!(recurrent_bytes(&engine, &sequence) != saved);
    assert_eq!(engine.cache_mut().rewind(&mut sequence, 128).expect("rewinds"), 128);
    assert!(recurrent_bytes(&engine, &sequence) == saved, "the checkpoint differs");
}

#[test]
fn the_state_takes_half_and_the_plan_is_what_is_taken() {
    let bytes = |state| {
        let runtime = runtime(2);
        let engine = engine(&demo(), &runtime, EngineOptions { state, ..options() });
        let of_states = |layer: &LayerStorage| match layer {
            LayerStorage::Recurrent { state, .. } => state.state.bytes(),
            _ => 0,
        };
        let states: usize = engine.cache().layers().iter().map(of_states).sum();
        let ledger = runtime.ledger().active();
        assert_eq!(ledger.get(Category::Recurrent), 2 * engine.cache().spec().slot_bytes() as u64);
        (states as u64, ledger.get(Category::Recurrent), ledger.get(Category::Checkpoints))
    };
    let (states, recurrent, checkpoints) = bytes(DType::F32);
    assert!(states > 0);
    assert_eq!(bytes(DType::F16), (states / 2, recurrent - states / 2, checkpoints - states / 2));
}

/// The decode regime rounds after each token. Errors stay near one rounding: they do not grow with the tokens.
#[test]
fn logits_stay_near_and_do_not_drift() {
    let ids: Vec<u32> = (0..480).map(|i| (i * 53 + i / 5) % 4000).collect();
    let logits = |state| {
        let options = EngineOptions { state, compute: Compute::F32, ..options() };
        all_logits(&mut engine(&demo(), &runtime(2), options), &ids, true, false).0
    };
    let (want, got) = (logits(DType::F32), logits(DType::F16));
    let half = want.len() / 2;
    let early = relative_error(&got[..half], &want[..half]);
    let late = relative_error(&got[half..], &want[half..]);
    assert!(early > 0.0 && early < 0.01 && late < 2.0 * early, "{early:e}, then {late:e}");
}

#[test]
fn other_types_are_refused() {
    let checkpoint = keel_weights::Checkpoint::open(&demo()).expect("opens");
    let parameters = keel_models::loading::CheckpointParameters(&checkpoint);
    let options = EngineOptions { state: DType::BF16, ..options() };
    let refused = Engine::load(&runtime(1), &parameters, checkpoint.config(), options, &|_| ()).map(|_| ());
    let Err(EngineError::Option(reason)) = refused else { panic!("bf16 is not a type of states") };
    assert_eq!(reason, "states in bf16: they are stored in f32 or f16");
}
