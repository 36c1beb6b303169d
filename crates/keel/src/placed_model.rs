//! A model and the device or devices for it: the choice of the device, and the memory plan. No weight is read.

use std::sync::Arc;

use anyhow::Result;
use evenkeel::{machine, on_device, place, room_on_gpu};
use keel_array::{Backend, MemoryReport};
use keel_engine::plan;
use keel_engine::split::{MixtureChoice, PlacedPart, SplitPlanner};
use keel_engine::{Depth, Engine, EngineOptions, SpeculationOptions};
use keel_models::Part;
use keel_models::loading::Parameters;
use serde_json::Value;

use crate::args::{Device, DeviceArgs, drafts_max};

/// The name of a vision tower's own device in reports.
const TOWER_NAME: &str = "cpu (vision)";

/// A model, and the device or devices for it.
#[derive(Clone, Copy)]
pub struct PlacedModel<'a> {
    pub device: &'a DeviceArgs,
    pub parameters: &'a dyn Parameters,
    pub config: &'a Value,
}

/// The plan of one device.
#[derive(Clone, Debug)]
pub struct DevicePlan {
    /// Its name.
    pub name: String,
    /// The part of the model that it holds.
    pub part: Part,
    /// Its bytes.
    pub planned: MemoryReport,
}

/// The plan of a model.
pub struct Plans {
    /// The model's device, or the several that share it.
    pub devices: Vec<DevicePlan>,
    /// Bytes of the vision tower, if it is on the CPU and the model is not.
    pub tower: Option<MemoryReport>,
    /// Whether the model's devices are GPUs.
    pub is_gpu: bool,
    /// The parts of the model, each on the backend that planned it.
    pub planned_on: Vec<PlacedPart<Arc<dyn Backend>>>,
    /// The engine of the plan.
    pub engine: Engine,
}

/// How a run is planned to fit.
#[derive(Debug)]
pub struct ResolvedOptions {
    /// The options of the engine.
    pub options: EngineOptions,
    /// How the run drafts, if it does.
    pub speculation: Option<SpeculationOptions>,
}

