//! Kernels that are compiled while the weights are read. On the CPU the backend only says that it compiles.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use crate::common::{expected, fixture, models};
use keel_array::{Backend, Compute, Launch, Programs, Result, Runtime, RuntimeOptions};
use keel_cpu::{CpuBackend, CpuOptions};
use keel_cuda::{CudaBackend, CudaOptions, Precision};
use keel_engine::split::PlacedPart;
use keel_engine::{
    EarlySteps, Engine, EngineError, EngineOptions, GenerateOptions, LoadProgress, SpeculationOptions,
    TokenIterator, plan,
};
use keel_models::loading::CheckpointParameters;
use keel_testkit::intercepted::{InterceptedBackend, Interceptor, injected};
use keel_weights::Checkpoint;

/// Kernels by operation, types and shapes.
type Kernels = BTreeSet<String>;

/// Says that it compiles, and notes the kernels of launches.
#[derive(Default)]
struct Compiling {
    compiled: Mutex<Kernels>,
    run: Mutex<Kernels>,
    fails: AtomicBool,
}

fn note(kernels: &Mutex<Kernels>, launch: &Launch<'_>) {
    let name = |kernel: &keel_array::Kernel| {
        let shapes: Vec<_> =
            kernel.inputs.iter().chain(&kernel.outputs).map(|of| (of.dtype, &of.layout)).collect();
        format!("{:?} {shapes:?} and {} others", kernel.op, kernel.absorbed.len())
    };
    kernels.lock().expect("no test panics here").extend(launch.kernels().iter().map(name));
}

fn taken(kernels: &Mutex<Kernels>) -> Kernels {
    std::mem::take(&mut kernels.lock().expect("no test panics here"))
}

fn options() -> CpuOptions {
    CpuOptions { threads: Some(2), ..CpuOptions::default() }
}

impl Interceptor for Compiling {
    fn is_compiling(&self, _: &dyn Backend) -> bool {
        true
    }

    fn compiles_plans(&self) -> bool {
        true
    }

