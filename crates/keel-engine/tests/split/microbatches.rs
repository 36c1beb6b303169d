//! Answers in a pipeline: groups of sequences, each with a step under way. Every answer is that of its request alone.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use crate::common::batching::{Outcome, assert_all_is_back, run, step};
use crate::common::splitting::{self, Fault, Stages, backends, end, engine_on};
use crate::common::{decoded, fixture, recurrent_bytes};
use keel_array::sampling::Draw;
use keel_array::{Category, Compute, Runtime, RuntimeOptions};
use keel_cache::SequenceCache;
use keel_cpu::{CpuBackend, CpuGroup, CpuOptions};
use keel_cuda::{CudaBackend, CudaGroup, CudaOptions, Determinism, Survey};
use keel_engine::batch::{BatchOptions, BatchRequest, Batcher};
use keel_engine::split::PlacedPart;
use keel_engine::{
    Engine, EngineOptions, FinishReason, HostReads, LateWork, SamplerOptions, Ticket, Work, WorkRows,
};
use keel_models::loading::CheckpointParameters;
use keel_testkit::intercepted::InterceptedBackend;
use keel_weights::Checkpoint;

fn options() -> EngineOptions {
    EngineOptions {
        context: 512,
        sequences: 26,
        prefill_step: 256,
        checkpoints: 40,
        pool_pages: Some(36),
        compute: Compute::F32,
        ..EngineOptions::default()
    }
}

fn batcher(engine: Engine) -> Batcher {
    let options = BatchOptions { step_tokens: 256, reuse_generated: true, ..BatchOptions::default() };
    Batcher::new(engine, options)
}

const REQUESTS: usize = 40;

/// Request `i`: greedy, sampled by the device, or drawn by the host. Answers cross the grid and pages.
fn request(i: usize, end_tokens: Vec<u32>) -> BatchRequest {
    let prompt = (0..20 + 61 * i % 230).map(|j| ((j * 7 + i * 131 + 5) % 90) as u32).collect();
    let mut request = BatchRequest::new(i as u64, prompt, [45, 80, 60, 7][i % 4]);
    let sampled =
        SamplerOptions { temperature: 0.9, top_k: 50, seed: i as u64 + 3, ..SamplerOptions::default() };
    match i % 3 {
        0 => {}
        1 => request.sampler = sampled,
        _ => request.sampler = SamplerOptions { repetition_penalty: 1.2, ..sampled },
    }
    request.end_tokens = end_tokens;
    request
}

/// Submits a request every `every` steps, and cancels some after a while. Returns the answers, the most steps that were
/// under way between two calls, and between how many calls some were while a prompt had not come to its end.
fn traffic(batcher: &mut Batcher, every: usize, ends: &[Vec<u32>]) -> (Vec<Outcome>, usize, usize) {
    let mut outcomes: Vec<Outcome> = (0..REQUESTS).map(|_| Outcome::default()).collect();
    let (now, mut most, mut with_prompts) = (Instant::now(), 0, 0);
    for at in 0..5_000 {
        if at % every == 0 && at / every < REQUESTS {
            batcher.submit(request(at / every, ends[at / every].clone()), now).expect("accepted");
        }
        if at % (4 * every) == 0 && at / every > 20 {
            batcher.cancel((at / every - 20) as u64);
        }
        step(batcher, now, &mut outcomes);
        // As a server does after each step. It must not wait for a device that waits for the lead.
        let running = batcher.status().running;
        assert!(running.len() <= REQUESTS);
        let steps = batcher.engine().steps_in_flight();
        most = most.max(steps);
        let has_prompt = running.iter().any(|of| of.prefilled_tokens < of.prompt_tokens);
        with_prompts += usize::from(steps > 0 && has_prompt);
        if batcher.is_idle() && at / every >= REQUESTS {
            break;
        }
    }
    assert!(batcher.is_idle());
    assert_eq!(batcher.engine().steps_in_flight(), 0);
    (outcomes, most, with_prompts)
}

