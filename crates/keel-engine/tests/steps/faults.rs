//! A failed plain step leaves its sequence as it was: position, keys and values, windows and states. A failed step of a
//! prompt is taken back, or nothing can be built upon it.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::common::launch_faults::{Faults, disturbed_engine, disturbed_engine_with, disturbed_options};
use crate::common::{decoded, demo, expect_same_state, fixture, recurrent_bytes};
use keel_array::{Compute, Runtime, RuntimeOptions};
use keel_cache::{CommitProgress, FailedStepState, SequenceCache};
use keel_cpu::{CpuBackend, CpuOptions};
use keel_engine::{Engine, EngineOptions};

/// A sequence after one of its tokens.
struct AfterToken {
    /// The bytes of windows and states.
    recurrent: Vec<u8>,
    logits: Vec<f32>,
}

/// The sequence after each of `tokens`, by plain decoding in an engine without a log, which commits each token at once.
fn reference(folder: &Path, prompt: &[u32], tokens: &[u32]) -> Vec<AfterToken> {
    let backend = CpuBackend::new(CpuOptions { threads: Some(2), ..CpuOptions::default() });
    let runtime = Runtime::new(Arc::new(backend), RuntimeOptions::default());
    let options =
        EngineOptions { context: 512, prefill_step: 64, compute: Compute::Auto, ..EngineOptions::default() };
    let mut engine = crate::common::engine(folder, &runtime, options);
    let mut sequence = decoded(&mut engine, prompt, &[]);
    let mut logits = Vec::new();
    let each = tokens.iter().map(|&token| {
        engine.decode(&mut [&mut sequence], &[token]).expect("runs");
        engine.logits(0, &mut logits).expect("there");
        AfterToken { recurrent: recurrent_bytes(&engine, &sequence), logits: logits.clone() }
    });
    each.collect()
}

/// Asserts that a sequence with the first `tokens` tokens has the reference's state there, and that `next` gives the
/// reference's logits.
fn expect_as_reference(
    engine: &mut Engine,
    sequence: &SequenceCache,
    reference: &[AfterToken],
    (tokens, next): (usize, u32),
) {
    let mut twin = engine.cache_mut().fork(sequence).expect("a slot is free");
    engine.commit(&mut twin).expect("runs");
    if let Some(before) = tokens.checked_sub(1) {
        assert!(recurrent_bytes(engine, &twin) == reference[before].recurrent, "windows or states differ");
    }
    let mut logits = Vec::new();
    engine.decode(&mut [&mut twin], &[next]).expect("runs");
    engine.logits(0, &mut logits).expect("there");
    assert!(logits == reference[tokens].logits, "keys or values differ");
    engine.release(twin);
}

#[test]
fn a_plain_step_happens_or_has_not_been() {
    let (prompt, tokens) = (vec![1, 250, 33, 400, 12, 5], [9, 77, 300]);
    let moe = [(fixture("qwen3_5_moe"), 1, 20)];
    for (folder, piece, launches_min) in [(demo(), 1, 100), (demo(), 7, 10)].into_iter().chain(moe) {
        let reference = reference(&folder, &prompt, &tokens);
        let (mut engine, faults) = disturbed_engine(&folder, piece);
        let mut sequence = decoded(&mut engine, &prompt, &[]);
        for (i, &token) in tokens.iter().enumerate() {
            let mut launches = 0;
            loop {
                faults.set(launches);
                let outcome = engine.decode(&mut [&mut sequence], &[token]);
                faults.clear();
                let Err(error) = outcome else { break };
                assert!(error.to_string().contains("injected"), "{error}");
                assert_eq!(sequence.len(), prompt.len() + i);
                expect_as_reference(&mut engine, &sequence, &reference, (i, token));
                launches += 1;
            }
            assert!(launches >= launches_min, "{launches} launches in pieces of {piece}");
        }
        engine.release(sequence);
    }
}

#[test]
fn a_plain_step_that_fails_within_its_launch_has_not_been() {
    let (prompt, tokens) = (vec![1, 250, 33, 400, 12, 5], [9, 77, 300]);
    let reference = reference(&demo(), &prompt, &tokens);
    let (mut engine, faults) = disturbed_engine(&demo(), 512);
    faults.breaks_pages.store(true, Ordering::Relaxed);
    let mut sequence = decoded(&mut engine, &prompt, &[]);
    for (i, &token) in tokens.iter().enumerate() {
        for _ in 0..2 {
            faults.set(0);
            let error = engine.decode(&mut [&mut sequence], &[token]).expect_err("the table is broken");
            assert!(error.to_string().contains("paged_attention"), "{error}");
            assert_eq!(sequence.len(), prompt.len() + i);
            // Three layers have committed the row before, if there is one. The others have not.
            let left = engine.cache().failed_step(&sequence);
            assert_eq!(
                left,
                Some(FailedStepState::PartlyCommitted(CommitProgress { windows: 3, states: 3 }))
            );
            expect_as_reference(&mut engine, &sequence, &reference, (i, token));
        }
        engine.decode(&mut [&mut sequence], &[token]).expect("runs");
    }
}

