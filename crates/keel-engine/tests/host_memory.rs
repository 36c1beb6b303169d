//! Drawing on the host takes memory for the engine, which is planned, and not for each sequence. Hidden states of
//! drafts and sums of hidden states are planned, too. It is the only test of its process, because it counts the heap.

mod common;

use std::alloc::System;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::{demo, engine, runtime};
use keel_array::Category;
use keel_engine::batch::{BatchOptions, BatchRequest, Batcher, Constraint, Readout};
use keel_engine::{Depth, EngineOptions, LogitsRow, SamplerOptions, SpeculationOptions};
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static HEAP: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const SEQUENCES: usize = 8;
const DRAFTS: usize = 4;

fn heap_bytes() -> usize {
    let stats = HEAP.stats();
    stats.bytes_allocated.saturating_sub(stats.bytes_deallocated)
}

/// Every token of the vocabulary may be drawn, by the host because of the penalty.
fn request(id: u64) -> BatchRequest {
    let prompt = (0..40).map(|j| (j * 7 + id as u32 * 131 + 5) % 500).collect();
    let sampler =
        SamplerOptions { temperature: 100.0, presence_penalty: 0.1, seed: id, ..SamplerOptions::default() };
    BatchRequest { sampler, top_logprobs: Some(3), ..BatchRequest::new(id, prompt, 100) }
}

/// Bytes that a sequence has in addition: its prompt, its tokens and its pages.
const OWN_BYTES: usize = 8 << 10;

/// The planned host memory of an engine.
fn planned(batch: &Batcher) -> usize {
    batch.engine().runtime().ledger().active().get(Category::Host) as usize
}

/// The heap that a batch takes for its requests in some steps.
fn taken(batch: &mut Batcher, requests: impl Iterator<Item = BatchRequest>, steps: usize) -> usize {
    let before = heap_bytes();
    requests.for_each(|request| batch.submit(request, Instant::now()).expect("fits"));
    for _ in 0..steps {
        batch.step(Instant::now());
    }
    heap_bytes().saturating_sub(before)
}

#[test]
fn sequences_take_the_host_memory_that_was_planned() {
    drawing();
    means();
    sitting_out();
    logits_of_every_token();
}

/// The hidden states of a step are not kept for the next one.
fn logits_of_every_token() {
    const TOKENS: usize = 1024;
    let options =
        EngineOptions { all_logits: true, context: TOKENS, prefill_step: 64, ..EngineOptions::default() };
    let mut engine = engine(&demo(), &runtime(2), options);
    let prompt: Vec<u32> = (0..TOKENS as u32).map(|i| (i * 7 + 5) % 500).collect();
    let mut run = || {
        let mut sequence = engine.open().expect("a slot is free");
        let (before, mut most) = (heap_bytes(), 0);
        let mut sink = |_: &[f32]| {
            most = most.max(heap_bytes().saturating_sub(before));
            Ok(())
        };
        engine.all_logits(&mut sequence, &prompt, false, &mut sink, None).expect("the prompt runs");
        engine.release(sequence);
        most
    };
    // The first run traces its steps.
    run();
    let taken = run();
    let hidden_bytes = TOKENS * engine.model().config.hidden * size_of::<f32>();
    assert!(
        taken < hidden_bytes / 4,
        "{taken} bytes of heap, the prompt's hidden states have {hidden_bytes}"
    );
}

/// Allows every token. It is ready in the first rounds alone, in more of them the greater its number is.
struct Leaving {
    id: u64,
    rounds: Arc<AtomicU64>,
}

impl Constraint for Leaving {
    fn mask(&mut self, _: &mut [f32]) -> Result<(), String> {
        Ok(())
    }

    fn is_ready(&mut self, _: Duration) -> bool {
        self.rounds.load(Ordering::Relaxed) <= self.id
    }

    fn accept(&mut self, _: u32) -> Result<(), String> {
        Ok(())
    }

    fn is_complete(&self) -> bool {
        false
    }
}

