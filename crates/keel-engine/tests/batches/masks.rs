//! Sequences whose masks take long. They wait for them alone, on backends that queue and on others. With
//! `KEEL_TEST_CUDA=1` the same on a GPU.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::common::batching::{Outcome, assert_all_is_back, finish_from, run, step};
use crate::common::queueing::waiting_and_queueing;
use crate::common::{demo, engine, runtime};
use keel_array::Runtime;
use keel_engine::batch::{BatchOptions, BatchRequest, Batcher, Constraint};
use keel_engine::{Depth, EngineOptions, SamplerOptions, SpeculationOptions};

/// A batch on the built-in model that makes as many drafts in each round.
fn drafting(runtime: &Runtime, drafts: usize) -> Batcher {
    let options = EngineOptions {
        drafts,
        context: 512,
        sequences: 4,
        prefill_step: 128,
        pool_pages: Some(9),
        ..EngineOptions::default()
    };
    let depth = Depth::Fixed(drafts.max(1));
    let speculation = SpeculationOptions { depth, ..SpeculationOptions::default() };
    let batch = BatchOptions { speculation, ..BatchOptions::default() };
    Batcher::new(engine(&demo(), runtime, options), batch)
}

/// A greedy request.
fn request(id: u64, max_tokens: usize) -> BatchRequest {
    let ids = (0..30 + 37 * id as u32).map(|j| (j * 7 + id as u32 * 131 + 5) % 500).collect();
    BatchRequest::new(id, ids, max_tokens)
}

/// Allows every token but one, and says whether its mask is ready.
struct Late {
    is_ready: Arc<AtomicBool>,
    was_early: Arc<AtomicBool>,
}

impl Constraint for Late {
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), String> {
        self.was_early.fetch_or(!self.is_ready.load(Ordering::Relaxed), Ordering::Relaxed);
        logits[7] = f32::NEG_INFINITY;
        Ok(())
    }

    fn is_ready(&mut self, _patience: Duration) -> bool {
        self.is_ready.load(Ordering::Relaxed)
    }

    fn accept(&mut self, _token: u32) -> Result<(), String> {
        Ok(())
    }

    fn is_complete(&self) -> bool {
        false
    }
}

/// Allows every token but one. A thread computes its masks: each is there once it was asked for, or the sixth time
/// where it is late.
struct Apart {
    /// Every sixth position from here on is late.
    late: usize,
    at: usize,
    /// How often the mask here was asked for.
    asked: usize,
    was_early: Arc<AtomicBool>,
}

impl Apart {
    fn is_there(&self) -> bool {
        self.asked >= if self.at % 6 == self.late { 6 } else { 1 }
    }
}

impl Constraint for Apart {
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), String> {
        // The first mask is there from the start.
        self.was_early.fetch_or(self.at > 0 && !self.is_there(), Ordering::Relaxed);
        logits[7] = f32::NEG_INFINITY;
        Ok(())
    }

    fn is_ready(&mut self, _patience: Duration) -> bool {
        self.asked += 1;
        self.is_there()
    }

    fn accept(&mut self, _token: u32) -> Result<(), String> {
        (self.at, self.asked) = (self.at + 1, 0);
        Ok(())
    }

    fn is_complete(&self) -> bool {
        false
    }

    fn rollback(&mut self, tokens: usize) -> Result<(), String> {
        (self.at, self.asked) = (self.at - tokens, 0);
        Ok(())
    }
}

#[test]
fn a_round_ends_before_a_mask_that_is_not_there() {
    let was_early = Arc::new(AtomicBool::new(false));
    let run_with = |drafts: usize, late: usize| {
        let mut batcher = drafting(&runtime(2), drafts);
        let apart = Apart { late, at: 0, asked: 0, was_early: Arc::clone(&was_early) };
        let constraint: Option<Box<dyn Constraint>> = Some(Box::new(apart));
        let outcome = run(&mut batcher, vec![BatchRequest { constraint, ..request(0, 45) }]).remove(0);
        assert_all_is_back(&mut batcher);
        (outcome, batcher.status().speculation)
    };
    let (plain, _) = run_with(0, 0);
    // The late mask comes in each place of a round of three drafts.
    for late in 0..6 {
        let (outcome, counters) = run_with(3, late);
        assert!(counters.accepted_total() > 0, "drafts stay");
        assert_eq!((&outcome.tokens, outcome.finish), (&plain.tokens, plain.finish), "late at {late}");
        assert!(!was_early.load(Ordering::Relaxed), "late at {late}: a mask was computed within a round");
    }
}

#[test]
fn a_sequence_that_waits_for_its_mask_waits_alone() {
    // A runtime has one engine.
    let queued = waiting_and_queueing().into_iter().map(|(_, queueing)| (queueing, 0));
    let waited = [0, 2]
        .into_iter()
        .flat_map(|drafts| waiting_and_queueing().into_iter().map(move |(waiting, _)| (waiting, drafts)));
    for (runtime, drafts) in queued.chain(waited) {
        {
            let mut batcher = drafting(&runtime, drafts);
            let (is_ready, was_early) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicBool::new(false)));
            let late = || {
                let (is_ready, was_early) = (Arc::clone(&is_ready), Arc::clone(&was_early));
                let constraint: Box<dyn Constraint> = Box::new(Late { is_ready, was_early });
                BatchRequest { constraint: Some(constraint), ..request(0, 45) }
            };
            let whole = run(&mut batcher, vec![late()]).remove(0);
            let now = Instant::now();
            let mut outcomes = vec![Outcome::default(), Outcome::default()];
            batcher.submit(late(), now).expect("accepted");
            let sampled =
                SamplerOptions { temperature: 0.9, top_k: 50, seed: 5, ..SamplerOptions::default() };
            batcher.submit(BatchRequest { sampler: sampled, ..request(1, 80) }, now).expect("accepted");
            while outcomes[0].tokens.is_empty() {
                step(&mut batcher, now, &mut outcomes);
            }
            is_ready.store(false, Ordering::Relaxed);
            // A row that was submitted before may still come.
            (0..4).for_each(|_| step(&mut batcher, now, &mut outcomes));
            let [held, before] = [0, 1].map(|id| outcomes[id].tokens.len());
            (0..8).for_each(|_| step(&mut batcher, now, &mut outcomes));
            assert_eq!(outcomes[0].tokens.len(), held, "it sits out of the steps");
            assert!(held <= 2 && outcomes[1].tokens.len() >= before + 7, "the other one goes on");
            is_ready.store(true, Ordering::Relaxed);
            let outcomes = finish_from(&mut batcher, outcomes);
            assert_eq!((&outcomes[0].tokens, outcomes[0].finish), (&whole.tokens, whole.finish));
            assert!(!was_early.load(Ordering::Relaxed), "no mask was asked for before it was ready");
            assert_all_is_back(&mut batcher);
        }
    }
}
