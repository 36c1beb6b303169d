//! Failure 2: every speculative step copied all recurrent states for a rollback that never came: 147 MB a step, which
//! is 37 GB in 256 steps. Here speculation never copies states, so memory does not grow.

mod common;

use std::sync::Mutex;

use common::{engine, resident_bytes, runtime};
use keel_array::Runtime;
use keel_engine::{
    Depth, Engine, EngineOptions, GenerateOptions, SamplerOptions, SpeculationOptions, TokenIterator,
};

/// The resident set is that of the process, so only one test runs at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn demo() -> (Runtime, Engine) {
    let folder = common::demo();
    let options =
        EngineOptions { context: 2560, prefill_step: 256, drafts: 8, checkpoints: 1, ..Default::default() };
    let runtime = runtime(2);
    let engine = engine(&folder, &runtime, options);
    (runtime, engine)
}

/// Bytes in the ledger, and bytes that the process holds in memory.
fn held(runtime: &Runtime) -> (u64, Option<f64>) {
    (runtime.ledger().active().total(), resident_bytes())
}

#[test]
fn memory_does_not_grow_over_256_speculative_steps() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let (runtime, mut engine) = demo();
    let copy_bytes = engine.cache().spec().slot_bytes() as f64;
    for optimistic in [false, true] {
        let sequence = engine.open().expect("a slot is free");
        let speculation = SpeculationOptions { depth: Depth::Fixed(5), optimistic, ..Default::default() };
        let options = GenerateOptions { max_tokens: 2200, ..GenerateOptions::default() };
        let mut tokens = common::drafting(&mut engine, sequence, &[1, 250, 33], options, speculation);
        let run = |tokens: &mut TokenIterator<'_>, rounds: u64| {
            while tokens.counters().expect("it drafts").rounds < rounds {
                tokens.next().expect("goes on").expect("runs");
            }
        };
        run(&mut tokens, 20);
        let before = held(&runtime);
        run(&mut tokens, 20 + 256);
        let after = held(&runtime);
        drop(tokens);
        assert_eq!(before.0, after.0, "bytes in the ledger");
        let (Some(before), Some(after)) = (before.1, after.1) else {
            keel_testkit::skipped!("this system does not tell the resident set");
            continue;
        };
        // New tokens touch planned pages. One copied state per step would be far above this bound.
        let kv_bytes = 256.0 * 6.0 * engine.cache().spec().token_bytes() as f64;
        assert!(256.0 * copy_bytes > 20.0 * kv_bytes, "the bound tells the two apart");
        assert!(after - before <= 1.1 * kv_bytes, "the process grew by {} bytes", after - before);
    }
}

#[test]
fn twenty_requests_leave_what_two_left() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let (runtime, mut engine) = demo();
    let mut readings = Vec::new();
    for request in 0..20u32 {
        let sequence = engine.open().expect("a slot is free");
        // Two requests take turns. Their depths follow nominal costs, so the memory that they touch does not depend on
        // the machine's speed.
        let kind = request % 2;
        let prompt: Vec<u32> = (0..150).map(|i| (i * 37 + kind * 11) % 4000).collect();
        let sampler = SamplerOptions { temperature: 1.0, seed: u64::from(kind), ..SamplerOptions::default() };
        let options = GenerateOptions { max_tokens: 120, sampler, ..GenerateOptions::default() };
        let speculation = SpeculationOptions { repeatable: true, ..SpeculationOptions::default() };
        let mut tokens = common::drafting(&mut engine, sequence, &prompt, options, speculation);
        assert_eq!(tokens.by_ref().map_while(Result::ok).count(), 120);
        drop(tokens);
        readings.push(held(&runtime));
    }
    let (second, last) = (readings[1], readings[19]);
    assert_eq!(second.0, last.0, "live bytes");
    if let (Some(second), Some(last)) = (second.1, last.1) {
        assert!((last / second - 1.0).abs() <= 0.01, "{second} bytes resident, then {last}");
    } else {
        keel_testkit::skipped!("this system does not tell the resident set");
    }
    assert!(engine.cache().is_idle());
}