/// Each sequence sits out from another round on, and keeps the hidden states of its own rows alone.
fn sitting_out() {
    const SEQUENCES: usize = 16;
    let options =
        EngineOptions { drafts: DRAFTS, context: 256, sequences: SEQUENCES, ..EngineOptions::default() };
    let speculation = SpeculationOptions { depth: Depth::Fixed(DRAFTS), ..SpeculationOptions::default() };
    let options_of_batch = BatchOptions { speculation, ..BatchOptions::default() };
    let mut batch = Batcher::new(engine(&demo(), &runtime(2), options), options_of_batch);
    let rounds = Arc::new(AtomicU64::new(0));
    for id in 0..SEQUENCES as u64 {
        let constraint = Leaving { id, rounds: Arc::clone(&rounds) };
        let prompt = vec![5, 9, id as u32];
        let request =
            BatchRequest { constraint: Some(Box::new(constraint)), ..BatchRequest::new(id, prompt, 200) };
        batch.submit(request, Instant::now()).expect("fits");
    }
    let step = |batch: &mut Batcher| drop(batch.step(Instant::now()));
    // Each has drafted in two rounds then.
    (0..4).for_each(|_| step(&mut batch));
    let before = heap_bytes();
    for round in 0..SEQUENCES as u64 {
        rounds.store(round, Ordering::Relaxed);
        step(&mut batch);
    }
    let (taken, status) = (heap_bytes().saturating_sub(before), batch.status());
    assert_eq!(status.running.len(), SEQUENCES);
    let given: Vec<usize> = status.running.iter().map(|sequence| sequence.generated_tokens).collect();
    assert!(given[0] + SEQUENCES / 2 < given[SEQUENCES - 1], "{given:?}");
    let hidden_bytes = batch.engine().model().config.hidden * size_of::<f32>();
    let round = SEQUENCES * (DRAFTS + 1) * hidden_bytes;
    assert!(taken < round, "{taken} bytes of heap, a round has {round}");
}

/// Each of the prompts is in several steps, so that its sums wait on the host.
fn means() {
    const STEP: usize = 64;
    let load = |row_hidden| {
        let options = EngineOptions {
            row_hidden,
            context: 512,
            sequences: SEQUENCES,
            prefill_step: STEP,
            ..EngineOptions::default()
        };
        Batcher::new(engine(&demo(), &runtime(2), options), BatchOptions::default())
    };
    let without = planned(&load(false));
    let mut batch = load(true);
    let hidden = batch.engine().model().config.hidden;
    let (rows, sums) = (STEP * hidden * size_of::<f32>(), SEQUENCES * hidden * size_of::<f64>());
    assert_eq!(planned(&batch) - without, rows + sums);
    let request = |id: u64| {
        let prompt = (0..4 * STEP as u32).map(|j| (j * 7 + id as u32 * 131 + 5) % 500).collect();
        BatchRequest::to_read(id, prompt, Readout::MeanHidden)
    };
    let taken = taken(&mut batch, (0..SEQUENCES as u64).map(request), 2 * SEQUENCES);
    let running = batch.status().running;
    assert_eq!(running.len(), SEQUENCES);
    assert!(running.iter().all(|of| (1..of.prompt_tokens).contains(&of.prefilled_tokens)), "{running:?}");
    let most = rows + sums + SEQUENCES * OWN_BYTES;
    assert!(taken < most, "{taken} bytes of heap, {most} expected");
}

fn drawing() {
    for drafts in [0, DRAFTS] {
        let options =
            EngineOptions { drafts, context: 256, sequences: SEQUENCES, ..EngineOptions::default() };
        let depth = Depth::Fixed(drafts.max(1));
        let speculation = SpeculationOptions { depth, ..SpeculationOptions::default() };
        let batch = BatchOptions { speculation, ..BatchOptions::default() };
        let mut batch = Batcher::new(engine(&demo(), &runtime(2), options), batch);
        let planned = planned(&batch);
        // This part is there before the first request.
        let row = batch.engine().model().config.vocab * LogitsRow::TOKEN_BYTES;
        let taken = taken(&mut batch, (0..SEQUENCES as u64).map(request), 6);
        let status = batch.status();
        assert_eq!(status.running.len(), SEQUENCES);
        assert!(status.running.iter().all(|sequence| sequence.generated_tokens > 2));
        assert_eq!(drafts > 0, status.running.iter().any(|sequence| sequence.drafted > 0));
        let most = planned - row + SEQUENCES * OWN_BYTES;
        assert!(taken < most, "{drafts} drafts: {taken} bytes of heap, {most} expected of {planned} planned");
    }
}