impl<'a> PlacedModel<'a> {
    pub fn new(device: &'a DeviceArgs, parameters: &'a dyn Parameters, config: &'a Value) -> PlacedModel<'a> {
        PlacedModel { device, parameters, config }
    }

    /// Plans the bytes of each device.
    ///
    /// # Errors
    /// Devices or a model that cannot be split, 8-bit floats with --deterministic; as [`plan::engine`].
    pub fn plans(&self, options: EngineOptions) -> Result<Plans> {
        self.device.check_compute(options.compute)?;
        let options = self.device.options().engine_options(options);
        let planned_on = self.planning_devices(options)?;
        let tower = self.device.tower()?.filter(|_| options.vision.is_some());
        let tower = tower.map(|tower| tower.planning_backend(options.compute));
        let engine = plan::engine(&planned_on, tower.as_ref(), self.parameters, self.config, options);
        let engine = engine.map_err(evenkeel::Error::from)?;
        let mut planned = plan::bytes_of(&engine);
        let tower = tower.and_then(|_| planned.pop());
        let parts = planned_on.iter().map(|placed| placed.part.clone());
        let each = self.device.names().into_iter().zip(parts).zip(planned);
        let devices = each.map(|((name, part), planned)| DevicePlan { name, part, planned }).collect();
        Ok(Plans { devices, tower, is_gpu: self.device.device() != Device::Cpu, planned_on, engine })
    }

    /// Plans the bytes of the model on all its devices. Those of a vision tower on a device of its own are not part of
    /// it.
    ///
    /// # Errors
    /// As [`PlacedModel::plans`].
    pub fn plan(&self, options: EngineOptions) -> Result<MemoryReport> {
        Ok(self.plans(options)?.model())
    }

    /// The parts of the model, each on a backend that only counts memory.
    fn planning_devices(&self, options: EngineOptions) -> Result<Vec<PlacedPart<Arc<dyn Backend>>>> {
        let device = self.device;
        let alone = device.planning_backend(options.compute);
        if !device.split.is_split() {
            return Ok(vec![PlacedPart::whole(alone)]);
        }
        device.check()?;
        let parts = self.split_planner(&alone, options).parts(device.split.grid()?, device.limits())?;
        Ok(PlacedPart::each(device.planning_group(options.compute)?, parts))
    }

    /// How several devices divide mixtures of experts, and why; see [`SplitPlanner::mixture`].
    ///
    /// # Errors
    /// As [`PlacedModel::plans`].
    pub fn mixture(&self, options: EngineOptions) -> Result<Option<MixtureChoice>> {
        let alone = self.device.planning_backend(options.compute);
        Ok(self.split_planner(&alone, options).mixture(self.device.split.grid()?.shares)?)
    }

    fn split_planner<'b>(&'b self, alone: &'b Arc<dyn Backend>, options: EngineOptions) -> SplitPlanner<'b> {
        SplitPlanner { backend: alone, parameters: self.parameters, config: self.config, options }
    }

    /// Chooses the device if it is `auto`, and drafts as `speculation` says. If the depth is `auto` and only a plan
    /// without drafts fits on the GPU, the run does not draft.
    ///
    /// # Errors
    /// Errors of the plan.
    pub fn resolve_drafting(
        &self,
        options: EngineOptions,
        speculation: Option<SpeculationOptions>,
    ) -> Result<ResolvedOptions> {
        let device = self.device;
        let options_with = |how, gpu| EngineOptions { drafts: drafts_max(how, gpu), ..options };
        let plan_with =
            |how, gpu| PlacedModel { device: &device.on(gpu), ..*self }.plan(options_with(how, gpu));
        let is_auto = speculation.is_some_and(|how| how.depth == Depth::Auto);
        let mut how = speculation;
        if device.is_open() {
            let mut placed = place(|gpu| plan_with(how, gpu));
            if is_auto && placed.device == Device::Cpu {
                let plain = place(|gpu| plan_with(None, gpu));
                if plain.device != Device::Cpu {
                    (placed, how) = (plain, None);
                }
            }
            device.choose(placed.device, placed.why);
        }
        if is_auto && how.is_some() && device.device() != Device::Cpu {
            let plans = self.plans(options_with(how, device.device()))?;
            how = how.filter(|_| plans.fit_on(device));
        }
        if speculation.is_some() && how.is_none() {
            tracing::info!(
                "--speculate auto is off: the plan with drafts does not fit on {}",
                device.device_name()
            );
        }
        let options = device.options().engine_options(options_with(how, device.device()));
        Ok(ResolvedOptions { options, speculation: how })
    }
}

impl Plans {
    /// Whether each GPU has room for its part, as far as that is known. Limits take the place of free memory.
    fn fit_on(&self, device: &DeviceArgs) -> bool {
        if device.is_limited() {
            return self.beyond_limit(device).is_none();
        }
        let members = device.split.members();
        self.devices.iter().enumerate().all(|(rank, plan)| {
            let room = match members.get(rank).map_or(device.device(), |member| member.device) {
                Device::Cuda(gpu) => room_on_gpu(machine(), gpu),
                Device::Cpu => None,
            };
            room.is_none_or(|room| on_device(&plan.planned, self.is_gpu) <= room)
        })
    }

    /// The bytes of the model on all its devices.
    pub fn model(&self) -> MemoryReport {
        self.devices.iter().map(|plan| plan.planned).sum()
    }

    /// The bytes of the model and of a vision tower on a device of its own.
    pub fn total(&self) -> MemoryReport {
        [self.model()].into_iter().chain(self.tower).sum()
    }

