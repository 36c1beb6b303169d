//! A model that is split over several devices: the answers of the whole one, and each device's memory as planned.

use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use crate::common::splitting::{self, Fault, backends, end};
use crate::common::{decoded, engine, exact, expect_same_state, fixture, recurrent_bytes, runtime};
use keel_array::{ArrayError, Backend, Compute, Launch, Runtime, RuntimeOptions, WeightSpec};
use keel_cache::CacheError;
use keel_engine::split::PlacedPart;
use keel_engine::{Engine, EngineError, EngineOptions, GenerateOptions, SpeculationOptions, TokenIterator};
use keel_models::loading::{Altered, CheckpointParameters, Parameters, RowSink};
use keel_models::{ModelError, Part};
use keel_testkit::intercepted::{InterceptedBackend, Interceptor};
use keel_weights::Checkpoint;

/// The parts of a pipeline, and the planned bytes of each device.
fn pipeline(checkpoint: &Checkpoint, options: EngineOptions, count: usize) -> Result<Vec<Part>, EngineError> {
    splitting::parts((&CheckpointParameters(checkpoint), checkpoint.config()), options, (count, 1))
}

/// An engine on these backends.
fn load_on(
    checkpoint: &Checkpoint,
    options: EngineOptions,
    backends: Vec<Arc<dyn Backend>>,
    parts: &[Part],
) -> Engine {
    let source = (&CheckpointParameters(checkpoint) as &dyn Parameters, checkpoint.config());
    splitting::load_on(source, options, backends, parts).expect("the model loads")
}

fn split_engine(folder: &Path, options: EngineOptions, count: usize) -> Engine {
    let checkpoint = Checkpoint::open(folder).expect("the checkpoint opens");
    let parts = pipeline(&checkpoint, options, count).expect("there are enough layers");
    load_on(&checkpoint, options, backends(count, false), &parts)
}

#[test]
fn a_pipeline_longer_than_the_model_is_refused() {
    let checkpoint = Checkpoint::open(&fixture("llama")).expect("the checkpoint opens");
    let layers = engine(&fixture("llama"), &runtime(1), exact()).model().config.layers.len();
    let error = pipeline(&checkpoint, exact(), layers + 1).expect_err("too many").to_string();
    let (count, has) = (format!("{} devices", layers + 1), format!("the model has {layers}"));
    assert!(error.contains(&count) && error.contains(&has), "{error}");
}

#[test]
fn devices_that_are_no_group_are_refused() {
    let checkpoint = Checkpoint::open(&fixture("llama")).expect("the checkpoint opens");
    let parameters = CheckpointParameters(&checkpoint);
    let parts = pipeline(&checkpoint, exact(), 2).expect("it has two layers");
    let refusal = |runtimes: Vec<Runtime>, options| {
        let devices = PlacedPart::each(runtimes, parts.clone());
        let engine = Engine::load_on(&devices, None, &parameters, checkpoint.config(), options, &|_| ());
        engine.err().expect("refused").to_string()
    };
    let alone = refusal(vec![runtime(1), runtime(1)], exact());
    assert!(alone.contains("device 0 of a model on 2 devices is not device 0 of a group of 2"), "{alone}");
    let group = || backends(2, false).into_iter().map(|b| Runtime::new(b, RuntimeOptions::default()));
    let swapped = refusal(group().rev().collect(), exact());
    assert!(swapped.contains("is not device 0"), "{swapped}");
}

/// A checkpoint that one device cannot read. The others read it once that device has failed.
struct Unreadable<'a> {
    checkpoint: CheckpointParameters<'a>,
    /// The name of the device's thread.
    of: &'static str,
    has_failed: AtomicBool,
    reads: AtomicUsize,
}

