//! Steps of the list. Prompts of any lengths run in one step with padding rows, and no preparation is left when
//! requests come. With `KEEL_TEST_CUDA=1` the same on a GPU.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use crate::common::batching::{assert_all_is_back, finish, run};
use crate::common::queueing::{Poison, gpu};
use crate::common::{demo, engine, expect_same_state, fixture, runtime};
use keel_array::sampling::Draw;
use keel_array::{Backend, Runtime, RuntimeOptions};
use keel_cpu::{CpuBackend, CpuOptions};
use keel_engine::batch::{BatchOptions, BatchRequest, Batcher};
use keel_engine::{Chunk, Engine, EngineOptions, LateWork, SamplerOptions};
use keel_testkit::intercepted::InterceptedBackend;

fn cpu() -> Arc<dyn Backend> {
    Arc::new(CpuBackend::new(CpuOptions { threads: Some(2), poison_freed: true, ..CpuOptions::default() }))
}

/// Pairs of a plain and a poisoned runtime that compute the same; also on a GPU if there is one.
fn runtimes() -> Vec<(Runtime, Runtime)> {
    let new = |backend: Arc<dyn Backend>| Runtime::new(backend, RuntimeOptions::default());
    let poisoned = |backend| new(InterceptedBackend::new(backend, Arc::new(Poison { queues: false })));
    let mut all = vec![(runtime(2), poisoned(cpu()))];
    all.extend(gpu().zip(gpu()).map(|(plain, inner)| (new(plain), poisoned(inner))));
    all
}

fn models() -> Vec<(PathBuf, usize)> {
    let fixtures = [("llama", 0), ("gemma3_text", 0), ("qwen3_5_moe", 3), ("qwen3_next", 0)];
    let fixtures = fixtures.into_iter().map(|(name, drafts)| (fixture(name), drafts));
    [(demo(), 0), (demo(), 2)].into_iter().chain(fixtures).collect()
}

fn options(drafts: usize) -> EngineOptions {
    EngineOptions {
        drafts,
        context: 512,
        sequences: 11,
        prefill_step: 512,
        checkpoints: 24,
        ..EngineOptions::default()
    }
}

fn ids(seed: usize, len: usize) -> Vec<u32> {
    (0..len).map(|i| ((i * 7 + seed * 131 + 5) % 500) as u32).collect()
}

/// The logits after each prompt, which runs alone.
fn alone(engine: &mut Engine, prompts: &[Vec<u32>]) -> Vec<Vec<f32>> {
    let logits_of = |prompt: &Vec<u32>| {
        let (mut sequence, mut logits) = (engine.open().expect("a slot is free"), Vec::new());
        engine.prefill(&mut sequence, prompt, &mut logits, &mut |_| ()).expect("fits");
        engine.release(sequence);
        logits
    };
    prompts.iter().map(logits_of).collect()
}

#[test]
fn prompts_in_one_step_get_what_each_gets_alone_whatever_lies_beyond_them() {
    let mixes: [&[usize]; 4] = [&[1, 5, 63, 64, 65, 17], &[300, 2], &[7], &[40; 11]];
    for (folder, drafts) in models() {
        for (plain, poisoned) in runtimes() {
            let mut quiet = engine(&folder, &plain, options(drafts));
            let mut busy = engine(&folder, &poisoned, options(drafts));
            for lens in mixes {
                let prompts: Vec<Vec<u32>> = lens.iter().enumerate().map(|(i, &len)| ids(i, len)).collect();
                let want = alone(&mut quiet, &prompts);
                let mut sequences: Vec<_> =
                    prompts.iter().map(|_| busy.open().expect("a slot is free")).collect();
                let chunks = sequences.iter_mut().zip(&prompts).enumerate().map(|(i, (sequence, tokens))| {
                    Chunk { sequence, tokens, next: None, draw: (i % 2 == 0).then_some(Draw::GREATEST) }
                });
                let drawn = busy.prefill_chunks(&mut chunks.collect::<Vec<_>>()).expect("fits");
                for (i, want) in want.iter().enumerate() {
                    let mut got = Vec::new();
                    busy.logits(i, &mut got).expect("there");
                    assert!(got == *want, "{}, {drafts} drafts, {lens:?}: prompt {i}", folder.display());
                    let greatest = (i % 2 == 0).then(|| crate::common::argmax(want));
                    assert_eq!(drawn[i], greatest);
                }
                // States, keys and values are also those of a prompt that ran alone.
                let last = sequences.pop().expect("there is one");
                sequences.into_iter().for_each(|sequence| busy.release(sequence));
                let mut again = busy.open().expect("a slot is free");
                let prompt = prompts.last().expect("there is one");
                busy.prefill(&mut again, prompt, &mut Vec::new(), &mut |_| ()).expect("fits");
                expect_same_state(&mut busy, last, again);
            }
        }
    }
}