    /// The devices, the tower's included, if there are several; else none.
    pub fn several(&self) -> Vec<DevicePlan> {
        let tower =
            self.tower.map(|planned| DevicePlan { name: TOWER_NAME.into(), part: Part::default(), planned });
        let devices: Vec<_> = self.devices.iter().cloned().chain(tower).collect();
        if devices.len() > 1 { devices } else { Vec::new() }
    }

    /// The bytes of the largest of several devices that share the model, on the device itself.
    pub fn largest(&self) -> Option<u64> {
        let largest = self.devices.iter().map(|plan| on_device(&plan.planned, self.is_gpu)).max();
        largest.filter(|_| self.devices.len() > 1)
    }

    /// The bytes that are compared with free memory: those of the largest GPU, or of the whole host.
    pub fn needed(&self) -> u64 {
        let each = self.devices.iter().map(|plan| on_device(&plan.planned, self.is_gpu));
        if self.is_gpu { each.max().unwrap_or(0) } else { each.sum() }
    }

    /// The bytes that are charged to the device with most of them, host memory included. A limit bounds them.
    pub fn charged(&self) -> u64 {
        self.devices.iter().map(|plan| plan.planned.total()).max().unwrap_or(0)
    }

    /// The limit of the first device to which more is charged.
    pub fn beyond_limit(&self, device: &DeviceArgs) -> Option<u64> {
        let mut charged = self.devices.iter().map(|plan| plan.planned.total()).enumerate();
        charged.find_map(|(rank, bytes)| device.limit_of(rank).filter(|&limit| bytes > limit))
    }
}

/// Chooses the device if it is `auto`. `plan` returns the plan for a device.
pub fn choose_device(device: &DeviceArgs, plan: impl Fn(&DeviceArgs) -> Result<MemoryReport>) {
    if device.is_open() {
        let placed = place(|gpu| plan(&device.on(gpu)));
        device.choose(placed.device, placed.why);
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use evenkeel::ModelFiles;

    use super::*;

    #[derive(Parser)]
    struct Arguments {
        #[command(flatten)]
        device: DeviceArgs,
    }

    /// The resolved options of the built-in model on a GPU whose memory has this limit.
    fn settled(limit: u64, depth: Depth) -> ResolvedOptions {
        let limit = format!("--memory-limit={limit}");
        let Arguments { device } = Arguments::parse_from(["keel", "--device", "cuda:0", &limit]);
        let model = ModelFiles::built_in().expect("it is in the program");
        let how = Some(SpeculationOptions { depth, ..SpeculationOptions::default() });
        let placed = PlacedModel::new(&device, &*model.parameters(), &model.json)
            .resolve_drafting(EngineOptions::default(), how);
        placed.expect("it is planned")
    }

    #[test]
    fn auto_is_off_where_the_plan_fits_only_without_drafts() {
        let model = ModelFiles::built_in().expect("it is in the program");
        let Arguments { device } = Arguments::parse_from(["keel", "--device", "cuda:0"]);
        let parameters = model.parameters();
        let placed = PlacedModel::new(&device, &*parameters, &model.json);
        let bytes = |drafts| {
            let options = EngineOptions { drafts, ..EngineOptions::default() };
            placed.plan(options).expect("it is planned").total()
        };
        let (with, without) =
            (bytes(drafts_max(Some(SpeculationOptions::default()), Device::Cuda(0))), bytes(0));
        assert!(without < with);
        let ResolvedOptions { options, speculation } = settled(with, Depth::Auto);
        assert!(options.drafts > 0 && speculation.is_some());
        for limit in [with - 1, without] {
            let ResolvedOptions { options, speculation } = settled(limit, Depth::Auto);
            assert_eq!((options.drafts, speculation), (0, None));
        }
        let ResolvedOptions { options, speculation } = settled(without, Depth::Fixed(2));
        assert!(
            options.drafts == 2 && speculation.is_some(),
            "a number insists, and the plan is refused later"
        );
    }
}
