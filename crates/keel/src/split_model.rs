//! Loads a model on several devices.

use anyhow::Result;
use evenkeel::{FreeMemory, check_and_limit, on_device, on_host};
use keel_array::Runtime;
use keel_engine::EngineOptions;
use keel_engine::split::PlacedPart;

use crate::args::DeviceArgs;
use crate::placed_model::{DevicePlan, PlacedModel, Plans};
use crate::session::Session;

/// As [`Session::open`], on several devices.
///
/// # Errors
/// As [`Session::open`] and [`PlacedModel::plans`].
pub fn open(model: PlacedModel<'_>, options: EngineOptions) -> Result<Session> {
    let device = model.device;
    let options = device.options().engine_options(options);
    let plans = model.plans(options)?;
    check(device, &plans, &options)?;
    let backends = device.group(options.compute)?.into_iter().enumerate();
    let runtimes = backends.map(|(rank, backend)| device.options_of(rank).runtime_on(backend));
    let devices = PlacedPart::each(runtimes, plans.devices.iter().map(|plan| plan.part.clone()));
    if plans.is_gpu {
        check_and_limit_gpus(device, &plans, &devices, &options)?;
    }
    Session::load_on(&devices, None, model, plans)
}

/// Compares the plans with the limit on each device, and their sum with the host's free memory.
fn check(device: &DeviceArgs, plans: &Plans, options: &EngineOptions) -> Result<()> {
    for (rank, DevicePlan { name, planned, .. }) in plans.devices.iter().enumerate() {
        if let Some(bytes) = device.limit_of(rank) {
            let room = FreeMemory { bytes, why: format!("the memory limit, which {name} has for itself") };
            room.check(planned.total(), planned, options)?;
        }
        if let Some(bytes) = device.split.members().get(rank).and_then(|member| member.remote.flatten()) {
            // A node's own limit is in these bytes, but the layers were shared without it.
            let remedy =
                "in a pipeline give node 0 a --memory-limit with a value for each device: layers follow it";
            let room = FreeMemory { bytes, why: format!("{name}, as its process says ({remedy})") };
            room.check(on_device(planned, true), planned, options)?;
        }
    }
    let planned = plans.model();
    if let Some(host) = FreeMemory::of_host() {
        host.check(on_host(&planned, plans.is_gpu), &planned, options)?;
    }
    Ok(())
}

/// Compares each plan with the free memory of its GPU, and limits the GPU's memory to that. The memory that NCCL holds
/// there is not free any more.
fn check_and_limit_gpus(
    device: &DeviceArgs,
    plans: &Plans,
    devices: &[PlacedPart<Runtime>],
    options: &EngineOptions,
) -> Result<()> {
    for (rank, (DevicePlan { name, planned, .. }, placed)) in plans.devices.iter().zip(devices).enumerate() {
        let checked = check_and_limit(&device.options_of(rank), &placed.device, planned, options);
        checked.map_err(|error| match error {
            evenkeel::Error::OutOfMemory(mut error) => {
                error.whose = format!("{name}: {}", error.whose);
                evenkeel::Error::OutOfMemory(error)
            }
            other => other,
        })?;
    }
    Ok(())
}
