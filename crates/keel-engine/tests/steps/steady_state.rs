//! Decode steps on a GPU, once they are captured: one submission, one wait for it and its token, no allocation. Needs a
//! GPU: `KEEL_TEST_CUDA=1`.

use std::sync::Arc;

use crate::common::queueing::Answers;
use crate::common::{argmax, demo, engine};
use keel_array::sampling::Draw;
use keel_array::{Runtime, RuntimeOptions};
use keel_cache::SequenceCache;
use keel_cuda::{CudaBackend, CudaOptions};
use keel_engine::{Engine, EngineOptions};

const STEPS: usize = 64;
const SEQUENCES: usize = 3;

/// The model on a GPU, and sequences after prompts. `None` without a GPU to test.
fn prefilled() -> Option<(Arc<CudaBackend>, Engine, Vec<SequenceCache>)> {
    if !keel_testkit::has_gpu!() {
        return None;
    }
    let backend = Arc::new(CudaBackend::new(&CudaOptions::default()).expect("a GPU"));
    let runtime = Runtime::new(Arc::clone(&backend) as _, RuntimeOptions::default());
    let options = EngineOptions { context: 512, sequences: SEQUENCES, ..EngineOptions::default() };
    let mut engine = engine(&demo(), &runtime, options);
    let sequences = (0..SEQUENCES).map(|i| {
        let mut sequence = engine.open().expect("a slot is free");
        let prompt: Vec<u32> = (0..70).map(|j| (j * 7 + i as u32 * 13 + 5) % 500).collect();
        engine.prefill(&mut sequence, &prompt, &mut Vec::new(), &mut |_| ()).expect("fits");
        sequence
    });
    let sequences = sequences.collect();
    Some((backend, engine, sequences))
}

/// How the tokens of a step are drawn: greedy, sampled, and by the host.
fn draws(step: usize) -> [Option<Draw>; SEQUENCES] {
    let uniform = (step * 37 % 64) as f32 / 64.0;
    let sampled = Draw { temperature: 0.8, top_k: 40, top_p: 0.95, min_p: 0.02, uniform };
    [Some(Draw::GREATEST), Some(sampled), None]
}

#[test]
fn a_steady_step_waits_once_and_allocates_nothing() {
    let Some((backend, mut engine, mut sequences)) = prefilled() else { return };
    let mut tokens = [7; SEQUENCES];
    let mut run = |engine: &mut Engine, steps: std::ops::Range<usize>| {
        for step in steps {
            let mut all: Vec<_> = sequences.iter_mut().collect();
            let drawn = engine.decode_and_draw(&mut all, &tokens, &draws(step)).expect("runs");
            tokens.iter_mut().zip(drawn).for_each(|(token, drawn)| *token = drawn.unwrap_or(7));
        }
    };
    // One run kernel by kernel, one captured, two replayed.
    run(&mut engine, 0..4);
    let counts = |engine: &Engine| {
        let (captured, replayed) = (backend.capture_count(), backend.replay_count());
        let ledger = engine.runtime().ledger();
        ([captured, ledger.charges(), ledger.active().total()], [replayed, backend.wait_count()])
    };
    let before = counts(&engine);
    run(&mut engine, 4..4 + STEPS);
    let after = counts(&engine);
    assert_eq!(after.0, before.0, "graphs captured, allocations, bytes");
    assert_eq!(after.1, before.1.map(|count| count + STEPS as u64), "submissions and waits");
}

#[test]
fn a_step_is_submitted_before_the_one_before_it_is_waited_for() {
    let Some((backend, mut engine, mut sequences)) = prefilled() else { return };
    let draws = |step: usize| draws(step).map(|draw| draw.unwrap_or(Draw::GREATEST));
    let mut answers = Answers::default();
    answers.submit(&mut engine, &mut sequences, Some(&[7; SEQUENCES]), &draws(0)).expect("runs");
    let mut run = |engine: &mut Engine, steps: std::ops::Range<usize>| {
        for step in steps {
            let before = (backend.replay_count(), backend.wait_count());
            answers.submit(engine, &mut sequences, None, &draws(step)).expect("runs");
            let submitted = (backend.replay_count(), backend.wait_count());
            answers.take(engine, &mut sequences);
            if step >= 4 {
                assert_eq!(
                    submitted,
                    (before.0 + 1, before.1),
                    "step {step} was submitted, and none waited for"
                );
                assert_eq!(backend.wait_count(), before.1 + 1, "the wait for the step before");
                assert_eq!((engine.steps_in_flight(), engine.runtime().runs_under_way()), (1, 1));
            }
        }
    };
    run(&mut engine, 1..4);
    let steady = |engine: &Engine| {
        let ledger = engine.runtime().ledger();
        (backend.capture_count(), ledger.charges(), ledger.active().total())
    };
    let before = (steady(&engine), backend.replay_count(), backend.wait_count());
    run(&mut engine, 4..4 + STEPS);
    let after = (steady(&engine), backend.replay_count(), backend.wait_count());
    let steps = STEPS as u64;
    assert_eq!(after, (before.0, before.1 + steps, before.2 + steps), "nothing but submissions and waits");
    answers.take(&mut engine, &mut sequences);
}

#[test]
fn tokens_that_come_with_their_step_are_those_of_its_logits() {
    let Some((_, mut engine, mut sequences)) = prefilled() else { return };
    let (mut tokens, mut logits, mut moved) = ([7; SEQUENCES], Vec::new(), 0);
    for step in 0..STEPS {
        let mut all: Vec<_> = sequences.iter_mut().collect();
        let drawn = engine.decode_and_draw(&mut all, &tokens, &draws(step)).expect("runs");
        engine.logits(0, &mut logits).expect("there");
        assert_eq!(drawn[0], Some(argmax(&logits)), "step {step}");
        engine.logits(1, &mut logits).expect("there");
        let sampled = drawn[1].expect("it was drawn for");
        let above = logits.iter().filter(|&&logit| logit > logits[sampled as usize]).count();
        assert!(above < 40, "step {step}: token {sampled} has {above} before it");
        moved += usize::from(tokens[1] != sampled);
        tokens = [drawn[0].expect("as above"), sampled, 7];
    }
    assert!(moved > STEPS / 2, "only {moved} of {STEPS} tokens differ from those before them");
}
