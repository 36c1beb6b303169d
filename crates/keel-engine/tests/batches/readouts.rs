//! Prompts that are read while others are answered, on a backend that queues. No answer waits for them, and each value
//! is the one of a step that is waited for. With `KEEL_TEST_CUDA=1` the same on a GPU.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use crate::common::batching::{Outcome, assert_all_is_back, finish_from, run, step};
use crate::common::queueing::{Poison, Queueing, queueing, waiting_and_queueing};
use crate::common::{demo, engine, runtime};
use keel_array::{Backend, Kernel, Launch, Op, Runtime, RuntimeOptions};
use keel_cpu::{CpuBackend, CpuOptions};
use keel_engine::batch::{BatchOptions, BatchRequest, Batcher, Readout};
use keel_engine::{Depth, EngineOptions, SamplerOptions, SpeculationOptions, plan};
use keel_models::loading::CheckpointParameters;
use keel_testkit::intercepted::{InterceptedBackend, Interceptor};
use keel_weights::Checkpoint;

fn options(sequences: usize, drafts: usize) -> EngineOptions {
    EngineOptions {
        context: 512,
        sequences,
        prefill_step: 128,
        row_hidden: true,
        drafts,
        ..EngineOptions::default()
    }
}

/// No answer makes drafts.
fn batcher(runtime: &Runtime, options: EngineOptions) -> Batcher {
    let speculation = SpeculationOptions { depth: Depth::Fixed(0), ..SpeculationOptions::default() };
    Batcher::new(engine(&demo(), runtime, options), BatchOptions { speculation, ..BatchOptions::default() })
}

fn prompt(i: usize) -> Vec<u32> {
    (0..30 + i * 67 % 290).map(|j| ((j * 7 + i * 131 + 5) % 500) as u32).collect()
}

fn to_read(i: usize, readout: Readout) -> BatchRequest {
    BatchRequest::to_read(i as u64, prompt(i), readout)
}

fn logits() -> Readout {
    Readout::Logits(vec![7, 300, 41])
}

/// Runs each request alone, and expects the outcome that it got among others.
fn expect_as_alone(what: &str, alone: &mut Batcher, requests: &[&dyn Fn() -> BatchRequest], got: &[Outcome]) {
    assert_eq!(requests.len(), got.len());
    for (i, (request, got)) in requests.iter().zip(got).enumerate() {
        let want = run(alone, vec![BatchRequest { id: 0, ..request() }]).remove(0);
        alone.forget_prefixes();
        assert!(got.error.is_none() && got.finish.is_some(), "{what}: request {i}: {:?}", got.error);
        assert_eq!((&got.tokens, got.finish), (&want.tokens, want.finish), "{what}: request {i}");
        assert!(got.read == want.read, "{what}: request {i} read another value");
        assert_eq!(got.read.is_empty(), request().readout.is_none(), "{what}: request {i}");
    }
}

/// Reads prompts of at most `rows_max` tokens while two sequences are answered. The first runtime of each pair waits
/// for its steps.
fn expect_answers_run_ahead(
    runtimes: Vec<(Runtime, Runtime)>,
    options: EngineOptions,
    readouts: &[Readout],
    rows_max: usize,
) {
    let read = |i: usize, readout: &Readout| {
        let mut request = to_read(i, readout.clone());
        request.prompt.truncate(rows_max);
        request
    };
    for (waiting, queueing) in runtimes {
        let what = format!("{} drafts, {readouts:?}", options.drafts);
        let answer = |i: usize| move || BatchRequest::new(i as u64, prompt(i), 150);
        let answers = [answer(0), answer(1)];
        let reads: Vec<_> =
            readouts.iter().enumerate().map(|(i, readout)| move || read(2 + i, readout)).collect();
        let mut batcher_ahead = batcher(&queueing, options);
        let mut outcomes: Vec<Outcome> = (0..2 + readouts.len()).map(|_| Outcome::default()).collect();
        let now = Instant::now();
        answers.iter().for_each(|answer| batcher_ahead.submit(answer(), now).expect("accepted"));
        while outcomes[..2].iter().any(|outcome| outcome.tokens.is_empty()) {
            step(&mut batcher_ahead, now, &mut outcomes);
        }
        reads.iter().for_each(|read| batcher_ahead.submit(read(), now).expect("accepted"));
        while outcomes[2..].iter().any(|outcome| outcome.finish.is_none() && outcome.error.is_none()) {
            step(&mut batcher_ahead, now, &mut outcomes);
            assert_eq!(batcher_ahead.engine().steps_in_flight(), 1, "{what}: answers wait");
        }
        assert!(outcomes[..2].iter().all(|outcome| outcome.finish.is_none()), "{what}: the answers go on");
        let outcomes = finish_from(&mut batcher_ahead, outcomes);
        assert_all_is_back(&mut batcher_ahead);
        let answers = answers.iter().map(|answer| answer as &dyn Fn() -> BatchRequest);
        let all: Vec<_> = answers.chain(reads.iter().map(|read| read as &dyn Fn() -> BatchRequest)).collect();
        expect_as_alone(&what, &mut batcher(&waiting, options), &all, &outcomes);
    }
}

