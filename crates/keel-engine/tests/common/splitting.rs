//! Engines on several devices.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use keel_array::{ArrayError, Backend, Compute, Launch, Runtime, RuntimeOptions};
use keel_cpu::{CpuBackend, CpuGroup, CpuOptions};
use keel_cuda::{CudaBackend, CudaGroup, CudaOptions, Determinism, Precision, Survey};
use keel_engine::split::{DeviceGrid, PlacedPart, SplitPlanner};
use keel_engine::{Engine, EngineError, EngineOptions, plan};
use keel_models::Part;
use keel_models::loading::{CheckpointParameters, Parameters};
use keel_testkit::intercepted::{InterceptedBackend, Interceptor, injected};
use keel_weights::Checkpoint;
use serde_json::Value;

use super::fixture;

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

/// An engine on these backends. Also asserts that every device holds its planned bytes.
pub fn load_on(
    source: (&dyn Parameters, &Value),
    options: EngineOptions,
    backends: Vec<Arc<dyn Backend>>,
    parts: &[Part],
) -> Result<Engine, EngineError> {
    load_as_planned(source, options, self::backends(parts.len(), true), backends, parts)
}

/// As [`load_on`], planned on these planning backends.
fn load_as_planned(
    (parameters, config): (&dyn Parameters, &Value),
    options: EngineOptions,
    planners: Vec<Arc<dyn Backend>>,
    backends: Vec<Arc<dyn Backend>>,
    parts: &[Part],
) -> Result<Engine, EngineError> {
    let count = parts.len();
    let planners = PlacedPart::each(planners, parts.iter().cloned());
    let planned = plan::plan_on(&planners, None, parameters, config, options)?;
    let runtimes = backends.into_iter().map(|backend| Runtime::new(backend, RuntimeOptions::default()));
    let devices = PlacedPart::each(runtimes, parts.iter().cloned());
    let engine = Engine::load_on(&devices, None, parameters, config, options, &|_| ())?;
    for (rank, (runtime, planned)) in engine.runtimes().zip(&planned).enumerate() {
        assert_eq!(runtime.ledger().active(), *planned, "device {rank} of {count}");
        assert!(planned.total() > 0, "device {rank} of {count} holds something");
    }
    Ok(engine)
}

/// An engine of a checkpoint in this many stages of this many shares. `wrap` gets each device's rank and backend, and
/// those of the plan.
pub fn engine_on(
    folder: &Path,
    options: EngineOptions,
    grid: (usize, usize),
    mut wrap: impl FnMut(usize, Arc<dyn Backend>) -> Arc<dyn Backend>,
) -> Engine {
    let checkpoint = Checkpoint::open(folder).expect("the checkpoint opens");
    let source = (&CheckpointParameters(&checkpoint) as _, checkpoint.config());
    let parts = parts(source, options, grid).expect("it divides");
    let [planners, backends] = [true, false].map(|planning| {
        let backends = backends(parts.len(), planning).into_iter().enumerate();
        backends.map(|(rank, backend)| wrap(rank, backend)).collect()
    });
    load_as_planned(source, options, planners, backends, &parts).expect("the model loads")
}

/// An engine of a fixture on two GPUs. `wrap` gets each one's rank and backend.
pub fn engine_on_gpus(
    name: &str,
    options: EngineOptions,
    wrap: impl FnMut(usize, Arc<dyn Backend>) -> Arc<dyn Backend>,
) -> Engine {
    let checkpoint = Checkpoint::open(&fixture(name)).expect("the checkpoint opens");
    let source = (&CheckpointParameters(&checkpoint) as _, checkpoint.config());
    let parts = parts(source, options, (1, 2)).expect("it divides");
    let mut engine = load_on_gpus(source, options, &parts, wrap).expect("the model loads");
    engine.make_ready(&mut |_, _, _| ()).expect("it gets ready");
    engine
}

/// An engine on a GPU for each of the parts; on the same GPUs again where they are fewer. They run in the mode that
/// gives any number of devices the same bits.
pub fn load_on_gpus(
    (parameters, config): (&dyn Parameters, &Value),
    options: EngineOptions,
    parts: &[Part],
    mut wrap: impl FnMut(usize, Arc<dyn Backend>) -> Arc<dyn Backend>,
) -> Result<Engine, EngineError> {
    let gpu = |(rank, cuda): (usize, CudaOptions)| {
        let backend = Arc::new(CudaBackend::new(&cuda).expect("a GPU, and NCCL"));
        Runtime::new(wrap(rank, backend), RuntimeOptions::default())
    };
    let devices = gpu_options(options, parts.len()).into_iter().enumerate().map(gpu);
    let devices = PlacedPart::each(devices, parts.iter().cloned());
    Engine::load_on(&devices, None, parameters, config, options, &|_| ())
}

/// As [`load_on_gpus`], with the early kernels of a plan.
pub fn load_planned_on_gpus(
    (parameters, config): (&dyn Parameters, &Value),
    options: EngineOptions,
    parts: &[Part],
) -> Result<Engine, EngineError> {
    let all = gpu_options(options, parts.len());
    let planner = |cuda: &CudaOptions| Arc::new(CudaBackend::planning(cuda)) as Arc<dyn Backend>;
    let planners = PlacedPart::each(all.iter().map(planner), parts.iter().cloned());
    let planned = plan::engine(&planners, None, parameters, config, options)?;
    let gpu = |cuda: &CudaOptions| {
        let backend = CudaBackend::new(cuda).expect("a GPU, and NCCL");
        Runtime::new(Arc::new(backend), RuntimeOptions::default())
    };
    let devices = PlacedPart::each(all.iter().map(gpu), parts.iter().cloned());
    Engine::load_planned(planned, &devices, None, parameters, config, &|_| ())
}

/// The options of each GPU of a group of this many.
fn gpu_options(options: EngineOptions, count: usize) -> Vec<CudaOptions> {
    let precision = if options.compute == Compute::F32 { Precision::F32 } else { Precision::Fast };
    let gpus = Survey::take().gpus.len();
    let of = |(rank, group)| CudaOptions {
        ordinal: rank % gpus,
        precision,
        determinism: Determinism::Devices,
        group: Some(group),
        ..CudaOptions::default()
    };
    CudaGroup::of(count, count).into_iter().enumerate().map(of).collect()
}

/// Runs a test that needs this many GPUs, if they are there, or if NCCL may connect a GPU with itself
/// (NCCL_MULTI_RANK_GPU_ENABLE=1).
pub fn on_gpus(count: usize, test: impl FnOnce() + Send + 'static) {
    if !keel_testkit::has_gpu!() {
        return;
    }
    if Survey::take().gpus.len() < count && !CudaGroup::may_share_a_gpu() {
        return keel_testkit::skipped!("needs {count} GPUs");
    }
    // One at a time: kernels of two groups that wait for their peers on the same GPUs can wait for each other.
    static GPUS: Mutex<()> = Mutex::new(());
    let _alone = GPUS.lock().unwrap_or_else(|e| e.into_inner());
    let (sender, receiver) = channel();
    let thread = std::thread::spawn(move || {
        test();
        sender.send(()).expect("the test waits");
    });
    receiver.recv_timeout(Duration::from_secs(300)).expect("no device waits without end");
    // Its devices close at its end. The program must not end meanwhile.
    thread.join().expect("its devices close");
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
        let kept = runtime.ledger().active();
        assert_eq!(kept.total(), 0, "device {rank} keeps something: {kept:?}");
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
        Err(injected("launch"))
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
