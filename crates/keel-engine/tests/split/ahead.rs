//! Steps of a tensor split that run ahead of the host. Each answer equals that of steps that are waited for. On the CPU
//! the backends only say that they queue. With `KEEL_TEST_CUDA=1` the same runs on two GPUs, which do.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::common::batching::{Outcome, assert_all_is_back, run, step};
use crate::common::fixture;
use crate::common::splitting::{Fault, end, engine_on, engine_on_gpus, on_gpus};
use keel_array::sampling::Draw;
use keel_array::{ArrayError, Backend, Compute, Launch};
use keel_engine::batch::{BatchOptions, BatchRequest, Batcher};
use keel_engine::{
    Depth, Engine, EngineOptions, FinishReason, HostReads, SamplerOptions, SpeculationOptions, Work, WorkRows,
};
use keel_testkit::intercepted::{InterceptedBackend, Interceptor, injected};

fn options() -> EngineOptions {
    EngineOptions {
        context: 512,
        sequences: 6,
        prefill_step: 128,
        checkpoints: 16,
        pool_pages: Some(12),
        compute: Compute::F32,
        ..EngineOptions::default()
    }
}

/// A backend that says it queues, and lets a launch fail.
struct Queueing(Arc<Fault>);

impl Interceptor for Queueing {
    fn is_queueing(&self) -> bool {
        true
    }

    fn launch(&self, backend: &dyn Backend, launch: &Launch<'_>) -> Result<(), ArrayError> {
        self.0.launch(backend, launch)
    }
}

fn says_it_queues(_: usize, backend: Arc<dyn Backend>) -> Arc<dyn Backend> {
    InterceptedBackend::new(backend, Arc::new(Queueing(Arc::default())))
}

fn drafting(drafts: usize) -> EngineOptions {
    EngineOptions { drafts, ..options() }
}

fn batcher(engine: Engine) -> Batcher {
    let options = BatchOptions { step_tokens: 128, reuse_generated: true, ..BatchOptions::default() };
    Batcher::new(engine, options)
}

/// A batch of which no answer drafts.
fn plain_batcher(engine: Engine) -> Batcher {
    let speculation = SpeculationOptions { depth: Depth::Fixed(0), ..SpeculationOptions::default() };
    let options =
        BatchOptions { step_tokens: 128, reuse_generated: true, speculation, ..BatchOptions::default() };
    Batcher::new(engine, options)
}

const REQUESTS: usize = 20;

/// Request `i`: greedy, sampled, or (one in ten) sampled by the host. Answers cross the grid and pages. The last ones
/// do not draft: rejection sampling keeps their distribution, but not their text.
fn request(i: usize, end_tokens: Vec<u32>) -> BatchRequest {
    let prompt = (0..30 + 37 * i % 240).map(|j| ((j * 7 + i * 131 + 5) % 90) as u32).collect();
    let mut request = BatchRequest::new(i as u64, prompt, [45, 1, 80, 20, 7][i % 5]);
    let sampled =
        SamplerOptions { temperature: 0.9, top_k: 50, seed: i as u64 + 3, ..SamplerOptions::default() };
    match i % 10 {
        0 | 3 | 6 => {}
        9 => {
            request.sampler = SamplerOptions { repetition_penalty: 1.2, ..sampled };
            request.speculate = false;
        }
        _ => request.sampler = sampled,
    }
    request.end_tokens = end_tokens;
    request
}

/// Submits a request every `every` steps, and cancels some after a while. Returns the answers, and between how many
/// calls a step was under way.
fn traffic(batcher: &mut Batcher, every: usize, ends: &[Vec<u32>]) -> (Vec<Outcome>, usize) {
    let mut outcomes: Vec<Outcome> = (0..REQUESTS).map(|_| Outcome::default()).collect();
    let (now, mut ahead) = (Instant::now(), 0);
    for at in 0..5_000 {
        if at % every == 0 && at / every < REQUESTS {
            batcher.submit(request(at / every, ends[at / every].clone()), now).expect("accepted");
        }
        if at % (5 * every) == 2 && at / every > 6 {
            batcher.cancel((at / every - 4) as u64);
        }
        step(batcher, now, &mut outcomes);
        ahead += batcher.engine().steps_in_flight();
        if batcher.is_idle() && at / every >= REQUESTS {
            break;
        }
    }
    assert!(batcher.is_idle());
    (outcomes, ahead)
}