#[test]
fn answers_run_ahead_while_prompts_are_read() {
    let all = [Readout::LastHidden, Readout::MeanHidden, logits()];
    expect_answers_run_ahead(waiting_and_queueing(), options(6, 0), &all, 512);
    // In an engine that drafts, logits are not kept.
    expect_answers_run_ahead(waiting_and_queueing(), options(6, 3), &all[..2], 512);
}

/// A step has room for 20 prompts, and keeps the logits of 16. The others end in a later step.
#[test]
fn answers_run_ahead_while_many_logits_are_read() {
    let cpu = CpuBackend::new(CpuOptions { threads: Some(2), ..CpuOptions::default() });
    let compiling = InterceptedBackend::new(Arc::new(cpu), Arc::new(Poison { queues: true }));
    let compiling = Runtime::new(compiling, RuntimeOptions::default());
    let options = EngineOptions { prefill_step: 512, ..options(24, 0) };
    expect_answers_run_ahead(vec![(runtime(2), compiling)], options, &[(); 20].map(|()| logits()), 20);
}

/// Requests of all kinds start and end in all steps.
#[test]
fn a_busy_batch_reads_what_each_prompt_gives_alone() {
    let request = |i: usize| {
        move || match i % 5 {
            0 => to_read(i, Readout::LastHidden),
            1 => to_read(i, Readout::MeanHidden),
            2 => to_read(i, logits()),
            3 => BatchRequest::new(i as u64, prompt(i), 9),
            _ => BatchRequest {
                sampler: SamplerOptions { repetition_penalty: 1.2, ..SamplerOptions::default() },
                ..BatchRequest::new(i as u64, prompt(i), 9)
            },
        }
    };
    let requests: Vec<_> = (0..19).map(request).collect();
    let all: Vec<_> = requests.iter().map(|request| request as &dyn Fn() -> BatchRequest).collect();
    for drafts in [0, 3] {
        for (waiting, queueing) in waiting_and_queueing() {
            let mut busy = batcher(&queueing, options(6, drafts));
            let got = run(&mut busy, all.iter().map(|request| request()).collect());
            assert_all_is_back(&mut busy);
            let mut alone = batcher(&waiting, options(6, drafts));
            expect_as_alone(&format!("{drafts} drafts"), &mut alone, &all, &got);
        }
    }
}

#[test]
fn values_that_cannot_be_read_end_their_prompt_alone() {
    let (runtime, queueing) = queueing(512);
    let mut batcher = batcher(&runtime, options(6, 0));
    queueing.breaks_settled_reads.store(true, Ordering::Relaxed);
    let readouts = [Readout::LastHidden, Readout::MeanHidden, logits()];
    let mut requests = vec![BatchRequest::new(0, prompt(0), 60)];
    requests.extend(readouts.into_iter().enumerate().map(|(i, readout)| to_read(1 + i, readout)));
    let outcomes = run(&mut batcher, requests);
    assert!(outcomes[0].error.is_none() && outcomes[0].tokens.len() == 60, "{:?}", outcomes[0].error);
    for outcome in &outcomes[1..] {
        let error = outcome.error.as_ref().map(ToString::to_string).unwrap_or_default();
        assert!(error.contains("injected") && outcome.read.is_empty(), "{error}");
    }
    assert_all_is_back(&mut batcher);
}