/// Asserts that each answer of a batch in a pipeline is that of its request alone, whenever requests come, end and are
/// cancelled.
fn expect_answers_of_requests_alone(batcher: &mut Batcher, name: &str, stages: usize) {
    assert_eq!(batcher.engine().microbatches_max(), stages);
    let mut alone = |ends: &[Vec<u32>]| -> Vec<Outcome> {
        let requests = (0..REQUESTS).map(|i| BatchRequest { id: 0, ..request(i, ends[i].clone()) });
        requests.map(|request| run(batcher, vec![request]).remove(0)).collect()
    };
    let none = vec![Vec::new(); REQUESTS];
    let whole = alone(&none);
    // A token from the middle of every other answer ends it.
    let end_of = |(i, outcome): (usize, &Outcome)| match i % 2 {
        0 => vec![outcome.tokens[outcome.tokens.len() / 2]],
        _ => Vec::new(),
    };
    let ends: Vec<Vec<u32>> = whole.iter().enumerate().map(end_of).collect();
    let ended = alone(&ends);
    for (every, ends, want) in [(2, &none, &whole), (1, &ends, &ended)] {
        let (got, most, with_prompts) = traffic(batcher, every, ends);
        assert!((stages - 1..=stages).contains(&most), "{name}: the steps of other groups are under way");
        assert!(with_prompts > 5, "{name}: {with_prompts} times with prompts");
        let mut finished = 0;
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            assert!(got.error.is_none(), "{name}, answer {i}: {:?}", got.error);
            assert!(want.tokens.starts_with(&got.tokens), "{name}, one in {every} steps, answer {i}");
            let is_whole = got.finish.is_some();
            assert!(!is_whole || got.tokens == want.tokens && got.finish == want.finish, "{name}, {i}");
            finished += usize::from(is_whole);
        }
        assert!(finished > REQUESTS / 2, "{name}: {finished} answers came to their end");
    }
    assert!(ended.iter().any(|outcome| outcome.finish == Some(FinishReason::Stop)));
    assert_eq!(batcher.status().late_work, LateWork::default(), "{name}");
    assert_all_is_back(batcher);
}

#[test]
fn answers_of_groups_are_those_of_requests_alone() {
    for (name, grid) in [("qwen3_5", (2, 1)), ("gemma3_text", (3, 1)), ("qwen3_5_moe", (2, 2))] {
        let mut engine = engine_on(&fixture(name), options(), grid, |_, backend| backend);
        engine.make_ready(&mut |_, _, _| ()).expect("it gets ready");
        let mut batcher = batcher(engine);
        expect_answers_of_requests_alone(&mut batcher, name, grid.0);
        end(batcher.into_engine());
    }
}

/// With `KEEL_TEST_CUDA=1` on a machine with two GPUs or four.
#[test]
fn answers_of_groups_on_gpus_are_those_of_requests_alone() {
    if !keel_testkit::has_gpu!() {
        return;
    }
    let grid = match Survey::take().gpus.len() {
        0 | 1 => return keel_testkit::skipped!("needs two GPUs"),
        2 | 3 => (2, 1),
        _ => (2, 2),
    };
    let (sender, receiver) = channel();
    let thread = std::thread::spawn(move || {
        let checkpoint = Checkpoint::open(&fixture("qwen3_5_moe")).expect("the checkpoint opens");
        let source = (&CheckpointParameters(&checkpoint) as _, checkpoint.config());
        let parts = splitting::parts(source, options(), grid).expect("it divides");
        let groups = CudaGroup::of(grid.0 * grid.1, grid.1).into_iter().enumerate();
        let gpu = |(ordinal, group)| {
            let group = Some(group);
            let options =
                CudaOptions { ordinal, determinism: Determinism::Steps, group, ..CudaOptions::default() };
            let backend = CudaBackend::new(&options).expect("a GPU, and NCCL");
            Runtime::new(Arc::new(backend), RuntimeOptions::default())
        };
        let devices = PlacedPart::each(groups.map(gpu), parts);
        let engine = Engine::load_on(&devices, None, source.0, source.1, options(), &|_| ());
        let mut engine = engine.expect("the model loads");
        engine.make_ready(&mut |_, _, _| ()).expect("it gets ready");
        expect_answers_of_requests_alone(&mut batcher(engine), "qwen3_5_moe", grid.0);
        sender.send(()).expect("the test waits");
    });
    receiver.recv_timeout(Duration::from_secs(300)).expect("no device waits without end");
    // Its devices close at its end. The program must not end meanwhile.
    thread.join().expect("its devices close");
}