fn expect_answers_of_waiting(waiting: &mut Batcher, ahead: &mut Batcher, name: &str) {
    assert!(!waiting.engine().runs_ahead() && ahead.engine().runs_ahead());
    let alone = |batcher: &mut Batcher, request: BatchRequest| {
        run(batcher, vec![BatchRequest { id: 0, ..request }]).remove(0)
    };
    let whole: Vec<Outcome> = (0..REQUESTS).map(|i| alone(waiting, request(i, Vec::new()))).collect();
    // A token from the middle of every other answer becomes its end token.
    let end_of = |(i, outcome): (usize, &Outcome)| match outcome.tokens.get(outcome.tokens.len() / 2) {
        Some(&end) if i % 2 == 0 => vec![end],
        _ => Vec::new(),
    };
    let ends: Vec<Vec<u32>> = whole.iter().enumerate().map(end_of).collect();
    let ended: Vec<Outcome> = (0..REQUESTS).map(|i| alone(waiting, request(i, ends[i].clone()))).collect();
    assert!(ended.iter().any(|outcome| outcome.finish == Some(FinishReason::Stop)));
    let none = vec![Vec::new(); REQUESTS];
    for (every, ends, want) in [(11, &none, &whole), (3, &ends, &ended)] {
        let (got, steps) = traffic(ahead, every, ends);
        assert!(steps > 100, "{name}: steps run ahead, {steps}");
        for (i, got) in got.into_iter().enumerate() {
            assert!(got.error.is_none(), "{name}, request {i}: {:?}", got.error);
            // A cancelled request has the first tokens.
            let tokens =
                if got.finish.is_some() { &want[i].tokens } else { &want[i].tokens[..got.tokens.len()] };
            assert_eq!(&got.tokens, tokens, "{name}, one in {every} steps, request {i}");
        }
    }
    [waiting, ahead].into_iter().for_each(assert_all_is_back);
}

#[test]
fn answers_are_those_of_steps_that_are_waited_for() {
    for (name, drafts) in
        [("qwen3_5", 0), ("qwen3_5_moe", 0), ("llama", 0), ("qwen3_5", 3), ("qwen3_5_moe", 1)]
    {
        let mut waiting = batcher(engine_on(&fixture(name), options(), (1, 2), |_, backend| backend));
        let mut ahead = batcher(engine_on(&fixture(name), drafting(drafts), (1, 2), says_it_queues));
        expect_answers_of_waiting(&mut waiting, &mut ahead, name);
        [waiting, ahead].into_iter().for_each(|batcher| end(batcher.into_engine()));
    }
}

#[test]
fn answers_on_two_gpus_are_those_of_steps_that_are_waited_for() {
    struct Waiting;
    impl Interceptor for Waiting {}
    on_gpus(2, || {
        for name in ["qwen3_5_moe", "llama"] {
            let waits = |_, backend| InterceptedBackend::new(backend, Arc::new(Waiting)) as _;
            let mut waiting = batcher(engine_on_gpus(name, options(), waits));
            let mut ahead = batcher(engine_on_gpus(name, options(), |_, backend| backend));
            expect_answers_of_waiting(&mut waiting, &mut ahead, name);
        }
    });
}

/// When a launch fails.
#[derive(Clone, Copy, Debug)]
enum When {
    /// It is refused. The GPU runs each launch to its end before the next.
    Waiting,
    /// It is refused, while launches before it run.
    Enqueued,
    /// After it has run.
    Late,
}

/// A device that queues, and lets a launch fail.
struct FaultyQueue(Arc<Fault>, When);

impl FaultyQueue {
    fn fail_if(&self, fails_here: bool) -> Result<(), ArrayError> {
        match !fails_here || self.0.passes() {
            true => Ok(()),
            false => Err(injected("launch")),
        }
    }
}

impl Interceptor for FaultyQueue {
    fn is_queueing(&self) -> bool {
        true
    }

    fn passes_queue(&self) -> bool {
        true
    }

    fn before_enqueue(&self) -> Result<(), ArrayError> {
        self.fail_if(matches!(self.1, When::Enqueued))
    }

    fn after_wait(&self) -> Result<(), ArrayError> {
        self.fail_if(matches!(self.1, When::Late))
    }
}