impl Altered for Unreadable<'_> {
    fn inner(&self) -> &dyn Parameters {
        &self.checkpoint
    }

    fn linear_rows(
        &self,
        module: &str,
        expert: Option<usize>,
        rows: Range<usize>,
        spec: &WeightSpec,
        sink: &mut RowSink<'_>,
    ) -> Result<(), ModelError> {
        if thread::current().name() == Some(self.of) {
            self.has_failed.store(true, Ordering::SeqCst);
            return Err(ModelError::Part("it cannot be read".into()));
        }
        while !self.has_failed.load(Ordering::SeqCst) {
            thread::yield_now();
        }
        // Time for the others to be told.
        thread::sleep(Duration::from_millis(50));
        self.reads.fetch_add(1, Ordering::SeqCst);
        self.checkpoint.linear_rows(module, expert, rows, spec, sink)
    }
}

#[test]
fn a_device_that_cannot_load_its_part_stops_the_others() {
    let checkpoint = Checkpoint::open(&fixture("llama")).expect("the checkpoint opens");
    let parts = pipeline(&checkpoint, exact(), 2).expect("it has two layers");
    for of in ["keel-load-0", "keel-load-1"] {
        let parameters = Unreadable {
            checkpoint: CheckpointParameters(&checkpoint),
            of,
            has_failed: AtomicBool::new(false),
            reads: AtomicUsize::new(0),
        };
        let group = backends(2, false).into_iter().map(|b| Runtime::new(b, RuntimeOptions::default()));
        let devices = PlacedPart::each(group, parts.clone());
        let engine = Engine::load_on(&devices, None, &parameters, checkpoint.config(), exact(), &|_| ());
        assert_eq!(engine.err().expect("it fails").to_string(), "it cannot be read");
        let reads = parameters.reads.into_inner();
        assert!(reads <= 2, "{of}: the other device has read {reads} layers");
    }
}

#[test]
fn parts_that_lie_on_devices_of_another_rank_are_refused() {
    let checkpoint = Checkpoint::open(&fixture("qwen3_5")).expect("the checkpoint opens");
    let parameters = CheckpointParameters(&checkpoint);
    let refusal = |parts: Vec<Part>| {
        let group = backends(parts.len(), false).into_iter();
        let runtimes = group.map(|backend| Runtime::new(backend, RuntimeOptions::default()));
        let devices = PlacedPart::each(runtimes, parts);
        let engine = Engine::load_on(&devices, None, &parameters, checkpoint.config(), exact(), &|_| ());
        engine.err().expect("refused").to_string()
    };
    let mut swapped = Part::pipeline(&[0..2, 2..4]);
    swapped.reverse();
    let error = refusal(swapped);
    assert!(error.contains("device 0 of 2") && error.contains("does not fit its place"), "{error}");
    let error = refusal(Part::pipeline(&[0..1, 2..4]));
    assert!(error.contains("the layers before it end at 1"), "{error}");
    let error = refusal(Part::pipeline(&[0..1, 1..3]));
    assert!(error.contains("end at layer 3, and the model has 4"), "{error}");
    let error = refusal(vec![Part::tensor(4, 2)[0].clone()]);
    assert!(error.contains("1 devices cannot be stages of 2"), "{error}");
}

/// Notes which threads launch, and panics in a launch if it is asked to.
#[derive(Default)]
struct Watched {
    threads: Mutex<HashSet<ThreadId>>,
    panics: AtomicBool,
}

impl Interceptor for Watched {
    fn launch(&self, backend: &dyn Backend, launch: &Launch<'_>) -> Result<(), ArrayError> {
        self.threads.lock().expect("nobody panics here").insert(thread::current().id());
        assert!(!self.panics.swap(false, Ordering::Relaxed), "planted");
        backend.launch(launch)
    }
}