/// With two groups a step of prompts follows after each three calls, and there are three prompts.
#[test]
fn prompts_next_to_groups_take_turns() {
    let mut batcher = batcher(engine_on(&fixture("qwen3_5"), options(), (2, 1), |_, backend| backend));
    let (now, answers, prompts) = (Instant::now(), 16, 3);
    let mut outcomes: Vec<Outcome> = (0..answers + prompts).map(|_| Outcome::default()).collect();
    let request = |id: usize, len: usize, max_tokens: usize| {
        let prompt = (0..len).map(|j| ((j * 7 + id * 131 + 5) % 90) as u32).collect();
        BatchRequest::new(id as u64, prompt, max_tokens)
    };
    (0..answers).for_each(|id| batcher.submit(request(id, 10, 200), now).expect("accepted"));
    while outcomes[..answers].iter().any(|outcome| outcome.tokens.is_empty()) {
        step(&mut batcher, now, &mut outcomes);
    }
    let long = answers..answers + prompts;
    long.clone().for_each(|id| batcher.submit(request(id, 500, 1), now).expect("accepted"));
    let mut with_steps = 0;
    for _ in 0..12 {
        step(&mut batcher, now, &mut outcomes);
        with_steps += usize::from(batcher.engine().steps_in_flight() > 1);
    }
    assert!(with_steps > 8, "groups have steps under way: {with_steps}");
    let running = batcher.status().running;
    let done: Vec<usize> =
        running.iter().filter(|of| long.contains(&(of.id as usize))).map(|of| of.prefilled_tokens).collect();
    assert!(done.len() == prompts && done.iter().all(|&rows| rows > 0), "rows of each prompt: {done:?}");
    batcher.cancel_all();
    assert_all_is_back(&mut batcher);
    end(batcher.into_engine());
}

/// Answers in the test of failures: two groups of 8, or three.
const FAULTY: usize = 25;

/// How the answers go on after a fault in launch `at` of the steps of groups on device `rank`.
fn answers_after_fault(name: &'static str, grid: (usize, usize), rank: usize, at: usize) -> Vec<Outcome> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let fault = Arc::new(Fault::default());
        let engine = engine_on(&fixture(name), options(), grid, |of, backend| match of == rank {
            true => InterceptedBackend::new(backend, Arc::clone(&fault)) as _,
            false => backend,
        });
        let mut batcher = batcher(engine);
        let mut outcomes: Vec<Outcome> = (0..FAULTY).map(|_| Outcome::default()).collect();
        let now = Instant::now();
        (0..FAULTY).for_each(|i| batcher.submit(request(i, Vec::new()), now).expect("accepted"));
        while batcher.engine().steps_in_flight() == 0 {
            step(&mut batcher, now, &mut outcomes);
        }
        fault.0.store(at, Ordering::Relaxed);
        let outcomes = crate::common::batching::finish_from(&mut batcher, outcomes);
        assert_eq!(fault.0.load(Ordering::Relaxed), usize::MAX, "it came to the fault");
        assert!(batcher.status().failed_steps > 0);
        // The devices work as before.
        let again = run(&mut batcher, vec![BatchRequest { id: 0, ..request(3, Vec::new()) }]);
        assert!(again[0].error.is_none(), "{:?}", again[0].error);
        assert_all_is_back(&mut batcher);
        end(batcher.into_engine());
        sender.send(outcomes).expect("the test waits");
    });
    receiver.recv_timeout(Duration::from_secs(100)).expect("no device waits without end")
}

#[test]
fn a_failure_on_a_device_ends_the_steps_of_all_groups_and_the_next_step_runs() {
    for (name, grid) in [("llama", (3, 1)), ("qwen3_5", (2, 1)), ("qwen3_5_moe", (2, 2))] {
        let mut whole = batcher(engine_on(&fixture(name), options(), grid, |_, backend| backend));
        let want: Vec<Outcome> = (0..FAULTY)
            .map(|i| run(&mut whole, vec![BatchRequest { id: 0, ..request(i, Vec::new()) }]).remove(0))
            .collect();
        for rank in 0..grid.0 * grid.1 {
            for at in [0, 1, 5] {
                let got = answers_after_fault(name, grid, rank, at);
                for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                    let of = format!("{name} on {grid:?}, device {rank}, launch {at}, answer {i}");
                    match &got.error {
                        // The state of a recurrent layer may be torn. Keys and values are written again.
                        Some(error) => {
                            assert!(
                                name != "llama" && error.to_string().contains("injected"),
                                "{of}: {error}"
                            )
                        }
                        None => assert_eq!(got.tokens, want.tokens, "{of}"),
                    }
                }
            }
        }
    }
}

/// Submits a step of these sequences with this token.
fn submit(engine: &mut Engine, sequences: &mut [SequenceCache], token: u32) -> keel_engine::Result<Ticket> {
    let work = sequences.iter_mut().map(|sequence| Work {
        sequence,
        ahead: 0,
        rows: WorkRows::Token(token),
        draw: Some(Draw::GREATEST),
        reads: HostReads::Nothing,
    });
    engine.submit(&mut work.collect::<Vec<_>>())
}

fn prompt(seed: u32) -> Vec<u32> {
    (0..64 + seed).map(|i| (i * 37 + seed) % 90).collect()
}

