//! A model on several devices: its plan, and the engine.

use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use evenkeel::{FreeMemory, OutOfMemory, bound, on_device, on_host};
use keel_array::{Backend, Category, MemoryReport, Runtime};
use keel_engine::split::{MixtureChoice, PlacedPart, SplitPlanner};
use keel_engine::{Engine, EngineOptions, plan};
use keel_models::Part;
use keel_models::loading::Parameters;
use serde_json::Value;

use crate::args::{Device, DeviceArgs};
use crate::progress;
use crate::session::Session;

/// The plan of one of several devices.
#[derive(Clone, Debug)]
pub struct DevicePlan {
    /// Its name.
    pub name: String,
    /// The part of the model that it holds.
    pub part: Part,
    /// Its bytes.
    pub planned: MemoryReport,
}

/// Plans the bytes of each device. No weight is read.
///
/// # Errors
/// Devices or a model that cannot be split; as [`plan::plan_on`].
pub fn plan_devices(
    device: &DeviceArgs,
    parameters: &dyn Parameters,
    config: &Value,
    options: EngineOptions,
) -> Result<Vec<DevicePlan>> {
    device.check()?;
    device.tower()?;
    let options = device.options().engine_options(options);
    let members = device.split.members();
    let grid = device.split.split().grid(members.len())?;
    let alone: Arc<dyn Backend> = device.on(device.device()).planning_backend(options.compute);
    let planner = SplitPlanner { backend: &alone, parameters, config, options };
    let parts = planner.parts(grid, device.limits())?;
    let devices = PlacedPart::each(device.group(options.compute, true)?, parts.iter().cloned());
    let planned = plan::plan_on(&devices, parameters, config, options).map_err(evenkeel::Error::from)?;
    let plans = members.iter().zip(parts).zip(planned);
    Ok(plans
        .map(|((member, part), planned)| DevicePlan { name: member.name.clone(), part, planned })
        .collect())
}

/// How the devices divide mixtures of experts, and why; see [`SplitPlanner::mixture`].
///
/// # Errors
/// As [`plan_devices`].
pub fn mixture(
    device: &DeviceArgs,
    parameters: &dyn Parameters,
    config: &Value,
    options: EngineOptions,
) -> Result<Option<MixtureChoice>> {
    let grid = device.split.split().grid(device.split.members().len())?;
    let alone: Arc<dyn Backend> = device.on(device.device()).planning_backend(options.compute);
    Ok(SplitPlanner { backend: &alone, parameters, config, options }.mixture(grid.shares)?)
}

/// As [`Session::open`], on several devices.
///
/// # Errors
/// As [`Session::open`] and [`plan_devices`].
pub fn open(
    device: &DeviceArgs,
    parameters: &dyn Parameters,
    config: &Value,
    options: EngineOptions,
) -> Result<Session> {
    let options = device.options().engine_options(options);
    let plans = plan_devices(device, parameters, config, options)?;
    let planned: MemoryReport = plans.iter().map(|plan| plan.planned).sum();
    check(device, &plans, &planned, &options)?;
    let backends = device.group(options.compute, false)?.into_iter().enumerate();
    let runtimes = backends.map(|(rank, backend)| device.options_of(rank).runtime_on(backend));
    let devices = PlacedPart::each(runtimes, plans.iter().map(|plan| plan.part.clone()));
    if device.device() != Device::Cpu {
        bound_gpus(device, &plans, &devices, &options)?;
    }
    let start = Instant::now();
    let bar = progress::bytes("loading", planned.get(Category::Weights));
    let engine = Engine::load_on(&devices, parameters, config, options, &|bytes| bar.inc(bytes));
    bar.finish_and_clear();
    let mut engine = engine?;
    engine.name_devices(plans.iter().map(|plan| plan.name.clone()).collect());
    Ok(Session { engine, planned, devices: plans, load_time: start.elapsed() })
}

/// Compares the plans with the limit on each device, and their sum with the host's free memory.
fn check(
    device: &DeviceArgs,
    plans: &[DevicePlan],
    planned: &MemoryReport,
    options: &EngineOptions,
) -> Result<()> {
    for (rank, DevicePlan { name, planned, .. }) in plans.iter().enumerate() {
        if let Some(limit) = device.limit_of(rank).filter(|&limit| planned.total() > limit) {
            let whose = format!("the memory limit, which {name} has for itself");
            return Err(too_little(planned, limit, whose, options));
        }
        let room = device.split.members().get(rank).and_then(|member| member.remote.flatten());
        if let Some(room) = room.filter(|&room| on_device(planned, true) > room) {
            return Err(too_little(planned, room, format!("{name}, as its process says"), options));
        }
    }
    let on_host = on_host(planned, device.device() != Device::Cpu);
    if let Some(host) = FreeMemory::of_host().filter(|host| on_host > host.bytes) {
        return Err(too_little(planned, host.bytes, host.why, options));
    }
    Ok(())
}

/// Compares each plan with the free memory of its GPU, and limits the GPU's memory to that. What NCCL holds there is
/// not free any more.
fn bound_gpus(
    device: &DeviceArgs,
    plans: &[DevicePlan],
    devices: &[PlacedPart<Runtime>],
    options: &EngineOptions,
) -> Result<()> {
    for (rank, (DevicePlan { name, planned, .. }, placed)) in plans.iter().zip(devices).enumerate() {
        bound(&device.options_of(rank), &placed.device, planned, options).map_err(|error| match error {
            evenkeel::Error::OutOfMemory(mut error) => {
                error.whose = format!("{name}: {}", error.whose);
                evenkeel::Error::OutOfMemory(error)
            }
            other => other,
        })?;
    }
    Ok(())
}

/// The error for a plan above a limit.
pub fn too_little(
    planned: &MemoryReport,
    limit: u64,
    whose: String,
    options: &EngineOptions,
) -> anyhow::Error {
    let EngineOptions { context, sequences, .. } = *options;
    let (needed, planned) = (planned.total(), *planned);
    evenkeel::Error::from(Box::new(OutOfMemory { needed, limit, whose, context, sequences, planned })).into()
}