/// The other GPU has a step under way, or two, when one refuses a launch, or finds out later that it has failed.
#[test]
fn a_gpu_that_fails_ends_its_steps_and_nothing_else() {
    on_gpus(2, || {
        let plain = [("qwen3_5_moe", 0), ("qwen3_5_moe", 1), ("llama", 0), ("llama", 1)];
        let catching_up = [("qwen3_5_moe", 0, 3), ("qwen3_5_moe", 1, 3)];
        let cases = plain.into_iter().map(|(name, rank)| (name, rank, 0)).chain(catching_up);
        let times = [When::Waiting, When::Enqueued, When::Late];
        for ((name, rank, drafts), when) in cases.flat_map(|case| times.map(|when| (case, when))) {
            println!("{name}, device {rank}, up to {drafts} drafts, {when:?}");
            let fault = Arc::new(Fault::default());
            let faulty = |backend| match when {
                When::Waiting => {
                    InterceptedBackend::new(backend, Arc::new(Queueing(Arc::clone(&fault)))) as _
                }
                _ => InterceptedBackend::new(backend, Arc::new(FaultyQueue(Arc::clone(&fault), when))) as _,
            };
            let mut ahead =
                plain_batcher(engine_on_gpus(name, drafting(drafts), |of, backend| match of == rank {
                    true => faulty(backend),
                    false => backend,
                }));
            let want = run(&mut ahead, five_requests());
            let have_ended = expect_faults(&mut ahead, &fault, &want, name, &[0, 1, 2, 3, 9, 30, 31, 32, 33]);
            assert_eq!(have_ended, name.starts_with("qwen3_5"), "only states that have moved are lost");
            assert_all_is_back(&mut ahead);
        }
    });
}

/// Each device has begun a step when the host submits the next one.
#[test]
fn a_step_is_begun_on_all_devices_before_the_one_before_it_is_taken() {
    let faults: [Arc<Fault>; 2] = Default::default();
    let mut engine = engine_on(&fixture("qwen3_5"), options(), (1, 2), |rank, backend| {
        InterceptedBackend::new(backend, Arc::new(Queueing(Arc::clone(&faults[rank]))))
    });
    let mut sequence = engine.open().expect("a slot is free");
    engine.prefill(&mut sequence, &[5, 6, 7], &mut Vec::new(), &mut |_| ()).expect("runs");
    // A device counts its launches down.
    let launches = || faults.each_ref().map(|fault| 1_000_000 - fault.0.load(Ordering::Relaxed));
    faults.iter().for_each(|fault| fault.0.store(1_000_000, Ordering::Relaxed));
    let submit = |engine: &mut Engine, sequence: &mut _, ahead: usize, rows| {
        let work = Work { sequence, ahead, rows, draw: Some(Draw::GREATEST), reads: HostReads::Nothing };
        engine.submit(&mut [work]).expect("two steps may be under way")
    };
    let first = submit(&mut engine, &mut sequence, 0, WorkRows::Token(8));
    let one = launches();
    assert!(one[0] > 0 && one[0] == one[1], "{one:?}");
    let second = submit(&mut engine, &mut sequence, 1, WorkRows::Drawn(0));
    assert_eq!(launches(), one.map(|count| 2 * count));
    for ticket in [first, second] {
        assert!(engine.take(ticket).expect("runs")[0].is_some());
        sequence.advance(1);
    }
    engine.release(sequence);
    end(engine);
}

/// The host draws for some answers of a batch, and for all. The next step of the others is begun before it has their
/// logits.
#[test]
fn answers_that_the_host_draws_make_only_themselves_wait() {
    let drawn_by_host = |i: usize| {
        let sampler = SamplerOptions { repetition_penalty: 1.2, ..SamplerOptions::default() };
        BatchRequest { id: i as u64, max_tokens: 40, sampler, ..request(i, Vec::new()) }
    };
    let some = |i: usize| match i % 2 {
        0 => BatchRequest { id: i as u64, max_tokens: 80, ..request(3 * i, Vec::new()) },
        _ => drawn_by_host(i),
    };
    let mut waiting = batcher(engine_on(&fixture("qwen3_5"), options(), (1, 2), |_, backend| backend));
    let mut ahead = batcher(engine_on(&fixture("qwen3_5"), options(), (1, 2), says_it_queues));
    for (of, under_way_min) in [(&some as &dyn Fn(usize) -> BatchRequest, 7), (&drawn_by_host, 0)] {
        let mut alone = |i| run(&mut waiting, vec![BatchRequest { id: 0, ..of(i) }]).remove(0);
        let want: Vec<Outcome> = (0..4).map(&mut alone).collect();
        let now = Instant::now();
        let mut outcomes: Vec<Outcome> = (0..4).map(|_| Outcome::default()).collect();
        for i in 0..4 {
            ahead.submit(of(i), now).expect("accepted");
        }
        let (mut under_way, mut steps) = (0, 0);
        while !ahead.is_idle() {
            step(&mut ahead, now, &mut outcomes);
            (under_way, steps) = (under_way + ahead.engine().steps_in_flight(), steps + 1);
        }
        assert!(10 * under_way >= under_way_min * steps, "{under_way} of {steps} steps");
        let tokens = |all: &[Outcome]| all.iter().map(|one| one.tokens.clone()).collect::<Vec<_>>();
        assert_eq!(tokens(&outcomes), tokens(&want));
    }
    [&mut waiting, &mut ahead].into_iter().for_each(assert_all_is_back);
    [waiting, ahead].into_iter().for_each(|batcher| end(batcher.into_engine()));
}

