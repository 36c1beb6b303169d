//! Batches of more sequences than most tests have.

use std::time::Instant;

use crate::common::batching::{Outcome, assert_all_is_back, finish_from, run, step};
use crate::common::queueing::queueing;
use crate::common::{demo, engine, fixture};
use keel_array::RESULT_BYTES_MAX;
use keel_engine::batch::{BatchOptions, BatchRequest, Batcher};
use keel_engine::{EngineOptions, FinishReason, LateWork, SamplerOptions};

fn batcher(folder: &std::path::Path, runtime: &keel_array::Runtime, sequences: usize) -> Batcher {
    let options = EngineOptions { context: 256, sequences, prefill_step: 64, ..EngineOptions::default() };
    let batch = BatchOptions { step_tokens: 64, queue_limit: sequences, ..BatchOptions::default() };
    let mut engine = engine(folder, runtime, options);
    engine.make_ready(&mut |_, _, _| ()).expect("the steps run");
    Batcher::new(engine, batch)
}

/// Their tokens do not come to the host with one step, so each step is waited for.
#[test]
fn more_answers_than_tokens_come_with_a_step_all_end() {
    let answers = RESULT_BYTES_MAX / size_of::<u32>() + 1;
    let (runtime, _) = queueing(512);
    let mut batcher = batcher(&fixture("qwen3_5"), &runtime, answers);
    let all = (0..answers).map(|id| BatchRequest::new(id as u64, vec![id as u32 % 500], 4));
    let outcomes = run(&mut batcher, all.collect());
    assert_eq!(batcher.status().failed_steps, 0);
    for (id, outcome) in outcomes.iter().enumerate() {
        assert_eq!((outcome.tokens.len(), outcome.finish), (4, Some(FinishReason::Length)), "answer {id}");
    }
    assert_all_is_back(&mut batcher);
}

/// The logits of answers and those of 16 prompts are kept for the host, so 10 and 7 do not end the steps ahead.
#[test]
fn answers_and_prompts_for_the_host_have_places_of_their_own() {
    let (runtime, _) = queueing(512);
    let mut batcher = batcher(&demo(), &runtime, 20);
    let request = |id: usize, len: u32| {
        let ids = (0..len).map(|j| (j * 7 + id as u32 * 131 + 5) % 500).collect();
        let sampler = SamplerOptions { repetition_penalty: 1.2, ..SamplerOptions::default() };
        BatchRequest { sampler, ..BatchRequest::new(id as u64, ids, 40) }
    };
    let now = Instant::now();
    let mut outcomes: Vec<Outcome> = (0..17).map(|_| Outcome::default()).collect();
    (0..10).for_each(|id| batcher.submit(request(id, 20), now).expect("accepted"));
    while outcomes[..10].iter().any(|outcome| outcome.tokens.len() < 2) {
        step(&mut batcher, now, &mut outcomes);
    }
    (10..17).for_each(|id| batcher.submit(request(id, 150), now).expect("accepted"));
    let (mut steps, mut under_way) = (0, 0);
    while outcomes[10..].iter().all(|outcome| outcome.tokens.is_empty()) {
        step(&mut batcher, now, &mut outcomes);
        steps += 1;
        under_way += batcher.engine().steps_in_flight();
    }
    assert!(
        steps > 2 && under_way >= steps - 1,
        "after {under_way} of {steps} steps the next one is under way"
    );
    let outcomes = finish_from(&mut batcher, outcomes);
    assert!(outcomes.iter().all(|outcome| outcome.tokens.len() == 40));
    assert_all_is_back(&mut batcher);
}

/// A step keeps the logits of 64 answers, and the host draws for 72. They take turns, and the two others are in each
/// step. Then the 72 are alone, and all are in each step.
#[test]
fn more_answers_for_the_host_than_a_step_keeps_take_turns() {
    const FOR_HOST: usize = 72;
    const PER_STEP: usize = 64;
    let request = |id: usize| {
        let ids = (0..3 + id as u32 % 5).map(|j| (j * 7 + id as u32 * 131 + 5) % 500).collect();
        let repetition_penalty = if id < FOR_HOST { 1.2 } else { 1.0 };
        let sampler = SamplerOptions { repetition_penalty, ..SamplerOptions::default() };
        let max_tokens = if id < FOR_HOST { 40 } else { id - 20 };
        BatchRequest { sampler, ..BatchRequest::new(id as u64, ids, max_tokens) }
    };
    let (runtime, _) = queueing(512);
    let mut batcher = batcher(&demo(), &runtime, FOR_HOST + 2);
    let memory = (runtime.ledger().active(), runtime.ledger().peak());
    let now = Instant::now();
    let mut outcomes: Vec<Outcome> = (0..FOR_HOST + 2).map(|_| Outcome::default()).collect();
    (0..FOR_HOST + 2).for_each(|id| batcher.submit(request(id), now).expect("accepted"));
    while outcomes.iter().any(|outcome| outcome.tokens.is_empty()) {
        step(&mut batcher, now, &mut outcomes);
    }
    let lengths = |all: &[Outcome]| all.iter().map(|outcome| outcome.tokens.len()).collect::<Vec<usize>>();
    let (before, mut steps) = (lengths(&outcomes), 0);
    let mut gained = Vec::new();
    while outcomes[FOR_HOST..].iter().all(|outcome| outcome.finish.is_none()) {
        step(&mut batcher, now, &mut outcomes);
        steps += 1;
        assert_eq!(batcher.engine().steps_in_flight(), 1, "the others wait");
        gained = lengths(&outcomes).iter().zip(&before).map(|(now, before)| now - before).collect();
        let (least, most) = (gained[..FOR_HOST].iter().min(), gained[..FOR_HOST].iter().max());
        assert!(most.zip(least).is_some_and(|(most, least)| most - least <= 1), "step {steps}: {gained:?}");
    }
    assert!(steps > 20 && gained[FOR_HOST..] == [steps; 2], "{steps} steps: {gained:?}");
    let for_host: usize = gained[..FOR_HOST].iter().sum();
    assert!(for_host.abs_diff(PER_STEP * steps / 2) <= PER_STEP, "{for_host} tokens in {steps} steps");
    while outcomes[FOR_HOST..].iter().any(|outcome| outcome.finish.is_none()) {
        step(&mut batcher, now, &mut outcomes);
    }
    // It also takes the step under way.
    step(&mut batcher, now, &mut outcomes);
    while !batcher.is_idle() {
        let (before, left) = (lengths(&outcomes), outcomes.iter().filter(|of| of.finish.is_none()).count());
        step(&mut batcher, now, &mut outcomes);
        let gained = lengths(&outcomes).iter().sum::<usize>() - before.iter().sum::<usize>();
        assert_eq!(gained, left, "tokens in a step of answers for the host alone");
    }
    assert_eq!(batcher.engine().late_work(), LateWork::default());
    assert_eq!((runtime.ledger().active(), runtime.ledger().peak()), memory);
    for (id, outcome) in outcomes.iter().enumerate() {
        batcher.forget_prefixes();
        let alone = run(&mut batcher, vec![BatchRequest { id: 0, ..request(id) }]).remove(0);
        assert_eq!((&outcome.tokens, outcome.finish), (&alone.tokens, alone.finish), "answer {id}");
    }
    assert_all_is_back(&mut batcher);
}