/// Requests: some are sampled, some end within a page, and some need the host.
fn requests(count: usize) -> Vec<BatchRequest> {
    let request = |i: usize| {
        let mut request = BatchRequest::new(i as u64, ids(i, 1 + (i * 67) % 430), 1 + (i * 5) % 29);
        let sampler = SamplerOptions { temperature: 0.8, seed: i as u64, ..SamplerOptions::default() };
        match i % 5 {
            1 => request.sampler = sampler,
            2 => request.sampler = SamplerOptions { repetition_penalty: 1.1, ..sampler },
            _ => {}
        }
        request.speculate = false;
        request
    };
    (0..count).map(request).collect()
}

#[test]
fn a_batch_among_rows_of_nobody_says_what_each_says_alone() {
    for (folder, drafts) in models() {
        for (plain, poisoned) in runtimes() {
            let batch = BatchOptions { step_tokens: 300, reuse_prefixes: false, ..BatchOptions::default() };
            let mut quiet = Batcher::new(engine(&folder, &plain, options(drafts)), batch);
            let mut busy = Batcher::new(engine(&folder, &poisoned, options(drafts)), batch);
            let together = run(&mut busy, requests(22));
            for (mut request, got) in requests(22).into_iter().zip(together) {
                let id = std::mem::take(&mut request.id);
                let want = run(&mut quiet, vec![request]).remove(0);
                assert!(got.error.is_none(), "{:?}", got.error);
                let at = format!("{}, {drafts} drafts: request {id}", folder.display());
                assert_eq!((&got.tokens, got.finish), (&want.tokens, want.finish), "{at}");
            }
            assert_all_is_back(&mut busy);
        }
    }
}

/// Prompts of every length that leaves room for a token, in batches of every size. Fewer where the arena is filled
/// before each step. On a CPU a fixture takes less time than the built-in model.
#[test]
fn nothing_is_left_to_be_done_when_requests_come() {
    const CONTEXT: usize = 320;
    for (plain, poisoned) in runtimes() {
        let folder = if plain.backend().is_queueing() { demo() } else { fixture("qwen3_5") };
        for (folder, runtime, drafts, count) in [(folder, plain, 0, 2000), (demo(), poisoned, 2, 100)] {
            let options = EngineOptions { context: CONTEXT, ..options(drafts) };
            let mut engine = engine(&folder, &runtime, options);
            engine.make_ready(&mut |_, _, _| ()).expect("memory is planned");
            let planned = runtime.ledger().active();
            let mut batcher =
                Batcher::new(engine, BatchOptions { step_tokens: 256, ..BatchOptions::default() });
            let request = |i: usize| {
                // 3 and 319 have no common divisor, so all lengths occur.
                let len = 1 + i * 3 % (CONTEXT - 1);
                BatchRequest::new(i as u64, ids(i, len), (1 + i % 7).min(CONTEXT - len))
            };
            let mut left: Vec<BatchRequest> = (0..count).map(request).rev().collect();
            let mut size = 0;
            while !left.is_empty() {
                size = size % options.sequences + 1;
                for _ in 0..size {
                    if let Some(request) = left.pop() {
                        batcher.submit(request, Instant::now()).expect("accepted");
                    }
                }
                let outcomes = finish(&mut batcher, count);
                assert!(outcomes.iter().all(|outcome| outcome.error.is_none()), "{outcomes:?}");
            }
            assert_eq!(batcher.status().late_work, LateWork::default(), "{drafts} drafts");
            assert_eq!(runtime.ledger().active(), planned);
            assert_all_is_back(&mut batcher);
        }
    }
}

/// A step that is not in the list is counted, so the test above would notice it.
#[test]
fn a_step_that_was_not_prepared_is_seen() {
    let mut engine = engine(&demo(), &runtime(2), EngineOptions { all_logits: true, ..options(0) });
    engine.make_ready(&mut |_, _, _| ()).expect("memory is planned");
    let mut sequence = engine.open().expect("a slot is free");
    engine.all_logits(&mut sequence, &ids(1, 20), false, &mut |_| Ok(()), None).expect("fits");
    assert!(engine.late_work().trace > 0);
    engine.release(sequence);
}
