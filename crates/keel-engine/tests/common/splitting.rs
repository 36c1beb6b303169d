//! Engines on several devices.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use keel_array::{ArrayError, Backend, Launch, Runtime, RuntimeOptions};
use keel_cpu::{CpuBackend, CpuGroup, CpuOptions};
use keel_engine::split::{DeviceGrid, PlacedPart, SplitPlanner};
use keel_engine::{Engine, EngineError, EngineOptions, plan};
use keel_models::Part;
use keel_models::loading::Parameters;
use keel_testkit::disturbed::Disturbance;
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

impl Disturbance for Fault {
    fn launch(&self, backend: &dyn Backend, launch: &Launch<'_>) -> Result<(), ArrayError> {
        let left = self.0.load(Ordering::Relaxed);
        if left != usize::MAX {
            self.0.store(left.wrapping_sub(1), Ordering::Relaxed);
        }
        if left != 0 {
            return backend.launch(launch);
        }
        launch.note_done(0);
        Err(ArrayError::Kernel { op: "launch".into(), reason: "injected".into() })
    }
}
