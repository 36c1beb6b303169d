//! A model on several devices gets ready before its first request, as on one: nothing is left to be done late.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use crate::common::batching::finish;
use crate::common::fixture;
use crate::common::splitting::{Fault, engine_on, load_planned_on_gpus, on_gpus, parts};
use keel_array::{Backend, Compute, Launch, Preparations, PreparedPiece, Result, Runtime};
use keel_engine::batch::{BatchOptions, BatchRequest, Batcher};
use keel_engine::{EarlySteps, Engine, EngineOptions, LateWork};
use keel_models::loading::CheckpointParameters;
use keel_testkit::intercepted::{InterceptedBackend, Interceptor};
use keel_weights::Checkpoint;

/// Acts as a backend that compiles, and captures a program at its second run.
#[derive(Default)]
struct Capturing {
    runs: Mutex<HashMap<PreparedPiece, u64>>,
}

impl Interceptor for Capturing {
    fn launch(&self, backend: &dyn Backend, launch: &Launch<'_>) -> Result<()> {
        if let Some(piece) = launch.prepared() {
            *self.runs.lock().expect("no test panics here").entry(piece).or_default() += 1;
        }
        backend.launch(launch)
    }

    fn is_compiling(&self, _: &dyn Backend) -> bool {
        true
    }

    fn preparations(&self, _: &dyn Backend) -> Preparations {
        let runs = self.runs.lock().expect("no test panics here");
        let captured = runs.values().filter(|runs| **runs > 1).count() as u64;
        Preparations { captured, ..Preparations::default() }
    }
}

fn options(drafts: usize) -> EngineOptions {
    EngineOptions {
        context: 320,
        sequences: 3,
        prefill_step: 128,
        drafts,
        compute: Compute::F32,
        ..EngineOptions::default()
    }
}

/// Prompts of many lengths, in batches of every size. Returns the texts.
fn serve(engine: Engine) -> (Batcher, Vec<Vec<u32>>) {
    let mut batcher = Batcher::new(engine, BatchOptions { step_tokens: 128, ..BatchOptions::default() });
    let (mut texts, mut next) = (Vec::new(), 0);
    for size in [1, 2, 3, 1, 3, 2] {
        let request = |i: usize| {
            let prompt = (0..1 + i * 23 % 290).map(|j| ((i * 31 + j * 7) % 90) as u32).collect();
            BatchRequest::new(i as u64, prompt, 1 + i % 7)
        };
        (next..next + size).for_each(|i| batcher.submit(request(i), Instant::now()).expect("accepted"));
        next += size;
        let outcomes = finish(&mut batcher, next).into_iter().skip(texts.len());
        texts.extend(outcomes.map(|outcome| match outcome.error {
            None => outcome.tokens,
            Some(error) => panic!("{error}"),
        }));
    }
    (batcher, texts)
}

/// Steps of a split model wait for all devices, so all must run them at the same time while they get ready.
#[test]
fn nothing_is_left_to_be_done_when_requests_come() {
    for (name, drafts, grid) in [
        ("qwen3_5", 2, (2, 1)),
        ("qwen3_5", 2, (1, 2)),
        ("qwen3_5_moe", 2, (2, 2)),
        ("gemma3_text", 0, (2, 1)),
    ] {
        let (sender, receiver) = mpsc::channel();
        std::thread::spawn(move || {
            let capturing =
                |_, backend| InterceptedBackend::new(backend, Arc::new(Capturing::default())) as _;
            let mut engine = engine_on(&fixture(name), options(drafts), grid, capturing);
            engine.make_ready(&mut |_, _, _| ()).expect("it gets ready");
            let planned: Vec<_> = engine.runtimes().map(|runtime| runtime.ledger().active()).collect();
            let runtimes: Vec<Runtime> = engine.runtimes().cloned().collect();
            for runtime in &runtimes {
                assert!(runtime.backend().preparations().captured > 0, "{name}: all devices have run");
            }
            let (batcher, texts) = serve(engine);
            let now: Vec<_> = runtimes.iter().map(|runtime| runtime.ledger().active()).collect();
            assert_eq!(now, planned, "{name}, {grid:?}");
            sender.send((batcher.status().late_work, texts)).expect("the test waits");
        });
        let (late, texts) =
            receiver.recv_timeout(Duration::from_secs(100)).expect("no device waits without end");
        assert_eq!(late, LateWork::default(), "{name}, {grid:?}");
        let (_, fresh) = serve(engine_on(&fixture(name), options(drafts), grid, |_, backend| backend));
        assert_eq!(texts, fresh, "{name}, {grid:?}: getting ready changes no state");
    }
}

/// A device that fails while all get ready ends that with its error, and all can try again.
#[test]
fn a_device_that_fails_while_all_get_ready_is_an_error() {
    struct Failing(Fault);
    impl Interceptor for Failing {
        fn launch(&self, backend: &dyn Backend, launch: &Launch<'_>) -> Result<()> {
            self.0.launch(backend, launch)
        }
        fn is_compiling(&self, _: &dyn Backend) -> bool {
            true
        }
    }
    for (grid, failing) in [((2, 1), 0), ((1, 2), 1)] {
        let fault = Arc::new(Failing(Fault::default()));
        let wrapped = |rank, backend| match rank == failing {
            true => InterceptedBackend::new(backend, Arc::clone(&fault)) as _,
            false => InterceptedBackend::new(backend, Arc::new(Failing(Fault::default()))) as _,
        };
        let mut engine = engine_on(&fixture("qwen3_5"), options(0), grid, wrapped);
        fault.0.0.store(3, std::sync::atomic::Ordering::Relaxed);
        let error = engine.make_ready(&mut |_, _, _| ()).expect_err("a device fails").to_string();
        assert!(error.contains("injected"), "{grid:?}: {error}");
        engine.make_ready(&mut |_, _, _| ()).expect("it gets ready");
        let (batcher, _) = serve(engine);
        assert_eq!(batcher.status().late_work, LateWork::default());
    }
}

/// Two GPUs compile while weights are read, each the kernels of its own programs.
#[test]
fn gpus_have_nothing_left_to_load_after_their_load() {
    on_gpus(2, || {
        let checkpoint = Checkpoint::open(&fixture("qwen3_5")).expect("the checkpoint opens");
        let source = (&CheckpointParameters(&checkpoint) as _, checkpoint.config());
        for grid in [(1, 2), (2, 1)] {
            let options = EngineOptions { early_steps: EarlySteps::All, ..options(0) };
            let parts = parts(source, options, grid).expect("it divides");
            let mut engine = load_planned_on_gpus(source, options, &parts).expect("it loads");
            let loaded = |engine: &Engine| -> Vec<u64> {
                engine.runtimes().map(|runtime| runtime.backend().preparations().loaded).collect()
            };
            let early = loaded(&engine);
            assert!(early.iter().all(|&count| count > 0), "{grid:?}");
            engine.make_ready(&mut |_, _, _| ()).expect("it gets ready");
            assert_eq!(loaded(&engine), early, "{grid:?}");
        }
    });
}