    fn make_ready(
        &self,
        _: &dyn Backend,
        launches: &[Launch<'_>],
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<()> {
        if self.fails.load(Ordering::Relaxed) {
            return Err(injected("compile"));
        }
        for (i, launch) in launches.iter().enumerate() {
            note(&self.compiled, launch);
            progress(i + 1, launches.len());
        }
        Ok(())
    }

    fn launch(&self, backend: &dyn Backend, launch: &Launch<'_>) -> Result<()> {
        if launch.prepared().is_some() {
            note(&self.run, launch);
        }
        backend.launch(launch)
    }
}

/// Plans for such a runtime.
fn planner() -> Arc<dyn Backend> {
    InterceptedBackend::new(Arc::new(CpuBackend::planning(options())), Arc::new(Compiling::default()))
}

/// A runtime that says that it compiles.
fn compiling() -> (Runtime, Arc<Compiling>) {
    let compiling = Arc::new(Compiling::default());
    let backend = InterceptedBackend::new(Arc::new(CpuBackend::new(options())), Arc::clone(&compiling));
    (Runtime::new(backend, RuntimeOptions::default()), compiling)
}

/// Loads a fixture as planned.
fn load(
    name: &str,
    runtime: &Runtime,
    options: EngineOptions,
    planner: Arc<dyn Backend>,
    progress: &dyn Fn(LoadProgress),
) -> keel_engine::Result<Engine> {
    let checkpoint = Checkpoint::open(&fixture(name)).expect("the checkpoint opens");
    let (parameters, config) = (CheckpointParameters(&checkpoint), checkpoint.config());
    let planned = plan::engine(&[PlacedPart::whole(planner)], None, &parameters, config, options)?;
    let devices = [PlacedPart::whole(runtime.clone())];
    Engine::load_planned(planned, &devices, None, &parameters, config, progress)
}

fn load_compiling(name: &str, options: EngineOptions) -> (Engine, Arc<Compiling>) {
    let (runtime, compiling) = compiling();
    let engine = load(name, &runtime, options, planner(), &|_| ()).expect("it loads");
    (engine, compiling)
}

fn bounds(early_steps: EarlySteps, drafts: usize) -> EngineOptions {
    EngineOptions { context: 512, prefill_step: 256, drafts, early_steps, ..EngineOptions::default() }
}

#[test]
fn a_server_has_nothing_left_to_compile_after_its_load() {
    for (name, drafts) in [("qwen3_5", 2), ("qwen3_5_moe", 0), ("gemma3_text", 0)] {
        let options = EngineOptions { sequences: 3, ..bounds(EarlySteps::All, drafts) };
        let (mut engine, compiling) = load_compiling(name, options);
        let early = taken(&compiling.compiled);
        assert!(!early.is_empty(), "{name}: kernels are compiled");
        engine.make_ready(&mut |_, _, _| ()).expect("it gets ready");
        assert_eq!(taken(&compiling.compiled), early, "{name}");
    }
}

/// On a GPU the kernels themselves are compared: programs of a plan have those of the programs with memory.
#[test]
fn a_gpu_has_nothing_left_to_load_after_its_load() {
    if !keel_testkit::has_gpu!() {
        return;
    }
    for name in models() {
        let drafts = if expected(&fixture(name)).mtp_logits.is_some() { 2 } else { 0 };
        for compute in [Compute::Auto, Compute::F32, Compute::PrefillFp8] {
            let precision = if compute == Compute::F32 { Precision::F32 } else { Precision::Fast };
            let cuda = CudaOptions { precision, ..CudaOptions::default() };
            let planner = Arc::new(CudaBackend::planning(&cuda));
            let backend = Arc::new(CudaBackend::new(&cuda).expect("a GPU"));
            let runtime = Runtime::new(Arc::clone(&backend) as Arc<dyn Backend>, RuntimeOptions::default());
            let row_hidden = drafts == 0;
            let options =
                EngineOptions { sequences: 5, compute, row_hidden, ..bounds(EarlySteps::All, drafts) };
            let mut engine = load(name, &runtime, options, planner, &|_| ()).expect("it loads");
            let (early, kernels) = (backend.preparations(), Kernels::from_iter(backend.take_kernels()));
            engine.make_ready(&mut |_, _, _| ()).expect("it gets ready");
            let ready = backend.preparations();
            assert!(early.loaded > 0 && early.captured == 0 && ready.captured > 0, "{name}");
            let mut late = backend.take_kernels();
            late.retain(|kernel| !kernels.contains(kernel));
            assert!(late.is_empty(), "{name}, {drafts} drafts, {compute:?}: {late:#?}");
            assert_eq!(ready.loaded, early.loaded, "{name}, {drafts} drafts, {compute:?}");
        }
    }
}

/// Prompts of a step, and one that is longer than a step.
#[test]
fn a_prompt_and_its_answer_have_nothing_left_to_compile() {
    for (name, drafts) in [("qwen3_5", 0), ("qwen3_5", 2), ("llama", 0)] {
        let (_, compiling) = load_compiling(name, bounds(EarlySteps::All, drafts));
        let all = taken(&compiling.compiled);
        for tokens in [20, 150, 300] {
            let (mut engine, compiling) = load_compiling(name, bounds(EarlySteps::Prompt(tokens), drafts));
            let early = taken(&compiling.compiled);
            assert!(early.len() < all.len() && early.is_subset(&all), "{name}: fewer than for a server");
            taken(&compiling.run);
            let sequence = engine.open().expect("one fits");
            let prompt: Vec<u32> = (0..tokens as u32).map(|i| i * 7 % 90).collect();
            let speculation = (drafts > 0).then(SpeculationOptions::default);
            let options = GenerateOptions { max_tokens: 4, speculation, ..GenerateOptions::default() };
            let answer = TokenIterator::new(&mut engine, sequence, &prompt, options, &mut |_| ());
            assert_eq!(answer.expect("it runs").count(), 4, "{name}");
            let late: Vec<String> = taken(&compiling.run).difference(&early).cloned().collect();
            assert!(late.is_empty(), "{name}, {tokens} tokens, {drafts} drafts: {late:#?}");
        }
    }
}

#[test]
fn bytes_come_before_kernels_in_the_progress() {
    let (runtime, _) = compiling();
    let stages = Mutex::new(Vec::new());
    let note = |stage| stages.lock().expect("no test panics here").push(stage);
    load("llama", &runtime, bounds(EarlySteps::All, 0), planner(), &note).expect("it loads");
    let stages = stages.into_inner().expect("no test panics here");
    let is_read = |stage: &&LoadProgress| matches!(stage, LoadProgress::Read(_));
    let read = stages.iter().take_while(is_read).count();
    assert!(read > 0 && read < stages.len(), "{stages:?}");
    assert_eq!(stages.iter().filter(is_read).count(), read, "no weight is read after them");
    let Some(LoadProgress::Compiled { done, all }) = stages.last() else { panic!("{stages:?}") };
    assert_eq!(done, all);
}

#[test]
fn a_kernel_that_does_not_compile_fails_the_load() {
    let (runtime, compiling) = compiling();
    compiling.fails.store(true, Ordering::Relaxed);
    let loaded = load("llama", &runtime, bounds(EarlySteps::All, 0), planner(), &|_| ());
    let error = loaded.err().expect("it fails").to_string();
    assert!(error.contains("injected"), "{error}");
}

#[test]
fn devices_that_are_not_those_of_the_plan_are_refused() {
    let checkpoint = Checkpoint::open(&fixture("llama")).expect("the checkpoint opens");
    let (parameters, config) = (CheckpointParameters(&checkpoint), checkpoint.config());
    let planned = [PlacedPart::whole(planner())];
    let options = bounds(EarlySteps::All, 0);
    let planned = plan::engine(&planned, None, &parameters, config, options).expect("it is planned");
    let loaded = Engine::load_planned(planned, &[], None, &parameters, config, &|_| ());
    assert!(matches!(loaded, Err(EngineError::Option(_))), "{:?}", loaded.err());
}
