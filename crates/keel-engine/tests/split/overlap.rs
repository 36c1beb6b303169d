//! Prompts in a pipeline: a stage works on the next chunk while the stage after it works on this one.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::common::splitting::{Fault, Stages, end, engine_on};
use crate::common::{engine, fixture, recurrent_bytes, runtime};
use keel_array::Compute;
use keel_engine::{Chunk, Engine, EngineOptions};
use keel_testkit::intercepted::InterceptedBackend;

fn options(prefill_step: usize) -> EngineOptions {
    EngineOptions {
        context: 1536,
        sequences: 3,
        checkpoints: 0,
        prefill_step,
        compute: Compute::F32,
        ..EngineOptions::default()
    }
}

fn prompt(len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| i * 37 % 90).collect()
}

#[test]
fn chunks_that_overlap_give_the_bits_of_the_whole_model() {
    for (name, drafts) in [("qwen3_5", 2), ("qwen3_5_moe", 0), ("gemma3_text", 0)] {
        let options = EngineOptions { drafts, ..options(1280) };
        let mut whole = engine(&fixture(name), &runtime(2), options);
        for grid in [(2, 1), (3, 1)] {
            let mut parts = engine_on(&fixture(name), options, grid, |_, backend| backend);
            let (mut want, mut got) = (Vec::new(), Vec::new());
            let mut of_whole = whole.open().expect("a slot is free");
            whole.prefill(&mut of_whole, &prompt(1100), &mut want, &mut |_| ()).expect("runs");
            let mut of_parts = parts.open().expect("a slot is free");
            parts.prefill(&mut of_parts, &prompt(1100), &mut got, &mut |_| ()).expect("runs");
            assert!(want == got, "{name} on {grid:?}: logits");
            assert!(
                recurrent_bytes(&parts, &of_parts) == recurrent_bytes(&whole, &of_whole),
                "{name}: states"
            );
            for token in [5, 6, 7] {
                whole.decode(&mut [&mut of_whole], &[token]).expect("runs");
                parts.decode(&mut [&mut of_parts], &[token]).expect("runs");
            }
            whole.logits(0, &mut want).expect("there");
            parts.logits(0, &mut got).expect("there");
            assert!(want == got, "{name} on {grid:?}: keys and values");
            whole.release(of_whole);
            parts.release(of_parts);
            end(parts);
        }
    }
}

/// Stages of several devices: the bits do not depend on whether chunks overlap.
#[test]
fn chunks_overlap_in_stages_of_several_devices() {
    // Steps of 256 rows are never cut.
    let mut cut = engine_on(&fixture("qwen3_5_moe"), options(256), (2, 2), |_, backend| backend);
    let mut overlapping = engine_on(&fixture("qwen3_5_moe"), options(1280), (2, 2), |_, backend| backend);
    let run = |engine: &mut Engine, step: usize| {
        let (mut sequence, mut logits) = (engine.open().expect("a slot is free"), Vec::new());
        let prompt = prompt(1100);
        for (i, tokens) in prompt.chunks(step).enumerate() {
            let next = prompt.get((i + 1) * step).copied();
            let chunk = Chunk { sequence: &mut sequence, tokens, next, draw: None };
            engine.prefill_chunks(&mut [chunk]).expect("runs");
        }
        engine.logits(0, &mut logits).expect("there");
        let states = recurrent_bytes(engine, &sequence);
        engine.release(sequence);
        (logits, states)
    };
    assert!(run(&mut cut, 256) == run(&mut overlapping, 1100));
    end(cut);
    end(overlapping);
}

#[test]
fn the_first_stage_works_on_the_next_chunk_while_the_second_works_on_this_one() {
    // Chunks of 256 rows.
    const CHUNKS: usize = 5;
    let stages = Arc::new(Stages::default());
    let mut engine = engine_on(&fixture("qwen3_5"), options(1280), (2, 1), |rank, b| stages.wrap(rank, b));
    stages.count(CHUNKS);
    let mut sequence = engine.open().expect("a slot is free");
    engine.prefill(&mut sequence, &prompt(1280), &mut Vec::new(), &mut |_| ()).expect("runs");
    assert_eq!(stages.begun(), [CHUNKS, CHUNKS]);
    assert_eq!(stages.alone(), 0, "the first stage waits for the second");
    engine.release(sequence);
    end(engine);
}

/// A prompt of several steps: the stages do not wait for each other between them.
#[test]
fn steps_of_a_prompt_that_is_alone_overlap() {
    const STEPS: usize = 5;
    for in_one_call in [true, false] {
        let stages = Arc::new(Stages::default());
        let mut engine = engine_on(&fixture("qwen3_5"), options(256), (2, 1), |rank, b| stages.wrap(rank, b));
        let (tokens, mut sequence) = (prompt(1280), engine.open().expect("a slot is free"));
        assert_eq!(engine.lone_prompt_rows_max(&sequence), 2048, "four steps a stage");
        stages.count(STEPS);
        if in_one_call {
            let chunk = Chunk { sequence: &mut sequence, tokens: &tokens, next: None, draw: None };
            engine.prefill_chunks(&mut [chunk]).expect("runs");
        } else {
            engine.prefill(&mut sequence, &tokens, &mut Vec::new(), &mut |_| ()).expect("runs");
        }
        assert_eq!(stages.begun(), [STEPS, STEPS]);
        assert_eq!(stages.alone(), 0, "the first stage waits for the second");
        engine.release(sequence);
        end(engine);
    }
}

#[test]
fn a_chunk_that_fails_ends_the_step_and_the_prompt_can_run_again() {
    let mut whole = engine(&fixture("qwen3_5"), &runtime(2), options(1280));
    let mut want = whole.open().expect("a slot is free");
    whole.prefill(&mut want, &prompt(1100), &mut Vec::new(), &mut |_| ()).expect("runs");
    for rank in 0..2 {
        let fault = Arc::new(Fault::default());
        let mut parts =
            engine_on(&fixture("qwen3_5"), options(1280), (2, 1), |at, backend| match at == rank {
                true => InterceptedBackend::new(backend, Arc::clone(&fault)) as _,
                false => backend,
            });
        // The first 1,024 tokens are a step of four chunks.
        for at in 0..4 {
            let mut sequence = parts.open().expect("a slot is free");
            let start = Instant::now();
            fault.0.store(at, Ordering::Relaxed);
            let error = parts.prefill(&mut sequence, &prompt(1100), &mut Vec::new(), &mut |_| ());
            let error = error.expect_err("a device has failed").to_string();
            assert!(error.contains("injected"), "device {rank}, chunk {at}: {error}");
            assert!(start.elapsed() < Duration::from_secs(10), "nobody waits for a device that has failed");
            fault.0.store(usize::MAX, Ordering::Relaxed);
            assert_eq!(sequence.offset(), 0, "no chunk counts");
            parts.prefill(&mut sequence, &prompt(1100), &mut Vec::new(), &mut |_| ()).expect("runs again");
            assert!(
                recurrent_bytes(&parts, &sequence) == recurrent_bytes(&whole, &want),
                "device {rank}, chunk {at}"
            );
            parts.release(sequence);
        }
        end(parts);
    }
    whole.release(want);
}
