//! A sequence gives its memory back when it is dropped, wherever that happens.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::common::queueing::runtimes;
use crate::common::{PLAIN, decoded, demo, engine, fixture, runtime};
use keel_cache::CacheError;
use keel_engine::{
    Depth, Engine, EngineError, EngineOptions, GenerateOptions, SpeculationOptions, TokenIterator,
};

const PROMPT: [u32; 4] = [509, 496, 258, 420];

fn options(drafts: usize) -> EngineOptions {
    EngineOptions { context: 512, sequences: 2, checkpoints: 2, drafts, ..EngineOptions::default() }
}

fn eight() -> GenerateOptions {
    GenerateOptions { max_tokens: 8, disposable: true, ..GenerateOptions::default() }
}

/// The first tokens of an iterator, which is dropped with steps under way.
fn begun(engine: &mut Engine, tokens: usize) -> Vec<u32> {
    let sequence = engine.open().expect("a slot is free");
    let iterator = TokenIterator::new(engine, sequence, &PROMPT, eight(), &mut |_| ()).expect("fits");
    iterator.take(tokens).map(|token| token.expect("runs")).collect()
}

#[test]
fn dropped_sequences_are_not_lost() {
    let mut engine = engine(&demo(), &runtime(2), options(0));
    for round in 0..3 {
        let mut held = decoded(&mut engine, &PROMPT, &[7, 8]);
        engine.cache_mut().checkpoint(&mut held).expect("a checkpoint is free");
        let twin = engine.cache_mut().fork(&held).expect("a slot is free");
        assert!(engine.open().is_err(), "both sequences are in use");
        drop(held);
        assert!(!engine.cache().is_idle(), "the twin holds the shared page");
        drop(twin);
        assert!(engine.cache().is_idle(), "round {round}");
    }
}

/// Its pages and its slot have numbers of the other engine's pools.
#[test]
fn a_sequence_of_another_engine_is_refused() {
    let [mut own, mut other] = [(); 2].map(|()| engine(&demo(), &runtime(2), options(0)));
    let mut sequence = decoded(&mut own, &PROMPT, &[7, 8]);
    let cache = other.cache_mut();
    let refused = [
        cache.rewind(&mut sequence, 4).map(drop),
        cache.rewind(&mut sequence, 0).map(drop),
        cache.reset(&mut sequence),
        cache.own_last_page(&mut sequence),
        cache.fork(&sequence).map(drop),
    ];
    for result in refused {
        assert!(matches!(result, Err(CacheError::Foreign)), "{result:?}");
    }
    own.cache_mut().rewind(&mut sequence, 0).expect("it is its own");
    drop(sequence);
    assert!(own.cache().is_idle() && other.cache().is_idle());
}

/// The other engine has fewer slots than the number of this one.
#[test]
fn a_sequence_of_a_larger_engine_runs_in_no_step_of_a_smaller_one() {
    let mut larger = engine(&demo(), &runtime(2), options(0));
    let mut smaller = engine(&demo(), &runtime(2), EngineOptions { sequences: 1, ..options(0) });
    let first = larger.open().expect("a slot is free");
    let mut second = decoded(&mut larger, &PROMPT, &[7, 8]);
    let refused = smaller.decode(&mut [&mut second], &[5]).expect_err("it is not its own");
    assert!(matches!(refused, EngineError::Cache(CacheError::Foreign)), "{refused}");
    smaller.release(second);
    larger.release(first);
    assert!(larger.cache().is_idle() && smaller.cache().is_idle());
}

