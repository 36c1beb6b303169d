//! Failure 1: a recurrent layer cached a slice of each chunk of its input, and the slice kept the whole chunk alive:
//! 540 KB of growth per token instead of 20. Here state is written in place, so memory grows by the KV bytes alone.

mod common;

use std::sync::Mutex;

use common::{engine, exact, fixture, resident_bytes, runtime};
use keel_array::{Array, Category, DType, Runtime};
use keel_engine::{Engine, EngineOptions};

/// The resident set is that of the process, so only one test runs at a time.
static ALONE: Mutex<()> = Mutex::new(());

const FROM: usize = 1024;
const TO: usize = 16 * 1024;

/// By how much the growth of the resident set may differ from the bytes of keys and values, as a share of them.
const TOLERANCE: f64 = 0.01;

/// Bytes of the keys and values of a token.
fn kv_bytes(engine: &Engine) -> f64 {
    // The layer of the MTP head is not run, so its pages are never touched.
    let layers = engine.model().blocks.len();
    let spec = engine.cache().spec();
    spec.layers[..layers].iter().map(|l| l.token_bytes(spec.format.kv)).sum::<usize>() as f64
}

/// Growth per token in the resident set and in the ledger, from `FROM` to `TO` tokens of one sequence. `after_step` is
/// called after each step of the prompt. `None`, recorded as a skipped test, if the system does not tell the resident
/// set.
fn growth(engine: &mut Engine, runtime: &Runtime, mut after_step: impl FnMut()) -> Option<(f64, f64)> {
    let mut sequence = engine.open().expect("a slot is free");
    let mut logits = Vec::new();
    let prompt = |from: usize, to: usize| (from..to).map(|i| (i * 37 % 500) as u32).collect::<Vec<_>>();
    engine.prefill(&mut sequence, &prompt(0, FROM), &mut logits, &mut |_| ()).expect("runs");
    let Some(resident) = resident_bytes() else {
        keel_testkit::skipped!("this system does not tell the resident set");
        return None;
    };
    let before = (resident, runtime.ledger().active().total() as f64);
    engine.prefill(&mut sequence, &prompt(FROM, TO), &mut logits, &mut |_| after_step()).expect("runs");
    let after = (resident_bytes()?, runtime.ledger().active().total() as f64);
    engine.release(sequence);
    let per_token = |a: f64, b: f64| (b - a) / (TO - FROM) as f64;
    Some((per_token(before.0, after.0), per_token(before.1, after.1)))
}

fn long_context() -> EngineOptions {
    EngineOptions { context: TO, sequences: 1, prefill_step: 512, all_logits: false, ..exact() }
}

/// Counts memory as it is touched, not in units of 2 MB.
#[cfg(target_os = "linux")]
fn count_small_pages() {
    rustix::thread::disable_transparent_huge_pages(true).expect("the kernel has small pages");
}

#[cfg(not(target_os = "linux"))]
fn count_small_pages() {}

#[test]
fn a_token_of_prefill_costs_its_keys_and_values_and_nothing_else() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let folder = fixture("qwen3_5_real_head_dims");
    count_small_pages();
    let runtime = runtime(2);
    let mut engine = engine(&folder, &runtime, long_context());
    let kv_bytes = kv_bytes(&engine);
    let Some((resident, ledger)) = growth(&mut engine, &runtime, || ()) else { return };
    assert_eq!(ledger, 0.0, "all memory was planned");
    let ratio = resident / kv_bytes;
    assert!(
        (ratio - 1.0).abs() <= TOLERANCE,
        "{resident:.0} bytes a token in memory, {kv_bytes} of keys and values"
    );
}

#[test]
fn the_check_sees_a_slice_that_keeps_its_parent() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let folder = fixture("qwen3_5_real_head_dims");
    count_small_pages();
    let runtime = runtime(2);
    let mut engine = engine(&folder, &runtime, long_context());
    let kv_bytes = kv_bytes(&engine);
    let (ones, mut held) = (vec![1.0f32; 512 * 512], Vec::new());
    let leak = || {
        // As the failing system did: a chunk of 512 rows of 512 channels stays alive for its last three rows.
        let chunk = Array::persistent(&runtime, Category::User, [512, 512], DType::F32).expect("fits");
        chunk.write(&ones).expect("fits");
        held.push(chunk);
    };
    let Some((resident, ledger)) = growth(&mut engine, &runtime, leak) else { return };
    assert!(ledger > 2000.0, "the leak of 2,048 bytes a token is not seen: {ledger}");
    assert!(
        resident / kv_bytes > 1.0 + TOLERANCE,
        "{resident:.0} bytes a token in memory, {kv_bytes} of keys and values: the leak is not seen"
    );
}