#[test]
fn a_device_keeps_its_thread_and_a_panic_in_it_ends_the_step_of_all() {
    let mut whole = engine(&fixture("qwen3_5"), &runtime(1), drafting());
    let checkpoint = Checkpoint::open(&fixture("qwen3_5")).expect("the checkpoint opens");
    let parts = Part::pipeline(&[0..1, 1..2, 2..4]);
    for rank in 0..3 {
        let watched = Arc::new(Watched::default());
        let mut backends = backends(3, false);
        backends[rank] = InterceptedBackend::new(Arc::clone(&backends[rank]), Arc::clone(&watched));
        let mut parts = load_on(&checkpoint, drafting(), backends, &parts);
        let mut sequence = decoded(&mut parts, &prompt(64), &[5, 6, 7]);
        assert_eq!(watched.threads.lock().expect("nobody panics here").len(), 1, "device {rank}");
        watched.panics.store(true, Ordering::Relaxed);
        let start = Instant::now();
        let error = parts.decode(&mut [&mut sequence], &[8]).expect_err("a device panics").to_string();
        assert!(error.contains("panicked, which is a bug: planted"), "device {rank}: {error}");
        assert!(start.elapsed() < Duration::from_secs(10), "nobody waits for a device that panicked");
        parts.release(sequence);
        let again = decoded(&mut parts, &prompt(64), &[5, 6, 7]);
        let want = decoded(&mut whole, &prompt(64), &[5, 6, 7]);
        assert!(recurrent_bytes(&parts, &again) == recurrent_bytes(&whole, &want), "device {rank}");
        assert_eq!(watched.threads.lock().expect("nobody panics here").len(), 1, "device {rank}");
        parts.release(again);
        whole.release(want);
        end(parts);
    }
}

fn drafting() -> EngineOptions {
    EngineOptions {
        context: 512,
        sequences: 3,
        checkpoints: 2,
        prefill_step: 64,
        drafts: 3,
        compute: Compute::F32,
        swap_bytes: 4 << 20,
        ..EngineOptions::default()
    }
}

fn prompt(tokens: u32) -> Vec<u32> {
    (0..tokens).map(|i| (i * 7919 + 11) % 499).collect()
}

/// Greedy tokens, with drafts or without.
fn generated(engine: &mut Engine, drafts: bool) -> Vec<u32> {
    let sequence = engine.open().expect("a slot is free");
    let speculation = drafts.then(SpeculationOptions::default);
    let options = GenerateOptions { max_tokens: 24, speculation, ..GenerateOptions::default() };
    let tokens = TokenIterator::new(engine, sequence, &prompt(70), options, &mut |_| ()).expect("fits");
    tokens.collect::<Result<_, _>>().expect("every step runs")
}

#[test]
fn drafts_on_the_last_device_leave_the_text_of_the_whole_model() {
    for name in ["qwen3_5", "qwen3_5_moe", "qwen3_5_paro"] {
        let mut whole = engine(&fixture(name), &runtime(1), drafting());
        let mut parts = split_engine(&fixture(name), drafting(), 2);
        let want = generated(&mut whole, false);
        assert_eq!(want.len(), 24);
        assert_eq!(generated(&mut parts, true), want, "{name} with drafts");
        assert_eq!(generated(&mut parts, false), want, "{name} without");
        end(parts);
    }
}

#[test]
fn saved_parked_forked_and_rewound_sequences_go_on_alike() {
    let folder = fixture("qwen3_5");
    let mut parts = split_engine(&folder, drafting(), 2);
    let mut whole = engine(&folder, &runtime(1), drafting());
    let tokens = [5, 6, 7];
    let wanted = decoded(&mut whole, &prompt(130), &tokens);
    let mut sequence = decoded(&mut parts, &prompt(130), &tokens);
    // A file of the split model is one of the whole model.
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("sequence");
    let all: Vec<u32> = prompt(130).into_iter().chain(tokens).collect();
    parts.commit(&mut sequence).expect("runs");
    parts.cache().save(&sequence, &all, "model", &path).expect("written");
    let (loaded, _) = whole.cache_mut().load("model", &path).expect("read");
    expect_same_state(&mut whole, loaded, wanted);
    // Parked and back, forked, rewound to a checkpoint and run again.
    let fork = parts.cache_mut().fork(&sequence).expect("fits");
    parts.cache_mut().park(&mut sequence).expect("there is room");
    parts.cache_mut().unpark(&mut sequence).expect("it comes back");
    expect_same_state(&mut parts, sequence, fork);
    let mut rewound = decoded(&mut parts, &prompt(130), &tokens);
    parts.commit(&mut rewound).expect("runs");
    assert_eq!(parts.cache_mut().rewind(&mut rewound, 129).expect("there is a checkpoint"), 128);
    parts.prefill(&mut rewound, &prompt(130)[128..], &mut Vec::new(), &mut |_| ()).expect("fits");
    for token in tokens {
        parts.decode(&mut [&mut rewound], &[token]).expect("runs");
    }
    let again = decoded(&mut parts, &prompt(130), &tokens);
    expect_same_state(&mut parts, rewound, again);
    end(parts);
}