#[test]
fn the_first_stage_works_on_the_next_group_while_the_second_works_on_this_one() {
    const STEPS: usize = 6;
    let stages = Arc::new(Stages::default());
    let mut engine = engine_on(&fixture("qwen3_5"), options(), (2, 1), |rank, b| stages.wrap(rank, b));
    let mut sequences: Vec<SequenceCache> =
        (0..2).map(|seed| decoded(&mut engine, &prompt(seed), &[])).collect();
    // The first step, and those of the loop.
    stages.count(1 + STEPS);
    let (first, second) = sequences.split_at_mut(1);
    let mut in_flight = submit(&mut engine, first, 5).expect("runs");
    for i in 0..STEPS {
        let (next, this) = if i % 2 == 0 { (&mut *second, &mut *first) } else { (&mut *first, &mut *second) };
        let ticket = submit(&mut engine, next, 6).expect("runs");
        engine.take(in_flight).expect("runs");
        this[0].advance(1);
        in_flight = ticket;
    }
    engine.take(in_flight).expect("runs");
    assert_eq!(stages.begun(), [1 + STEPS; 2]);
    assert_eq!(stages.alone(), 0, "a stage waits for the other");
    sequences.into_iter().for_each(|sequence| engine.release(sequence));
    end(engine);
}

/// An engine that is dropped with steps under way leaves devices on which another one runs.
#[test]
fn an_engine_can_be_dropped_while_steps_are_under_way() {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let checkpoint = Checkpoint::open(&fixture("qwen3_5")).expect("the checkpoint opens");
        let source = (&CheckpointParameters(&checkpoint) as _, checkpoint.config());
        let parts = splitting::parts(source, options(), (3, 1)).expect("it divides");
        let devices = backends(parts.len(), false);
        for faulty in [false, true, false] {
            let fault = Arc::new(Fault::default());
            let mut all = devices.clone();
            all[0] = InterceptedBackend::new(Arc::clone(&all[0]), Arc::clone(&fault));
            let mut engine = splitting::load_on(source, options(), all, &parts).expect("the model loads");
            let mut sequences: Vec<SequenceCache> =
                (0..3).map(|seed| decoded(&mut engine, &prompt(seed), &[])).collect();
            if faulty {
                fault.0.store(1, Ordering::Relaxed);
            }
            for sequence in &mut sequences {
                submit(&mut engine, std::slice::from_mut(sequence), 5).expect("submitted");
            }
            assert_eq!(engine.steps_in_flight(), 3);
            let runtimes: Vec<Runtime> = engine.runtimes().cloned().collect();
            drop((engine, sequences));
            assert_eq!(fault.0.load(Ordering::Relaxed), usize::MAX, "it came to the fault, if there is one");
            for runtime in runtimes {
                runtime.clear_cache();
                assert_eq!(runtime.ledger().active().total(), 0);
            }
        }
        sender.send(()).expect("the test waits");
    });
    receiver.recv_timeout(Duration::from_secs(120)).expect("nothing waits without end, and nothing fails");
}

#[test]
fn what_uses_a_device_waits_for_the_steps_under_way_and_their_tokens_stay() {
    let mut engine = engine_on(&fixture("qwen3_5"), options(), (3, 1), |_, backend| backend);
    let run = |engine: &mut Engine, between: &dyn Fn(&mut Engine)| {
        let mut sequences: Vec<SequenceCache> =
            (0..3).map(|seed| decoded(engine, &prompt(seed), &[])).collect();
        let tickets: Vec<Ticket> =
            sequences.iter_mut().map(|s| submit(engine, std::slice::from_mut(s), 5).expect("runs")).collect();
        between(engine);
        let tokens: Vec<_> = tickets.into_iter().map(|ticket| engine.take(ticket).expect("runs")).collect();
        sequences.iter_mut().for_each(|sequence| sequence.advance(1));
        let states: Vec<_> = sequences.iter().map(|sequence| recurrent_bytes(engine, sequence)).collect();
        sequences.into_iter().for_each(|sequence| engine.release(sequence));
        (tokens, states)
    };
    let want = run(&mut engine, &|_| ());
    let got = run(&mut engine, &|engine| {
        let other = decoded(engine, &prompt(9), &[1, 2, 3]);
        let fork = engine.cache_mut().fork(&other).expect("fits");
        [other, fork].into_iter().for_each(|sequence| engine.release(sequence));
    });
    assert!(want == got);
    end(engine);
}

