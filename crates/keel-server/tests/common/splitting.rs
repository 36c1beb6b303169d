//! Engines on several devices.

use std::path::Path;
use std::sync::Arc;

use keel_array::{Backend, Runtime, RuntimeOptions};
use keel_cpu::{CpuBackend, CpuGroup, CpuOptions};
use keel_engine::split::{DeviceGrid, PlacedPart, SplitPlanner};
use keel_engine::{Engine, EngineOptions};
use keel_models::loading::CheckpointParameters;
use keel_weights::Checkpoint;

/// An engine of the model in a folder: `stages` stages of `shares` devices that share their layers. `wrap` gets each
/// device's rank and backend.
pub fn engine_on(
    folder: &Path,
    (stages, shares): (usize, usize),
    options: EngineOptions,
    wrap: impl Fn(usize, Arc<dyn Backend>) -> Arc<dyn Backend>,
) -> Engine {
    let checkpoint = Checkpoint::open(folder).expect("the model opens");
    let parameters = CheckpointParameters(&checkpoint);
    let alone: Arc<dyn Backend> = Arc::new(CpuBackend::planning(CpuOptions::default()));
    let config = checkpoint.config();
    let planner = SplitPlanner { backend: &alone, parameters: &parameters, config, options };
    let parts = planner.parts(DeviceGrid { stages, shares }, &[]).expect("it divides");
    let runtime = |(rank, group)| {
        let options = CpuOptions { threads: Some(1), group: Some(group), ..CpuOptions::default() };
        Runtime::new(wrap(rank, Arc::new(CpuBackend::new(options))), RuntimeOptions::default())
    };
    let groups = CpuGroup::of(stages * shares).into_iter().enumerate();
    let devices = PlacedPart::each(groups.map(runtime), parts);
    Engine::load_on(&devices, None, &parameters, config, options, &|_| ()).expect("the model loads")
}
