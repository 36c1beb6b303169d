//! Speculation changes how fast tokens come, and nothing else.

mod common;

use std::path::PathBuf;

use common::{engine, expected, fixture, runtime};
use keel_array::Compute;
use keel_engine::{
    Depth, Engine, EngineOptions, GenerateOptions, MtpTokenIterator, SpeculationOptions, TokenIterator,
};

/// The fixtures with a multi-token-prediction head.
const WITH_HEAD: [&str; 3] = ["qwen3_5", "qwen3_5_real_head_dims", "qwen3_5_moe"];
const DEPTHS: [usize; 5] = [1, 2, 3, 5, 8];

/// The models of these tests: folder and a prompt.
fn models() -> Vec<(PathBuf, Vec<u32>)> {
    let mut models = vec![(demo(), vec![1, 250, 33, 700, 12, 5])];
    models.extend(WITH_HEAD.iter().filter_map(|name| fixture(name)).map(|folder| {
        let ids = expected(&folder).ids;
        (folder, ids)
    }));
    models
}

fn demo() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models/demo")
}

fn options(sequences: usize, drafts: usize, compute: Compute) -> EngineOptions {
    EngineOptions {
        context: 768,
        sequences,
        prefill_step: 64,
        drafts,
        compute,
        all_logits: false,
        ..EngineOptions::default()
    }
}

fn until(max_tokens: usize) -> GenerateOptions {
    GenerateOptions { max_tokens, ..GenerateOptions::default() }
}

fn fixed(depth: usize) -> SpeculationOptions {
    SpeculationOptions { depth: Depth::Fixed(depth), optimistic: false }
}

fn plain(engine: &mut Engine, prompt: &[u32], max_tokens: usize) -> Vec<u32> {
    let sequence = engine.open().expect("a slot is free");
    let mut tokens =
        TokenIterator::new(engine, sequence, prompt, until(max_tokens), &mut |_| ()).expect("fits");
    let got = tokens.by_ref().collect::<Result<_, _>>().expect("every step runs");
    tokens.release();
    got
}

#[test]
fn greedy_text_does_not_depend_on_speculation() {
    for (folder, prompt) in models() {
        for compute in [Compute::Auto, Compute::F32] {
            let tokens = if compute == Compute::Auto { 512 } else { 64 };
            let mut engine = engine(&folder, &runtime(2), options(1, 8, compute));
            let want = plain(&mut engine, &prompt, tokens);
            for depth in DEPTHS.map(fixed).into_iter().chain([SpeculationOptions::default()]) {
                let sequence = engine.open().expect("a slot is free");
                let mut got =
                    MtpTokenIterator::new(&mut engine, sequence, &prompt, until(tokens), depth, &mut |_| ())
                        .expect("fits");
                let ids: Vec<u32> = got.by_ref().collect::<Result<_, _>>().expect("every round runs");
                let counters = got.counters().clone();
                got.release();
                assert_eq!(ids, want, "{}: {depth:?}", folder.display());
                assert_eq!(counters.tokens as usize, tokens - 1);
                if let Depth::Fixed(depth) = depth.depth {
                    assert!(counters.drafted[depth - 1] > 0, "{depth} drafts are made");
                }
            }
            assert!(engine.cache().is_idle());
        }
    }
}

#[test]
fn the_head_of_the_built_in_model_drafts_well() {
    // Its card: 88.6% of first drafts are accepted, and in 63.2% the first three. This is one text.
    let mut engine = engine(&demo(), &runtime(2), options(1, 3, Compute::Auto));
    let sequence = engine.open().expect("a slot is free");
    let prompt = [1, 250, 33, 700, 12, 5];
    let mut tokens = MtpTokenIterator::new(&mut engine, sequence, &prompt, until(400), fixed(3), &mut |_| ())
        .expect("fits");
    assert_eq!(tokens.by_ref().map_while(Result::ok).count(), 400);
    let counters = tokens.counters();
    let share = |i: usize| counters.accepted[i] as f64 / counters.drafted[0] as f64;
    assert!(share(0) > 0.75 && share(2) > 0.45, "{counters:?}");
}
