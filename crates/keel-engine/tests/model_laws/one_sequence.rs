//! How work is cut never changes the answer, and all memory is given back.

use crate::common::{
    HYBRID, PLAIN, all_logits, argmax, engine, exact, expected, fixture, greedy, models, runtime,
};
use keel_array::Compute;
use keel_engine::EngineOptions;

/// `steps/deterministic.rs` leaves laws of both to this file where there is no GPU.
const ARITHMETICS: [Compute; 2] = [Compute::F32, Compute::Auto];

/// A prompt that spans several steps of the smallest size, with a partial chunk at its end.
fn long_prompt(ids: &[u32]) -> Vec<u32> {
    ids.iter().cycle().take(300).enumerate().map(|(i, id)| (id + i as u32 * 7) % 500).collect()
}

#[test]
fn the_prefill_step_does_not_change_a_bit() {
    for name in models() {
        let folder = fixture(name);
        let prompt = long_prompt(&expected(&folder).ids);
        for compute in ARITHMETICS {
            let logits = |prefill_step, threads| {
                let options = EngineOptions { prefill_step, compute, ..exact() };
                all_logits(&mut engine(&folder, &runtime(threads), options), &prompt, false, false).0
            };
            let whole = logits(2048, 2);
            for (step, threads) in [(64, 1), (128, 2), (192, 3)] {
                assert!(
                    logits(step, threads) == whole,
                    "{name}: {compute:?}, step {step}, {threads} threads"
                );
            }
        }
    }
}

#[test]
fn a_saved_and_loaded_cache_continues_with_the_same_bits() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    for (name, compute) in models().flat_map(|name| ARITHMETICS.map(|compute| (name, compute))) {
        let folder = fixture(name);
        let options = EngineOptions { compute, ..exact() };
        let prompt = long_prompt(&expected(&folder).ids);
        let path = dir.path().join(format!("{name}-{compute:?}"));
        let whole = all_logits(&mut engine(&folder, &runtime(2), options), &prompt, false, false).0;
        let mut first = engine(&folder, &runtime(2), options);
        let mut sequence = first.open().expect("a slot is free");
        first.prefill(&mut sequence, &prompt[..64], &mut Vec::new(), &mut |_| ()).expect("runs");
        first.cache().save(&sequence, &prompt[..64], name, &path).expect("saves");
        drop(first);
        let mut second = engine(&folder, &runtime(1), options);
        assert!(
            second.cache_mut().load("another", &path).is_err(),
            "a cache of another model must be refused"
        );
        let (mut sequence, seen) = second.cache_mut().load(name, &path).expect("loads");
        assert_eq!(seen, prompt[..64]);
        let mut rest = Vec::new();
        let mut sink = |row: &[f32]| {
            rest.extend_from_slice(row);
            Ok(())
        };
        second.all_logits(&mut sequence, &prompt[64..], false, &mut sink, None).expect("runs");
        let vocab = second.model().config.vocab;
        assert!(rest == whole[64 * vocab..], "{name}, {compute:?}: the continuation differs");
        second.release(sequence);
        assert!(second.cache().is_idle());
    }
}

#[test]
fn a_sequence_in_a_batch_gets_the_bits_it_gets_alone() {
    for name in models() {
        let folder = fixture(name);
        let ids = long_prompt(&expected(&folder).ids);
        let options = EngineOptions { sequences: 5, compute: Compute::Auto, ..exact() };
        let mut engine = engine(&folder, &runtime(2), options);
        let prompts: Vec<&[u32]> = [3, 64, 65, 130, 17].iter().map(|&n| &ids[..n]).collect();
        let alone: Vec<Vec<u32>> = prompts.iter().map(|p| greedy(&mut engine, p, 24)).collect();
        let mut sequences = Vec::new();
        let mut next = Vec::new();
        let mut logits = Vec::new();
        for prompt in &prompts {
            let mut sequence = engine.open().expect("a slot is free");
            engine.prefill(&mut sequence, prompt, &mut logits, &mut |_| ()).expect("runs");
            next.push(argmax(&logits));
            sequences.push(sequence);
        }
        let mut together: Vec<Vec<u32>> = next.iter().map(|&t| vec![t]).collect();
        for _ in 1..24 {
            engine.decode(&mut sequences.iter_mut().collect::<Vec<_>>(), &next).expect("runs");
            for (row, (next, all)) in next.iter_mut().zip(&mut together).enumerate() {
                engine.logits(row, &mut logits).expect("there");
                *next = argmax(&logits);
                all.push(*next);
            }
        }
        sequences.into_iter().for_each(|s| engine.release(s));
        assert_eq!(together, alone, "{name}");
    }
}

#[test]
fn live_bytes_after_200_generations_equal_those_after_the_first() {
    let folder = fixture("qwen3_5");
    let ids = expected(&folder).ids;
    let runtime = runtime(2);
    let mut engine = engine(&folder, &runtime, EngineOptions { checkpoints: 2, ..exact() });
    let loaded = runtime.ledger().active();
    let charges = runtime.ledger().charges();
    greedy(&mut engine, &ids, 8);
    let first = runtime.ledger().active();
    for i in 0..200 {
        greedy(&mut engine, &ids[i % 40..], 3);
    }
    assert_eq!(runtime.ledger().active(), first);
    assert_eq!(
        (first, runtime.ledger().peak()),
        (loaded, loaded),
        "a run needs what was planned and nothing else"
    );
    assert_eq!(runtime.ledger().charges(), charges, "nothing is allocated while the plan runs");
    assert!(engine.cache().is_idle());
}

