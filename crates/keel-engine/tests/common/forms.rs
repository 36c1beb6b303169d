//! Laws that hold in whatever form a cache keeps its values, on the built-in model.

use keel_engine::{Depth, EngineOptions, GenerateOptions, SpeculationOptions};

use super::{all_logits, demo, engine, greedy, runtime};

/// A prompt of several chunks, the last one partial.
pub fn prompt() -> Vec<u32> {
    (0..300).map(|i| (i * 37 + i / 7) % 4000).collect()
}

pub fn expect_same_bits_for_all_steps_and_threads(options: EngineOptions) {
    let logits = |prefill_step, threads| {
        let options = EngineOptions { prefill_step, ..options };
        all_logits(&mut engine(&demo(), &runtime(threads), options), &prompt(), false, false).0
    };
    let whole = logits(2048, 2);
    for (step, threads) in [(64, 1), (128, 3)] {
        assert!(logits(step, threads) == whole, "{options:?}, step {step}, {threads} threads");
    }
}

/// A saved cache continues with the bits of an unbroken run. Returns why an engine with the `other` options refuses it.
pub fn expect_saved_to_continue(options: EngineOptions, other: EngineOptions) -> String {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let path = dir.path().join("cache");
    let ids = prompt();
    let whole = all_logits(&mut engine(&demo(), &runtime(2), options), &ids, false, false).0;
    let mut first = engine(&demo(), &runtime(2), options);
    let mut sequence = first.open().expect("a slot is free");
    first.prefill(&mut sequence, &ids[..64], &mut Vec::new(), &mut |_| ()).expect("runs");
    first.cache().save(&sequence, &ids[..64], "demo", &path).expect("saves");
    let refused = engine(&demo(), &runtime(1), other).cache_mut().load("demo", &path).map(|_| ());
    let mut second = engine(&demo(), &runtime(1), options);
    let (mut sequence, _) = second.cache_mut().load("demo", &path).expect("loads");
    let mut rest = Vec::new();
    let mut sink = |row: &[f32]| {
        rest.extend_from_slice(row);
        Ok(())
    };
    second.all_logits(&mut sequence, &ids[64..], false, &mut sink, None).expect("runs");
    let vocab = second.model().config.vocab;
    assert!(rest == whole[64 * vocab..], "{options:?}: the continuation differs");
    second.release(sequence);
    refused.expect_err("it is of another form").to_string()
}

pub fn expect_drafts_to_change_no_token(options: EngineOptions) {
    let mut engine = engine(&demo(), &runtime(2), EngineOptions { drafts: 3, ..options });
    let want = greedy(&mut engine, &prompt()[..70], 120);
    let sequence = engine.open().expect("a slot is free");
    let speculation = SpeculationOptions { depth: Depth::Fixed(3), ..SpeculationOptions::default() };
    let how = GenerateOptions { max_tokens: 120, ..GenerateOptions::default() };
    let mut tokens = super::drafting(&mut engine, sequence, &prompt()[..70], how, speculation);
    let got: Vec<u32> = tokens.by_ref().collect::<Result<_, _>>().expect("every round runs");
    assert_eq!(got, want, "{options:?}");
}
