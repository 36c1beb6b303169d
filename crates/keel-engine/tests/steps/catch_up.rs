//! The MTP (multi-token-prediction) head catches up with answers that do not draft.

use std::sync::atomic::Ordering;
use std::time::Instant;

use crate::common::batching::{Outcome, assert_all_is_back, finish_from, step};
use crate::common::queueing::queueing;
use crate::common::{demo, engine};
use keel_array::Runtime;
use keel_engine::batch::{BatchOptions, BatchRequest, Batcher};
use keel_engine::{Depth, EngineOptions, SamplerOptions, SpeculationOptions};

/// A batch whose answers may draft and do not.
fn plain(runtime: &Runtime) -> Batcher {
    let options = EngineOptions { drafts: 3, context: 512, sequences: 2, ..EngineOptions::default() };
    let speculation = SpeculationOptions { depth: Depth::Fixed(0), ..SpeculationOptions::default() };
    Batcher::new(engine(&demo(), runtime, options), BatchOptions { speculation, ..BatchOptions::default() })
}

/// The MTP head catches up with a batch in passes of its own, and there is always a step under way meanwhile.
#[test]
fn the_head_catches_up_after_a_step_under_way() {
    let (runtime, queueing) = queueing(512);
    let mut batcher = plain(&runtime);
    let now = Instant::now();
    (0..2).for_each(|i| batcher.submit(BatchRequest::new(i, vec![5, 9, 3], 120), now).expect("accepted"));
    let mut outcomes: Vec<Outcome> = (0..2).map(|_| Outcome::default()).collect();
    queueing.take_events();
    for _ in 0..110 {
        step(&mut batcher, now, &mut outcomes);
    }
    let events = queueing.take_events();
    let mut in_flight = events.chars().scan(0, |runs, event| {
        *runs += if event == 'L' { 1 } else { -1 };
        Some(*runs)
    });
    assert!(in_flight.all(|runs| runs > 0), "{events}");
    // A step has two programs. The head lags behind by a row more after each, and may lag behind by five.
    let passes = events.matches('L').count() - 2 * 111;
    assert!((18..=30).contains(&passes), "{passes} passes of the head: {events}");
    finish_from(&mut batcher, outcomes);
    assert_all_is_back(&mut batcher);
}

/// Where the host draws, each step is waited for. Nothing is kept for the head, and it runs no rows.
#[test]
fn an_answer_that_may_not_draft_costs_nothing_of_the_head() {
    const TOKENS: usize = 130;
    let (runtime, queueing) = queueing(512);
    let (mut batcher, now) = (plain(&runtime), Instant::now());
    let hidden_bytes = batcher.engine().model().config.hidden * size_of::<f32>();
    let sampler = SamplerOptions { repetition_penalty: 1.2, ..SamplerOptions::default() };
    let request = BatchRequest::new(0, vec![5, 9, 3], TOKENS);
    batcher.submit(BatchRequest { sampler, speculate: false, ..request }, now).expect("accepted");
    queueing.large_bytes.store(hidden_bytes, Ordering::Relaxed);
    queueing.take_events();
    let outcomes = finish_from(&mut batcher, vec![Outcome::default()]);
    assert_eq!(outcomes[0].tokens.len(), TOKENS);
    let events = queueing.take_events();
    let [launches, reads] = ['L', 'R'].map(|event| events.matches(event).count());
    assert_eq!((launches, reads), (TOKENS, TOKENS), "a program and a row of logits for each token: {events}");
    assert_all_is_back(&mut batcher);
}

/// Every launch of a step after which the head catches up fails once. The one that is the head's pass ends nothing.
#[test]
fn a_catch_up_that_fails_costs_no_token() {
    let now = Instant::now();
    // Runs two answers. Launch `number` of step `at` fails. Returns the launches of each step.
    let answers = |fault: Option<(usize, usize)>| {
        let (runtime, queueing) = queueing(512);
        let mut batcher = plain(&runtime);
        (0..2).for_each(|i| batcher.submit(BatchRequest::new(i, vec![5, 9, 3], 40), now).expect("accepted"));
        let mut outcomes: Vec<Outcome> = (0..2).map(|_| Outcome::default()).collect();
        let mut launches = Vec::new();
        queueing.take_events();
        while !batcher.is_idle() {
            if let Some((_, number)) = fault.filter(|&(at, _)| at == launches.len()) {
                queueing.until.store(number, Ordering::Relaxed);
            }
            step(&mut batcher, now, &mut outcomes);
            launches.push(queueing.take_events().matches('L').count());
        }
        let failed = batcher.status().failed_steps;
        assert_all_is_back(&mut batcher);
        (launches, outcomes, failed)
    };
    let (launches, want, _) = answers(None);
    let at = (10..30).find(|&at| launches[at] == 3).expect("the head catches up");
    let is_spared = |&number: &usize| {
        let (_, got, failed) = answers(Some((at, number)));
        let same = got.iter().zip(&want).all(|(got, want)| got.tokens == want.tokens);
        assert!(same || failed > 0, "tokens change only with a failed step");
        same && failed == 0
    };
    assert_eq!((0..3).filter(is_spared).count(), 1, "the head's pass alone");
}

/// The head needs hidden states that the host reads while the next step runs. Where they cannot be read, answers go on
/// without drafts.
#[test]
fn hidden_states_that_cannot_be_read_end_no_answer() {
    let now = Instant::now();
    let answers = |breaks: bool| {
        let (runtime, queueing) = queueing(512);
        let mut batcher = plain(&runtime);
        (0..2).for_each(|i| batcher.submit(BatchRequest::new(i, vec![5, 9, 3], 40), now).expect("accepted"));
        let mut outcomes: Vec<Outcome> = (0..2).map(|_| Outcome::default()).collect();
        for number in 0..20 {
            queueing.breaks_settled_reads.store(breaks && number >= 10, Ordering::Relaxed);
            step(&mut batcher, now, &mut outcomes);
        }
        queueing.breaks_settled_reads.store(false, Ordering::Relaxed);
        let outcomes = finish_from(&mut batcher, outcomes);
        assert_all_is_back(&mut batcher);
        outcomes
    };
    for (outcome, want) in answers(true).iter().zip(answers(false)) {
        assert!(outcome.error.is_none(), "{:?}", outcome.error);
        assert_eq!((&outcome.tokens, outcome.finish), (&want.tokens, want.finish));
        assert_eq!(want.tokens.len(), 40);
    }
}