/// Runs a prompt in which launch number `launches` fails.
fn fail_prompt(
    engine: &mut Engine,
    faults: &Faults,
    sequence: &mut SequenceCache,
    (prompt, launches): (&[u32], usize),
) {
    faults.set(launches);
    let error = engine.prefill(sequence, prompt, &mut Vec::new(), &mut |_| ()).expect_err("injected");
    faults.clear();
    assert!(error.to_string().contains("injected"), "{error}");
}

#[test]
fn a_step_of_a_prompt_that_fails_halfway_is_taken_back_or_not_built_upon() {
    let prompt: Vec<u32> = (0..130).map(|i| i * 3 % 500).collect();
    let (mut engine, faults) = disturbed_engine(&demo(), 8);
    let straight = decoded(&mut engine, &prompt, &[]);
    let mut sequence = engine.open().expect("a slot is free");
    // Before any change, and in the middle of the first step. The state before that step is the empty one.
    for launches in [0, 1, 8, 15] {
        fail_prompt(&mut engine, &faults, &mut sequence, (&prompt, launches));
        assert_eq!(sequence.len(), 0);
        engine.cache().expect_whole(&sequence).expect("it is as before");
    }
    // The state between two steps is not kept.
    fail_prompt(&mut engine, &faults, &mut sequence, (&prompt, 30));
    assert_eq!(sequence.len(), 64);
    let again = engine.prefill(&mut sequence, &prompt[64..], &mut Vec::new(), &mut |_| ());
    let message = again.expect_err("its state is torn").to_string();
    assert!(message.contains("recurrent layers had changed; release the sequence"), "{message}");
    engine.cache_mut().rewind(&mut sequence, 64).expect("clears");
    assert_eq!(sequence.len(), 0);
    // At a checkpoint it is kept.
    let mut launches = 31;
    while sequence.checkpoints().next() != Some(128) {
        engine.cache_mut().reset(&mut sequence).expect("clears");
        fail_prompt(&mut engine, &faults, &mut sequence, (&prompt, launches));
        launches += 1;
    }
    for launches in [4, 9] {
        fail_prompt(&mut engine, &faults, &mut sequence, (&prompt[128..], launches));
        assert_eq!(sequence.len(), 128);
        engine.cache().expect_whole(&sequence).expect("it is as before");
    }
    engine.prefill(&mut sequence, &prompt[128..], &mut Vec::new(), &mut |_| ()).expect("runs");
    expect_same_state(&mut engine, sequence, straight);
}

/// Rows of a long step overwrite keys that its first rows need in the sliding layers. Once they may be overwritten, the
/// sequence cannot go on from where the step began.
#[test]
fn a_failed_step_that_has_overwritten_its_window_is_not_built_upon() {
    // A window of 16 keeps two pages of 256. Tokens 256 to 767 write the pages 1 and 2, and page 2 overwrites page 0.
    let prompt: Vec<u32> = (0..768).map(|i| i * 37 % 90).collect();
    let options = EngineOptions { context: 1024, prefill_step: 512, checkpoints: 0, ..disturbed_options() };
    let (mut engine, faults) = disturbed_engine_with(&fixture("gemma3_text"), 4, options);
    let straight = decoded(&mut engine, &prompt, &[]);
    let mut failures = 0;
    for launches in 0.. {
        let mut sequence = decoded(&mut engine, &prompt[..256], &[]);
        faults.set(launches);
        let outcome = engine.prefill(&mut sequence, &prompt[256..], &mut Vec::new(), &mut |_| ());
        faults.clear();
        let Err(error) = outcome else {
            engine.release(sequence);
            break;
        };
        assert!(error.to_string().contains("injected"), "{error}");
        failures += 1;
        let at = sequence.len();
        if engine.prefill(&mut sequence, &prompt[at..], &mut Vec::new(), &mut |_| ()).is_err() {
            assert_eq!(engine.cache_mut().rewind(&mut sequence, at).expect("clears"), 0);
            engine.prefill(&mut sequence, &prompt, &mut Vec::new(), &mut |_| ()).expect("runs");
        }
        let twin = engine.cache_mut().fork(&straight).expect("a slot is free");
        expect_same_state(&mut engine, sequence, twin);
    }
    assert!(failures > 10, "{failures} launches in the steps");
}