/// Without a page for a copy of the shared one, the sequence stays as it is, and so does the other one.
#[test]
fn a_sequence_that_cannot_go_back_is_unchanged() {
    let options = EngineOptions { pool_pages: Some(1), ..options(0) };
    let mut engine = engine(&fixture("llama"), &runtime(2), options);
    let tokens = |seed: u32, count: u32| (0..count).map(|i| (i * 7 + seed) % 500).collect::<Vec<_>>();
    let mut first = engine.open().expect("a slot is free");
    let mut logits = [Vec::new(), Vec::new()];
    engine.prefill(&mut first, &tokens(3, 256), &mut logits[0], &mut |_| ()).expect("fits");
    let mut twin = engine.cache_mut().fork(&first).expect("a full page is shared");
    for _ in 0..2 {
        let refused = engine.cache_mut().rewind(&mut twin, 128).expect_err("no page is free");
        assert!(matches!(refused, CacheError::NoPages { .. }), "{refused}");
        assert_eq!(twin.len(), 256);
    }
    // Once the page is its own, it needs no other.
    engine.release(first);
    assert_eq!(engine.cache_mut().rewind(&mut twin, 128).expect("nothing is copied"), 128);
    engine.prefill(&mut twin, &tokens(3, 256)[128..], &mut logits[1], &mut |_| ()).expect("fits");
    assert_eq!(logits[0], logits[1]);
    engine.release(twin);
    assert!(engine.cache().is_idle());
}

#[test]
fn a_parked_sequence_gives_its_host_memory_back() {
    let options = EngineOptions { swap_bytes: 3 << 20, ..options(0) };
    let mut engine = engine(&demo(), &runtime(2), options);
    let blocks = engine.cache().free_swap_blocks();
    let mut parked = decoded(&mut engine, &PROMPT, &[7, 8]);
    engine.cache_mut().park(&mut parked).expect("there is room");
    assert!(engine.cache().free_swap_blocks() < blocks);
    drop(parked);
    assert_eq!(engine.cache().free_swap_blocks(), blocks);
    assert!(engine.cache().is_idle());
}

/// A host that runs ahead has a step of the sequence under way when the iterator is dropped. The next sequence gets the
/// same slot and is not disturbed.
#[test]
fn an_iterator_may_be_dropped_in_the_middle() {
    for folder in [demo(), fixture(PLAIN[0])] {
        for runtime in runtimes().into_iter().chain([runtime(2)]) {
            let mut engine = engine(&folder, &runtime, options(0));
            let whole = begun(&mut engine, 8);
            for tokens in 0..6 {
                assert_eq!(begun(&mut engine, tokens), whole[..tokens], "{}", folder.display());
                assert!(engine.cache().is_idle());
            }
            assert_eq!(begun(&mut engine, 8), whole, "{}", folder.display());
        }
    }
}

#[test]
fn a_drafting_iterator_may_be_dropped_in_the_middle() {
    let mut engine = engine(&demo(), &runtime(2), options(2));
    let speculation = SpeculationOptions { depth: Depth::Fixed(2), ..SpeculationOptions::default() };
    for tokens in [0, 1, 5] {
        let sequence = engine.open().expect("a slot is free");
        let iterator = crate::common::drafting(&mut engine, sequence, &PROMPT, eight(), speculation);
        assert_eq!(iterator.take(tokens).count(), tokens);
        assert!(engine.cache().is_idle());
    }
}

#[test]
fn a_panic_of_the_caller_gives_the_sequence_back() {
    let mut engine = engine(&demo(), &runtime(2), options(0));
    let panics = catch_unwind(AssertUnwindSafe(|| {
        let _sequence = decoded(&mut engine, &PROMPT, &[7]);
        panic!("of the caller, as this test wants");
    }));
    assert!(panics.is_err() && engine.cache().is_idle());
}

#[test]
fn a_dropped_checkpoint_is_free_again() {
    let mut engine = engine(&demo(), &runtime(2), options(0));
    let sequence = decoded(&mut engine, &PROMPT, &[7]);
    let saved = engine.cache_mut().save_checkpoint(&sequence).expect("runs");
    assert!(saved.is_some() && engine.cache().free_checkpoints() == 1);
    drop(saved);
    assert_eq!(engine.cache().free_checkpoints(), 2);
}
