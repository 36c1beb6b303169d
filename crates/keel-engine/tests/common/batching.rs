//! Runs a batch to its end.

use std::time::Instant;

use keel_array::Compute;
use keel_engine::batch::{BatchEvent, BatchOptions, BatchRequest, Batcher, SequenceEvent};
use keel_engine::{EngineError, EngineOptions, FinishReason};

use super::{engine, expected, fixture, runtime};

/// Six sequences and a pool of 30 pages.
pub fn options() -> EngineOptions {
    EngineOptions {
        drafts: 0,
        context: 1024,
        sequences: 6,
        prefill_step: 256,
        checkpoints: 24,
        pool_pages: Some(30),
        compute: Compute::Auto,
        ..EngineOptions::default()
    }
}

/// A batch on a fixture.
pub fn batcher(name: &str, batch: BatchOptions) -> Batcher {
    batcher_with(name, options(), batch)
}

pub fn batcher_with(name: &str, options: EngineOptions, batch: BatchOptions) -> Batcher {
    Batcher::new(engine(&fixture(name), &runtime(2), options), batch)
}

/// Ids that differ with the seed and with the fixture.
pub fn prompt(name: &str, seed: u32, len: usize) -> Vec<u32> {
    let ids = expected(&fixture(name)).ids;
    (0..len as u32).map(|i| (ids[i as usize % ids.len()] + i * 7 + seed * 13) % 500).collect()
}

/// The outcome of a request.
#[derive(Debug, Default)]
pub struct Outcome {
    pub tokens: Vec<u32>,
    pub cached: usize,
    pub read: Vec<f32>,
    pub finish: Option<FinishReason>,
    pub error: Option<EngineError>,
}

/// Runs one step. Outcomes are indexed by request id.
pub fn step(batcher: &mut Batcher, now: Instant, outcomes: &mut [Outcome]) {
    for SequenceEvent { id, event } in batcher.step(now) {
        let outcome = &mut outcomes[id as usize];
        match event {
            BatchEvent::Started { cached_tokens, .. } => outcome.cached = cached_tokens,
            BatchEvent::Prefilled(_) => {}
            BatchEvent::Read(values) => outcome.read = values,
            BatchEvent::Token { id, .. } => outcome.tokens.push(id),
            BatchEvent::Finished(reason) => outcome.finish = Some(reason),
            BatchEvent::Failed(error) => outcome.error = Some(error),
        }
    }
}

/// Runs until nothing is left. Outcomes are indexed by request id.
pub fn finish(batcher: &mut Batcher, count: usize) -> Vec<Outcome> {
    finish_from(batcher, (0..count).map(|_| Outcome::default()).collect())
}

/// The same after some of it.
pub fn finish_from(batcher: &mut Batcher, mut outcomes: Vec<Outcome>) -> Vec<Outcome> {
    let now = Instant::now();
    for _ in 0..10_000 {
        if batcher.is_idle() {
            return outcomes;
        }
        step(batcher, now, &mut outcomes);
    }
    panic!("the batch does not come to an end");
}

pub fn run(batcher: &mut Batcher, requests: Vec<BatchRequest>) -> Vec<Outcome> {
    let count = requests.len();
    requests.into_iter().for_each(|r| batcher.submit(r, Instant::now()).expect("accepted"));
    finish(batcher, count)
}

pub fn assert_all_is_back(batcher: &mut Batcher) {
    batcher.forget_prefixes();
    assert!(batcher.engine().cache().is_idle(), "{:?}", batcher.status());
}
