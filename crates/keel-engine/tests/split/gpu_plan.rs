//! Plans of every fixture on two and four GPUs, as the planning backend gives them. This needs no GPU.

use std::path::Path;
use std::sync::Arc;

use crate::common::{exact, fixture, models};
use keel_array::{Backend, MemoryReport};
use keel_cuda::{CudaBackend, CudaGroup, CudaOptions, Determinism};
use keel_engine::split::{DeviceGrid, PlacedPart, SplitPlanner};
use keel_engine::{EngineOptions, plan};
use keel_models::SumOrder;
use keel_models::loading::CheckpointParameters;
use keel_testkit::fixtures_plain::{OTHERS, other_fixture};
use keel_weights::Checkpoint;

fn planner(options: CudaOptions) -> Arc<dyn Backend> {
    Arc::new(CudaBackend::planning(&options))
}

/// The plan of each device; the refusal of a split that the model does not allow.
fn planned(
    folder: &Path,
    options: EngineOptions,
    (stages, shares): (usize, usize),
    determinism: Determinism,
) -> Result<Vec<MemoryReport>, String> {
    let checkpoint = Checkpoint::open(folder).expect("the checkpoint opens");
    let parameters = CheckpointParameters(&checkpoint);
    let config = checkpoint.config();
    let alone = planner(CudaOptions { determinism, ..CudaOptions::default() });
    let splitting = SplitPlanner { backend: &alone, parameters: &parameters, config, options };
    let parts = splitting.parts(DeviceGrid { stages, shares }, &[]).map_err(|error| error.to_string())?;
    let groups = CudaGroup::of(stages * shares, shares).into_iter().enumerate();
    let gpu = |(ordinal, group)| {
        planner(CudaOptions { ordinal, determinism, group: Some(group), ..CudaOptions::default() })
    };
    let devices = PlacedPart::each(groups.map(gpu), parts);
    plan::plan_on(&devices, None, &parameters, config, options).map_err(|error| error.to_string())
}

#[test]
fn every_fixture_that_can_be_split_is_planned_on_gpus() {
    let (any, fixed) = (exact(), EngineOptions { sums: SumOrder::Fixed, ..exact() });
    for (options, grid, determinism) in [
        (any, (2, 1), Determinism::Off),
        (any, (1, 2), Determinism::Off),
        (any, (1, 2), Determinism::Steps),
        (any, (2, 2), Determinism::Off),
        (fixed, (1, 2), Determinism::Devices),
    ] {
        let mut count = 0;
        // Some of the others have no norm before the first product of a stage.
        for folder in models().map(fixture).chain(OTHERS.into_iter().filter_map(other_fixture)) {
            let name = folder.display();
            match planned(&folder, options, grid, determinism) {
                Ok(devices) => {
                    assert_eq!(devices.len(), grid.0 * grid.1, "{name}");
                    assert!(devices.iter().all(|device| device.total() > 0), "{name}");
                    count += 1;
                }
                Err(reason) => assert!(reason.contains("--split pipeline"), "{name} in {grid:?}: {reason}"),
            }
        }
        assert!(count > 6, "{count} models in {grid:?}");
    }
}
