//! Drawing on the host takes memory for the engine, which is planned, and not for each sequence. It is the only test of
//! its process, because it counts the heap.

mod common;

use std::alloc::System;
use std::time::Instant;

use common::{demo, engine, runtime};
use keel_array::Category;
use keel_engine::batch::{BatchOptions, BatchRequest, Batcher};
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

/// What a sequence has in addition: its prompt, its tokens and its pages.
const OWN_BYTES: usize = 8 << 10;

#[test]
fn drawing_takes_the_host_memory_that_was_planned() {
    for drafts in [0, DRAFTS] {
        let options =
            EngineOptions { drafts, context: 256, sequences: SEQUENCES, ..EngineOptions::default() };
        let depth = Depth::Fixed(drafts.max(1));
        let speculation = SpeculationOptions { depth, ..SpeculationOptions::default() };
        let batch = BatchOptions { speculation, ..BatchOptions::default() };
        let mut batch = Batcher::new(engine(&demo(), &runtime(2), options), batch);
        let planned = batch.engine().runtime().ledger().active().get(Category::Host) as usize;
        // This part is there before the first request.
        let row = batch.engine().model().config.vocab * LogitsRow::TOKEN_BYTES;
        let before = heap_bytes();
        (0..SEQUENCES as u64).for_each(|id| batch.submit(request(id), Instant::now()).expect("fits"));
        for _ in 0..6 {
            batch.step(Instant::now());
        }
        let (taken, status) = (heap_bytes() - before, batch.status());
        assert_eq!(status.running.len(), SEQUENCES);
        assert!(status.running.iter().all(|sequence| sequence.generated_tokens > 2));
        assert_eq!(drafts > 0, status.running.iter().any(|sequence| sequence.drafted > 0));
        let most = planned - row + SEQUENCES * OWN_BYTES;
        assert!(taken < most, "{drafts} drafts: {taken} bytes of heap, {most} expected of {planned} planned");
    }
}