#[test]
fn what_a_checkpoint_saves_lies_together() {
    let folder = fixture("qwen3_5");
    let charges = |checkpoints| {
        let runtime = runtime(1);
        engine(&folder, &runtime, EngineOptions { checkpoints, ..exact() });
        runtime.ledger().charges()
    };
    assert_eq!(charges(5), charges(0) + 2, "the windows of all layers have one array, and their states one");
}

#[test]
fn rewinding_and_running_again_is_as_if_never_left() {
    for (name, compute) in HYBRID.into_iter().flat_map(|name| ARITHMETICS.map(|compute| (name, compute))) {
        let folder = fixture(name);
        let prompt = long_prompt(&expected(&folder).ids);
        let options = EngineOptions { checkpoints: 3, compute, ..exact() };
        let mut engine = engine(&folder, &runtime(2), options);
        let (mut straight, mut again) = (Vec::new(), Vec::new());
        let mut sequence = engine.open().expect("a slot is free");
        engine.prefill(&mut sequence, &prompt[..200], &mut straight, &mut |_| ()).expect("runs");
        let twin = engine.cache_mut().fork(&sequence).expect("forks");
        engine.decode(&mut [&mut sequence], &[7]).expect("runs");
        let back = engine.cache_mut().rewind(&mut sequence, 200).expect("rewinds");
        assert_eq!(back, 192, "{name}: the last grid point before the end of the prompt has a checkpoint");
        engine.prefill(&mut sequence, &prompt[192..200], &mut again, &mut |_| ()).expect("runs");
        assert!(straight == again, "{name}, {compute:?}");
        // The twin shares pages with a sequence that was rewound and written again. This must not change the twin.
        let mut twin = twin;
        let (mut a, mut b) = (Vec::new(), Vec::new());
        engine.decode(&mut [&mut sequence], &[9]).expect("runs");
        engine.logits(0, &mut a).expect("there");
        engine.decode(&mut [&mut twin], &[9]).expect("runs");
        engine.logits(0, &mut b).expect("there");
        assert!(a == b, "{name}, {compute:?}: the fork differs");
        engine.release(sequence);
        engine.release(twin);
        assert!(engine.cache().is_idle());
    }
}

#[test]
fn without_recurrent_layers_a_sequence_goes_back_to_any_token() {
    for name in PLAIN {
        let folder = fixture(name);
        let prompt = long_prompt(&expected(&folder).ids);
        let mut engine = engine(&folder, &runtime(2), exact());
        let (mut straight, mut again) = (Vec::new(), Vec::new());
        let mut sequence = engine.open().expect("a slot is free");
        engine.prefill(&mut sequence, &prompt[..200], &mut Vec::new(), &mut |_| ()).expect("runs");
        let mut twin = engine.cache_mut().fork(&sequence).expect("forks");
        for token in 0..50 {
            engine.decode(&mut [&mut sequence], &[token]).expect("runs");
        }
        assert_eq!(engine.cache_mut().rewind(&mut sequence, 203).expect("rewinds"), 203, "{name}");
        for token in [0, 1, 2, 9] {
            engine.decode(&mut [&mut twin], &[token]).expect("runs");
        }
        engine.logits(0, &mut straight).expect("there");
        engine.decode(&mut [&mut sequence], &[9]).expect("runs");
        engine.logits(0, &mut again).expect("there");
        assert!(straight == again, "{name}");
        engine.release(sequence);
        engine.release(twin);
        assert!(engine.cache().is_idle());
    }
}

/// A window of 16 tokens in pages of 256: two pages for a sequence of any length.
#[test]
fn sliding_layers_hold_their_window_and_one_page() {
    let folder = fixture("gemma3_text");
    let ids: Vec<u32> = (0..1500).map(|i| (i * 37 + i * i % 11) % 509).collect();
    let options = |prefill_step| EngineOptions { context: 2048, prefill_step, ..exact() };
    let mut engine = engine(&folder, &runtime(2), options(1024));
    let spec = engine.cache().spec().clone();
    assert_eq!((spec.sliding_window(), spec.sliding_pages(&engine.cache().size())), (Some(16), 2));
    let mut sequence = engine.open().expect("a slot is free");
    let (mut prefilled, mut decoded) = (Vec::new(), Vec::new());
    engine.prefill(&mut sequence, &ids, &mut prefilled, &mut |_| ()).expect("runs");
    assert_eq!((sequence.pages().len(), sequence.sliding_pages().len()), (6, 2));
    // The pages of the window have rotated, so only the start can be reached by a rewind.
    assert_eq!(engine.cache_mut().rewind(&mut sequence, 700).expect("rewinds"), 0);
    for &id in &ids {
        engine.decode(&mut [&mut sequence], &[id]).expect("runs");
    }
    assert_eq!(sequence.sliding_pages().len(), 2);
    engine.logits(0, &mut decoded).expect("there");
    let difference: f64 = prefilled.iter().zip(&decoded).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    let size: f64 = decoded.iter().map(|x| f64::from(*x).powi(2)).sum();
    assert!((difference / size).sqrt() < 1e-4, "the regimes agree to rounding");
    engine.release(sequence);
    assert!(engine.cache().is_idle());
}
