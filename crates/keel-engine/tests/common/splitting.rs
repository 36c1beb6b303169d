//! Engines on several devices.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use keel_array::{ArrayError, Backend, Launch, Runtime, RuntimeOptions};
use keel_cpu::{CpuBackend, CpuGroup, CpuOptions};
use keel_engine::split::{DeviceGrid, PlacedPart, SplitPlanner};
use keel_engine::{Engine, EngineError, EngineOptions, plan};
use keel_models::Part;
use keel_models::loading::{CheckpointParameters, Parameters};
use keel_testkit::intercepted::{InterceptedBackend, Interceptor};
use keel_weights::Checkpoint;
use serde_json::Value;

/// The backends of a group, each with one thread.
pub fn backends(count: usize, planning: bool) -> Vec<Arc<dyn Backend>> {
    let options = CpuOptions { threads: Some(1), poison_freed: true, planning, ..CpuOptions::default() };
    let backend =
        |group| Arc::new(CpuBackend::new(CpuOptions { group: Some(group), ..options.clone() })) as _;
    CpuGroup::of(count).into_iter().map(backend).collect()
}

/// The parts of a model in this many stages of this many shares.
pub fn parts(
    (parameters, config): (&dyn Parameters, &Value),
    options: EngineOptions,
    (stages, shares): (usize, usize),
) -> Result<Vec<Part>, EngineError> {
    let alone: Arc<dyn Backend> = Arc::new(CpuBackend::planning(CpuOptions::default()));
    SplitPlanner { backend: &alone, parameters, config, options }.parts(DeviceGrid { stages, shares }, &[])
}

/// An engine on these backends. Also asserts that every device holds what was planned for it.
pub fn load_on(
    (parameters, config): (&dyn Parameters, &Value),
    options: EngineOptions,
    backends: Vec<Arc<dyn Backend>>,
    parts: &[Part],
) -> Result<Engine, EngineError> {
    let count = parts.len();
    let planners = PlacedPart::each(self::backends(count, true), parts.iter().cloned());
    let planned = plan::plan_on(&planners, parameters, config, options)?;
    let runtimes = backends.into_iter().map(|backend| Runtime::new(backend, RuntimeOptions::default()));
    let devices = PlacedPart::each(runtimes, parts.iter().cloned());
    let engine = Engine::load_on(&devices, parameters, config, options, &|_| ())?;
    for (rank, (runtime, planned)) in engine.runtimes().zip(&planned).enumerate() {
        assert_eq!(runtime.ledger().active(), *planned, "device {rank} of {count}");
        assert!(planned.total() > 0, "device {rank} of {count} holds something");
    }
    Ok(engine)
}

/// An engine of a checkpoint in this many stages of this many shares. `wrap` gets each device's rank and backend.
pub fn engine_on(
    folder: &Path,
    options: EngineOptions,
    grid: (usize, usize),
    mut wrap: impl FnMut(usize, Arc<dyn Backend>) -> Arc<dyn Backend>,
) -> Engine {
    let checkpoint = Checkpoint::open(folder).expect("the checkpoint opens");
    let source = (&CheckpointParameters(&checkpoint) as _, checkpoint.config());
    let parts = parts(source, options, grid).expect("it divides");
    let wrapped = backends(parts.len(), false).into_iter().enumerate().map(|(rank, b)| wrap(rank, b));
    load_on(source, options, wrapped.collect(), &parts).expect("the model loads")
}

/// Drops an engine, and asserts that its devices neither took more than they hold nor keep anything.
pub fn end(engine: Engine) {
    assert!(engine.cache().is_idle(), "sequences are released");
    let runtimes: Vec<Runtime> = engine.runtimes().cloned().collect();
    for (rank, runtime) in runtimes.iter().enumerate() {
        assert_eq!(runtime.ledger().peak(), runtime.ledger().active(), "device {rank}");
    }
    drop(engine);
    for (rank, runtime) in runtimes.iter().enumerate() {
        runtime.clear_cache();
        assert_eq!(runtime.ledger().active().total(), 0, "device {rank} keeps something");
    }
}

/// Fails one launch of a device after some that succeed.
pub struct Fault(pub AtomicUsize);

impl Default for Fault {
    /// None.
    fn default() -> Fault {
        Fault(AtomicUsize::new(usize::MAX))
    }
}

impl Fault {
    /// Counts a launch. False if it is the one to fail.
    pub fn passes(&self) -> bool {
        let left = self.0.load(Ordering::Relaxed);
        if left != usize::MAX {
            self.0.store(left.wrapping_sub(1), Ordering::Relaxed);
        }
        left != 0
    }
}

impl Interceptor for Fault {
    fn launch(&self, backend: &dyn Backend, launch: &Launch<'_>) -> Result<(), ArrayError> {
        if self.passes() {
            return backend.launch(launch);
        }
        launch.note_done(0);
        Err(ArrayError::Kernel { op: "launch".into(), reason: "injected".into() })
    }
}

/// Two stages of a pipeline. Once programs are [counted](Stages::count), the second ends one only when the first has
/// begun the next one.
#[derive(Default)]
pub struct Stages {
    /// Programs that each stage has begun.
    begun: Mutex<[usize; 2]>,
    changed: Condvar,
    /// How many programs of each stage are counted.
    programs: AtomicUsize,
    /// Programs of the second stage that ended without the first stage at the next one.
    alone: AtomicUsize,
}

impl Stages {
    /// The backend of a stage.
    pub fn wrap(self: &Arc<Stages>, rank: usize, backend: Arc<dyn Backend>) -> Arc<dyn Backend> {
        InterceptedBackend::new(backend, Arc::new(Stage { rank, stages: Arc::clone(self) }))
    }

    /// Counts the next `programs` programs of each stage.
    pub fn count(&self, programs: usize) {
        *self.begun.lock().expect("no test panics here") = [0, 0];
        self.programs.store(programs, Ordering::Relaxed);
    }

    /// Programs that each stage has begun since.
    pub fn begun(&self) -> [usize; 2] {
        *self.begun.lock().expect("no test panics here")
    }

    /// Programs of the second stage that ended without the first stage at the next one.
    pub fn alone(&self) -> usize {
        self.alone.load(Ordering::Relaxed)
    }
}

struct Stage {
    rank: usize,
    stages: Arc<Stages>,
}

impl Interceptor for Stage {
    fn launch(&self, backend: &dyn Backend, launch: &Launch<'_>) -> Result<(), ArrayError> {
        let Stages { begun, changed, programs, alone } = &*self.stages;
        let begins = launch.prepared().is_some_and(|piece| piece.first_kernel == 0);
        let mut counts = begun.lock().expect("no test panics here");
        counts[self.rank] += usize::from(begins);
        let program = counts[self.rank];
        changed.notify_all();
        drop(counts);
        let outcome = backend.launch(launch);
        if begins && self.rank == 1 && program < programs.load(Ordering::Relaxed) {
            let counts = begun.lock().expect("no test panics here");
            let most = Duration::from_secs(5);
            let waited = changed.wait_timeout_while(counts, most, |counts| counts[0] <= program);
            let is_alone = waited.expect("no test panics here").1.timed_out();
            alone.fetch_add(usize::from(is_alone), Ordering::Relaxed);
        }
        outcome
    }
}