/// An engine in two parts whose device `rank` can fail.
fn faulty(rank: usize, options: EngineOptions) -> (Engine, Arc<Fault>) {
    let fault = Arc::new(Fault::default());
    let mut backends = backends(2, false);
    backends[rank] = InterceptedBackend::new(Arc::clone(&backends[rank]), Arc::clone(&fault));
    let checkpoint = Checkpoint::open(&fixture("qwen3_5")).expect("the checkpoint opens");
    // Both have recurrent layers.
    let parts = Part::pipeline(&[0..1, 1..4]);
    (load_on(&checkpoint, options, backends, &parts), fault)
}

#[test]
fn a_device_that_fails_ends_the_step_of_all_and_the_next_step_runs() {
    let mut whole = engine(&fixture("qwen3_5"), &runtime(1), drafting());
    for rank in 0..2 {
        let (mut parts, fault) = faulty(rank, drafting());
        let names = ["the left one", "the right one"];
        parts.name_devices(names.map(String::from).to_vec());
        let want = decoded(&mut whole, &prompt(64), &[5, 6, 7]);
        let mut sequence = decoded(&mut parts, &prompt(64), &[5]);
        let start = Instant::now();
        fault.0.store(0, Ordering::Relaxed);
        let error = parts.decode(&mut [&mut sequence], &[6]).expect_err("a device has failed");
        assert_eq!(error.to_string(), format!("{}: launch: injected", names[rank]));
        assert!(start.elapsed() < Duration::from_secs(10), "nobody waits for a device that has failed");
        // With a log a step happens, or leaves nothing.
        for token in [6, 7] {
            parts.decode(&mut [&mut sequence], &[token]).expect("runs");
        }
        parts.commit(&mut sequence).expect("runs");
        let mut want = want;
        whole.commit(&mut want).expect("runs");
        assert!(recurrent_bytes(&parts, &sequence) == recurrent_bytes(&whole, &want), "device {rank}");
        parts.release(sequence);
        whole.release(want);
        end(parts);
    }
}

#[test]
fn a_commit_that_fails_on_a_device_is_finished_later() {
    let mut whole = engine(&fixture("qwen3_5"), &runtime(1), drafting());
    for rank in 0..2 {
        let (mut parts, fault) = faulty(rank, drafting());
        let mut want = decoded(&mut whole, &prompt(64), &[5]);
        let mut sequence = decoded(&mut parts, &prompt(64), &[5]);
        fault.0.store(0, Ordering::Relaxed);
        parts.commit(&mut sequence).expect_err("a device has failed");
        parts.commit(&mut sequence).expect("the rest is committed");
        whole.commit(&mut want).expect("runs");
        assert!(recurrent_bytes(&parts, &sequence) == recurrent_bytes(&whole, &want), "device {rank}");
        parts.release(sequence);
        whole.release(want);
        end(parts);
    }
}

#[test]
fn without_a_log_a_step_that_failed_on_a_later_device_tears_the_state() {
    let options = EngineOptions { drafts: 0, ..drafting() };
    let (mut parts, fault) = faulty(1, options);
    let mut sequence = decoded(&mut parts, &prompt(64), &[5]);
    fault.0.store(0, Ordering::Relaxed);
    parts.decode(&mut [&mut sequence], &[6]).expect_err("a device has failed");
    let error = parts.decode(&mut [&mut sequence], &[6]).expect_err("its state is torn");
    assert!(matches!(error, EngineError::Cache(CacheError::TornState { .. })), "{error}");
    parts.release(sequence);
    let mut again = decoded(&mut parts, &prompt(64), &[5]);
    parts.decode(&mut [&mut again], &[6]).expect("a new sequence runs");
    parts.release(again);
    end(parts);
}