fn five_requests() -> Vec<BatchRequest> {
    (0..5).map(|i| request(i, Vec::new())).collect()
}

/// Lets launches fail, one in a run of five requests. Requests end with the error or with the answers of others, and
/// the devices serve on.
/// Returns whether a request has ended with the error.
fn expect_faults(
    batcher: &mut Batcher,
    fault: &Fault,
    want: &[Outcome],
    name: &str,
    launches: &[usize],
) -> bool {
    let mut have_ended = false;
    for &at in launches {
        fault.0.store(at, Ordering::Relaxed);
        let start = Instant::now();
        let got = run(batcher, five_requests());
        assert!(start.elapsed() < Duration::from_secs(60), "nobody waits for a device that has failed");
        assert_eq!(fault.0.load(Ordering::Relaxed), usize::MAX, "{name}, launch {at}: it has failed");
        for (i, (got, want)) in got.into_iter().zip(want).enumerate() {
            match got.error {
                None => assert_eq!(got.tokens, want.tokens, "{name}, launch {at}, request {i}"),
                Some(error) => {
                    have_ended = true;
                    assert!(error.to_string().contains("injected"), "{name}, launch {at}: {error}");
                    assert!(want.tokens.starts_with(&got.tokens));
                }
            }
        }
        let again = run(batcher, five_requests());
        assert!(again.iter().zip(want).all(|(got, want)| got.tokens == want.tokens), "it serves on");
    }
    have_ended
}

#[test]
fn a_device_that_fails_ends_its_steps_and_nothing_else() {
    for (name, rank) in [("qwen3_5", 0), ("qwen3_5", 1), ("llama", 0), ("llama", 1)] {
        let mut waiting = batcher(engine_on(&fixture(name), options(), (1, 2), |_, backend| backend));
        let fault = Arc::new(Fault::default());
        let mut ahead = batcher(engine_on(&fixture(name), options(), (1, 2), |of, backend| {
            let fault = if of == rank { Arc::clone(&fault) } else { Arc::default() };
            InterceptedBackend::new(backend, Arc::new(Queueing(fault)))
        }));
        let want = run(&mut waiting, five_requests());
        let have_ended = expect_faults(&mut ahead, &fault, &want, name, &[0, 3, 8, 20, 33, 50]);
        assert_eq!(have_ended, name.starts_with("qwen3_5"), "only states that have moved are lost");
        [&mut waiting, &mut ahead].into_iter().for_each(assert_all_is_back);
        [waiting, ahead].into_iter().for_each(|batcher| end(batcher.into_engine()));
    }
}

/// Where the engine may draft and no answer does, the MTP head catches up after some of the steps.
#[test]
fn a_device_that_fails_where_the_head_catches_up_ends_its_steps_and_nothing_else() {
    for (rank, when) in
        [0, 1].into_iter().flat_map(|rank| [When::Waiting, When::Late].map(|when| (rank, when)))
    {
        let fault = Arc::new(Fault::default());
        let engine = engine_on(&fixture("qwen3_5"), drafting(3), (1, 2), |of, backend| {
            let fault = if of == rank { Arc::clone(&fault) } else { Arc::default() };
            match when {
                When::Late => InterceptedBackend::new(backend, Arc::new(FaultyQueue(fault, when))) as _,
                _ => InterceptedBackend::new(backend, Arc::new(Queueing(fault))) as _,
            }
        });
        let mut ahead = plain_batcher(engine);
        let want = run(&mut ahead, five_requests());
        let launches: Vec<usize> = (0..60).step_by(3).chain(60..75).collect();
        expect_faults(&mut ahead, &fault, &want, "qwen3_5", &launches);
        assert_all_is_back(&mut ahead);
        end(ahead.into_engine());
    }
}