/// A backend that says it queues. It notes the rows of each program that copies rows and does nothing else.
#[derive(Default)]
struct RowCopies(Mutex<Vec<usize>>);

impl Interceptor for RowCopies {
    fn is_queueing(&self) -> bool {
        true
    }

    fn launch(&self, backend: &dyn Backend, launch: &Launch<'_>) -> keel_array::Result<()> {
        let rows = |kernel: &Kernel| (kernel.op == Op::Take).then(|| kernel.outputs[0].layout.shape[0]);
        let copied: Option<Vec<usize>> = launch.kernels().iter().map(rows).collect();
        let most = copied.and_then(|copied| copied.into_iter().max());
        self.0.lock().expect("no launch panics").extend(most);
        backend.launch(launch)
    }
}

/// One step ends the prompt of 300 tokens, and there is room for 6 prompts and 6 answers.
#[test]
fn steps_copy_the_hidden_states_that_are_read() {
    const TOKENS: usize = 20;
    for drafts in [0, 3] {
        let copies = Arc::new(RowCopies::default());
        let cpu = CpuBackend::new(CpuOptions { threads: Some(2), ..CpuOptions::default() });
        let backend = InterceptedBackend::new(Arc::new(cpu), Arc::clone(&copies));
        let mut batcher = batcher(&Runtime::new(backend, RuntimeOptions::default()), options(6, drafts));
        let ids: Vec<u32> = (0..300).map(|j| (j * 7 + 5) % 500).collect();
        let mut copied = |request: BatchRequest| {
            let outcome = run(&mut batcher, vec![request]).remove(0);
            assert!(outcome.error.is_none() && outcome.finish.is_some(), "{:?}", outcome.error);
            std::mem::take(&mut *copies.0.lock().expect("no launch panics"))
        };
        // The MTP head needs the hidden states of the steps that draw tokens.
        let answered = if drafts > 0 { vec![6; TOKENS] } else { Vec::new() };
        assert_eq!(copied(BatchRequest::new(0, ids.clone(), TOKENS)), answered, "{drafts} drafts");
        let read = |readout| BatchRequest::to_read(0, ids.clone(), readout);
        assert_eq!(copied(read(Readout::LastHidden)), [6], "{drafts} drafts");
        let mean = copied(read(Readout::MeanHidden));
        assert!(mean.len() > 1 && mean.iter().all(|&rows| rows == 128), "{drafts} drafts: {mean:?}");
    }
}

#[test]
fn hidden_states_that_are_kept_are_planned() {
    for drafts in [0, 3] {
        let (options, cpu) = (options(6, drafts), CpuOptions { threads: Some(2), ..CpuOptions::default() });
        let queueing = |cpu: CpuBackend| -> Arc<dyn Backend> {
            InterceptedBackend::new(Arc::new(cpu), Arc::new(Queueing::default()))
        };
        let runtime = Runtime::new(queueing(CpuBackend::new(cpu.clone())), RuntimeOptions::default());
        let mut batcher = batcher(&runtime, options);
        let (allocated, peak) = (runtime.ledger().active(), runtime.ledger().peak());
        let checkpoint = Checkpoint::open(&demo()).expect("opens");
        let (parameters, planning) = (CheckpointParameters(&checkpoint), queueing(CpuBackend::planning(cpu)));
        let planned = plan::plan(&planning, &parameters, checkpoint.config(), options).expect("plans");
        assert_eq!(planned, allocated, "{drafts} drafts");
        let read = run(&mut batcher, vec![to_read(0, Readout::LastHidden), to_read(1, Readout::MeanHidden)]);
        assert!(read.iter().all(|outcome| !outcome.read.is_empty()));
        let after = (runtime.ledger().active(), runtime.ledger().peak());
        assert_eq!(after, (allocated, peak), "{drafts} drafts");
    }
}
