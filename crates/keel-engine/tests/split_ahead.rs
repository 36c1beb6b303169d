//! Steps of a tensor split that run ahead of the host. Each answer equals that of steps that are waited for. On the CPU
//! the backends only say that they queue. With `KEEL_TEST_CUDA=1` the same runs on two GPUs, which do.

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use common::batching::{Outcome, assert_all_is_back, run, step};
use common::fixture;
use common::splitting::{self, Fault, end, engine_on};
use keel_array::sampling::Draw;
use keel_array::{ArrayError, Backend, Compute, Launch, Runtime, RuntimeOptions};
use keel_cuda::{CudaBackend, CudaGroup, CudaOptions, Survey};
use keel_engine::batch::{BatchOptions, BatchRequest, Batcher};
use keel_engine::split::PlacedPart;
use keel_engine::{Engine, EngineOptions, FinishReason, SamplerOptions, Work, WorkRows};
use keel_models::loading::CheckpointParameters;
use keel_testkit::intercepted::{InterceptedBackend, Interceptor};
use keel_weights::Checkpoint;

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

fn batcher(engine: Engine) -> Batcher {
    let options = BatchOptions { step_tokens: 128, reuse_generated: true, ..BatchOptions::default() };
    Batcher::new(engine, options)
}

const REQUESTS: usize = 20;

/// Request `i`: greedy, sampled, or (one in ten) drawn by the host. Answers cross the grid and pages.
fn request(i: usize, end_tokens: Vec<u32>) -> BatchRequest {
    let prompt = (0..30 + 37 * i % 240).map(|j| ((j * 7 + i * 131 + 5) % 90) as u32).collect();
    let mut request = BatchRequest::new(i as u64, prompt, [45, 1, 80, 20, 7][i % 5]);
    let sampled =
        SamplerOptions { temperature: 0.9, top_k: 50, seed: i as u64 + 3, ..SamplerOptions::default() };
    match i % 10 {
        0 | 3 | 6 => {}
        9 => request.sampler = SamplerOptions { repetition_penalty: 1.2, ..sampled },
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
    for (name, shares) in [("qwen3_5", 2), ("qwen3_5_moe", 2), ("llama", 2)] {
        let mut waiting = batcher(engine_on(&fixture(name), options(), (1, shares), |_, backend| backend));
        let mut ahead = batcher(engine_on(&fixture(name), options(), (1, shares), says_it_queues));
        expect_answers_of_waiting(&mut waiting, &mut ahead, name);
        [waiting, ahead].into_iter().for_each(|batcher| end(batcher.into_engine()));
    }
}

/// An engine on two GPUs. `wrap` gets each one's rank and backend.
fn engine_on_gpus(name: &str, mut wrap: impl FnMut(usize, Arc<dyn Backend>) -> Arc<dyn Backend>) -> Engine {
    let checkpoint = Checkpoint::open(&fixture(name)).expect("the checkpoint opens");
    let source = (&CheckpointParameters(&checkpoint) as _, checkpoint.config());
    let parts = splitting::parts(source, options(), (1, 2)).expect("it divides");
    let gpu = |(ordinal, group)| {
        let options =
            CudaOptions { ordinal, deterministic: true, group: Some(group), ..CudaOptions::default() };
        let backend = Arc::new(CudaBackend::new(&options).expect("a GPU, and NCCL"));
        Runtime::new(wrap(ordinal, backend), RuntimeOptions::default())
    };
    let devices = PlacedPart::each(CudaGroup::of(2, 2).into_iter().enumerate().map(gpu), parts);
    let engine = Engine::load_on(&devices, source.0, source.1, options(), &|_| ());
    let mut engine = engine.expect("the model loads");
    engine.make_ready(&mut |_, _, _| ()).expect("it gets ready");
    engine
}

/// Runs a test on two GPUs, if there are so many.
fn on_two_gpus(test: fn()) {
    if !keel_testkit::has_gpu!() {
        return;
    }
    if Survey::take().gpus.len() < 2 {
        return keel_testkit::skipped!("needs two GPUs");
    }
    let (sender, receiver) = channel();
    let thread = std::thread::spawn(move || {
        test();
        sender.send(()).expect("the test waits");
    });
    receiver.recv_timeout(Duration::from_secs(300)).expect("no device waits without end");
    // Its devices close at its end. The program must not end meanwhile.
    thread.join().expect("its devices close");
}

#[test]
fn answers_on_two_gpus_are_those_of_steps_that_are_waited_for() {
    struct Waiting;
    impl Interceptor for Waiting {}
    on_two_gpus(|| {
        for name in ["qwen3_5_moe", "llama"] {
            let waits = |_, backend| InterceptedBackend::new(backend, Arc::new(Waiting)) as _;
            let mut waiting = batcher(engine_on_gpus(name, waits));
            let mut ahead = batcher(engine_on_gpus(name, |_, backend| backend));
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

/// A GPU that queues, and lets a launch fail.
struct FaultyQueue(Arc<Fault>, When);

impl FaultyQueue {
    fn fail_if(&self, fails_here: bool) -> Result<(), ArrayError> {
        match !fails_here || self.0.passes() {
            true => Ok(()),
            false => Err(ArrayError::Kernel { op: "launch".into(), reason: "injected".into() }),
        }
    }
}

impl Interceptor for FaultyQueue {
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
    on_two_gpus(|| {
        let cases = [("qwen3_5_moe", 0), ("qwen3_5_moe", 1), ("llama", 0), ("llama", 1)];
        let times = [When::Waiting, When::Enqueued, When::Late];
        for ((name, rank), when) in cases.into_iter().flat_map(|case| times.map(|when| (case, when))) {
            println!("{name}, device {rank}, {when:?}");
            let fault = Arc::new(Fault::default());
            let faulty = |backend| match when {
                When::Waiting => {
                    InterceptedBackend::new(backend, Arc::new(Queueing(Arc::clone(&fault)))) as _
                }
                _ => InterceptedBackend::new(backend, Arc::new(FaultyQueue(Arc::clone(&fault), when))) as _,
            };
            let mut ahead = batcher(engine_on_gpus(name, |of, backend| match of == rank {
                true => faulty(backend),
                false => backend,
            }));
            let want = run(&mut ahead, five_requests());
            expect_faults(&mut ahead, &fault, &want, name, &[0, 1, 2, 3, 9, 30]);
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
        let work = Work { sequence, ahead, rows, draw: Some(Draw::GREATEST), by_host: false };
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

fn five_requests() -> Vec<BatchRequest> {
    (0..5).map(|i| request(i, Vec::new())).collect()
}

/// Lets launches fail, one in a run of five requests. Requests end with the error or with the answers of others, and
/// the devices serve on.
fn expect_faults(batcher: &mut Batcher, fault: &Fault, want: &[Outcome], name: &str, launches: &[usize]) {
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
    // Only states that have moved cannot be taken back.
    assert_eq!(have_ended, name.starts_with("qwen3_5"), "{name}");
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
        expect_faults(&mut ahead, &fault, &want, name, &[0, 3, 8, 20, 33, 50]);
        [&mut waiting, &mut ahead].into_iter().for_each(assert_all_is_back);
        [waiting, ahead].into_iter().for_each(|batcher| end(batcher.into_engine()));
    }
}
