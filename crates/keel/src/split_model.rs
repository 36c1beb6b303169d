//! Loads a model on several devices.

use anyhow::Result;
use evenkeel::{FreeMemory, OutOfMemory, bound, on_host};
use keel_array::{MemoryReport, Runtime};
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
        bound_gpus(device, &plans, &devices, &options)?;
    }
    Session::load_on(&devices, None, model, plans, options)
}

/// Compares the plans with the limit on each device, and their sum with the host's free memory.
fn check(device: &DeviceArgs, plans: &Plans, options: &EngineOptions) -> Result<()> {
    for (rank, DevicePlan { name, planned, .. }) in plans.devices.iter().enumerate() {
        if let Some(limit) = device.limit_of(rank).filter(|&limit| planned.total() > limit) {
            let whose = format!("the memory limit, which {name} has for itself");
            return Err(too_little(planned.total(), planned, limit, whose, options));
        }
        let room = device.split.members().get(rank).and_then(|member| member.remote.flatten());
        let on_device = planned.total() - planned.on_host();
        if let Some(room) = room.filter(|&room| on_device > room) {
            let whose = format!("{name}, as its process says");
            return Err(too_little(on_device, planned, room, whose, options));
        }
    }
    let planned = plans.model();
    let on_host = on_host(&planned, plans.is_gpu);
    if let Some(host) = FreeMemory::of_host().filter(|host| on_host > host.bytes) {
        return Err(too_little(on_host, &planned, host.bytes, host.why, options));
    }
    Ok(())
}

/// Compares each plan with the free memory of its GPU, and limits the GPU's memory to that. What NCCL holds there is
/// not free any more.
fn bound_gpus(
    device: &DeviceArgs,
    plans: &Plans,
    devices: &[PlacedPart<Runtime>],
    options: &EngineOptions,
) -> Result<()> {
    for (rank, (DevicePlan { name, planned, .. }, placed)) in plans.devices.iter().zip(devices).enumerate() {
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

/// The error for a plan of which `needed` bytes are above a limit.
pub fn too_little(
    needed: u64,
    planned: &MemoryReport,
    limit: u64,
    whose: String,
    options: &EngineOptions,
) -> anyhow::Error {
    let EngineOptions { context, sequences, .. } = *options;
    let planned = *planned;
    evenkeel::Error::from(Box::new(OutOfMemory { needed, limit, whose, context, sequences, planned })).into()
}