/// 16 rows of each step: the two of micro-batches, the one of prompts, and the one taken last.
#[test]
fn the_plan_has_host_memory_for_the_logits_of_each_step() {
    let host = |grid, options| {
        let engine = engine_on(&fixture("qwen3_5"), options, grid, |_, backend| backend);
        let bytes = engine.runtime().ledger().active().get(Category::Host) as usize;
        let row = engine.model().config.vocab * size_of::<f32>();
        end(engine);
        (bytes, row)
    };
    let few = EngineOptions { sequences: 3, ..options() };
    for (options, rows) in [(options(), 16), (few, 3)] {
        let ((pipeline, row), (shares, _)) = (host((2, 1), options), host((1, 2), options));
        assert_eq!(pipeline - shares, 4 * rows * row);
    }
}

#[test]
fn steps_that_cannot_be_under_way_are_refused() {
    let refusal = |engine: &mut Engine, sequences: &mut [SequenceCache]| {
        submit(engine, sequences, 5).expect_err("refused").to_string()
    };
    for (grid, options) in [((1, 2), options()), ((2, 1), EngineOptions { drafts: 2, ..options() })] {
        let mut engine = engine_on(&fixture("qwen3_5"), options, grid, |_, backend| backend);
        assert_eq!(engine.microbatches_max(), 1);
        let mut sequence = [decoded(&mut engine, &prompt(0), &[])];
        let error = refusal(&mut engine, &mut sequence);
        assert!(error.contains("only in a pipeline, without drafts"), "{error}");
    }
    // Devices that take turns gain nothing.
    let mut turns = CpuGroup::with_turns(2, 1).into_iter();
    let in_turns = |_, backend: Arc<dyn keel_array::Backend>| {
        if backend.is_planning() {
            return backend;
        }
        let options = CpuOptions { threads: Some(1), group: turns.next(), ..CpuOptions::default() };
        Arc::new(CpuBackend::new(options)) as _
    };
    assert_eq!(engine_on(&fixture("qwen3_5"), options(), (2, 1), in_turns).microbatches_max(), 1);
    let mut engine = engine_on(&fixture("qwen3_5"), options(), (2, 1), |_, backend| backend);
    let mut many: Vec<SequenceCache> = (0..17).map(|seed| decoded(&mut engine, &prompt(seed), &[])).collect();
    let by_host = many.iter_mut().map(|sequence| Work {
        sequence,
        ahead: 0,
        rows: WorkRows::Token(5),
        draw: None,
        reads: HostReads::Logits,
    });
    let error = engine.submit(&mut by_host.collect::<Vec<_>>()).expect_err("refused").to_string();
    assert!(error.contains("the host draws 17 tokens of a step; the logits of at most 16"), "{error}");
    many.into_iter().for_each(|sequence| engine.release(sequence));
    let mut all: Vec<SequenceCache> = (0..3).map(|seed| decoded(&mut engine, &prompt(seed), &[])).collect();
    let first = submit(&mut engine, &mut all[..1], 5).expect("runs");
    let error = refusal(&mut engine, &mut all[..2]);
    assert!(error.contains("a sequence of a step under way"), "{error}");
    let second = submit(&mut engine, &mut all[1..2], 5).expect("runs");
    let error = refusal(&mut engine, &mut all[2..]);
    assert!(error.contains("2 steps are under way"), "{error}");
    let prompts = |engine: &mut Engine, sequence: &mut SequenceCache, len: usize| {
        let tokens = &vec![7; len];
        let rows = WorkRows::Prompt { tokens, next: Some(8) };
        engine.submit(&mut [Work { sequence, ahead: 0, rows, draw: None, reads: HostReads::Nothing }])
    };
    let mut others: Vec<SequenceCache> = (0..2).map(|_| engine.open().expect("room")).collect();
    let error = prompts(&mut engine, &mut others[0], 65).expect_err("refused").to_string();
    assert!(error.contains("64-token grid"), "{error}");
    let third = prompts(&mut engine, &mut others[0], 64).expect("runs");
    let error = prompts(&mut engine, &mut others[1], 64).expect_err("refused").to_string();
    assert!(error.contains("a step of prompts is under way"), "{error}");
    let error = engine.take(second).expect_err("the other is the first").to_string();
    assert!(error.contains("not the first"), "{error}");
    engine.take(first).expect("runs");
    engine.take(second).expect("runs");
    assert_eq!(engine.take(third).expect("runs"), [None]);
    let error = refusal(&mut engine, &mut []);
    assert!(error.contains("a step of 0 answers"), "{error}");
    all.into_iter().chain(others).for_each(|sequence| engine.release(sequence));
    end(engine);
}
