//! Chooses a device: the first GPU on which the plan fits, else the CPU.

use std::fmt::Display;

use keel_array::MemoryReport;
use keel_cuda::{GpuFacts, Survey};

use crate::device::{Device, machine};
use crate::driver::DRIVER_ROOM_BYTES;
use crate::free_memory::on_device;
use crate::human_bytes;

/// Most bytes that a context and the libraries take on a device before there are tensors.
const CONTEXT_BYTES: u64 = 1 << 30;

/// A device, and why it was chosen.
///
/// ```
/// use evenkeel::{Device, Placement};
/// let placement = Placement { device: Device::Cpu, why: "running on the CPU: there is no NVIDIA GPU".into() };
/// assert_eq!(placement.device, Device::Cpu);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The device.
    pub device: Device,
    /// The reason in one line.
    pub why: String,
}

/// Chooses the first GPU on which the plan fits, else the CPU. `planned` returns the plan of a GPU: a part on another
/// device, such as a vision tower, does not count. If no GPU can take the plan, the plan of the CPU then reports any
/// error.
///
/// ```
/// use evenkeel::engine::EngineOptions;
/// use evenkeel::{DeviceOptions, ModelFiles, place, plan};
/// let files = ModelFiles::built_in()?;
/// let placement = place(|gpu| {
///     let device = DeviceOptions { device: Some(gpu), ..DeviceOptions::default() };
///     plan(&device, &*files.parameters(), &files.json, EngineOptions::default())
/// });
/// assert!(placement.why.starts_with("running on "));
/// # Ok::<(), evenkeel::Error>(())
/// ```
pub fn place<E: Display>(planned: impl Fn(Device) -> Result<MemoryReport, E>) -> Placement {
    choose(machine(), &mut |ordinal| Ok::<_, E>(on_device(&planned(Device::Cuda(ordinal))?, true)))
}

/// Chooses by this survey. `bytes` returns the bytes that the GPU with a given number would have to hold.
fn choose<E: Display>(survey: &Survey, bytes: &mut dyn FnMut(usize) -> Result<u64, E>) -> Placement {
    let on_cpu =
        |reason: String| Placement { device: Device::Cpu, why: format!("running on the CPU: {reason}") };
    if survey.driver.is_err() && survey.gpus.is_empty() {
        return on_cpu("there is no NVIDIA driver".into());
    }
    if let Some(obstacle) = survey.obstacle() {
        return on_cpu(format!("{obstacle} (see keel doctor)"));
    }
    let mut refusals = Vec::new();
    for gpu in &survey.gpus {
        let name = format!("cuda:{} ({})", gpu.ordinal, gpu.name);
        match room_on(gpu).map(|room| (room, bytes(gpu.ordinal))) {
            None => refusals.push(format!("{name} is of a generation before 8.0")),
            Some((room, Ok(bytes))) if bytes <= room => {
                let (planned, room) = (human_bytes(bytes), human_bytes(room));
                let why = format!("running on {name}: {planned} are planned, {room} are free");
                return Placement { device: Device::Cuda(gpu.ordinal), why };
            }
            Some((room, Ok(bytes))) => {
                let (planned, room) = (human_bytes(bytes), human_bytes(room));
                refusals.push(format!("{planned} are planned, and {name} has {room} free for it"));
            }
            Some((_, Err(error))) => refusals.push(format!("{name}: {error:#}")),
        }
    }
    on_cpu(if refusals.is_empty() { "there is no NVIDIA GPU".into() } else { refusals.join("; ") })
}

/// Bytes of tensors for which a GPU surely had room at the time of a survey; `None` if there is no such GPU or it is
/// not supported.
///
/// ```
/// if let Some(bytes) = evenkeel::room_on_gpu(evenkeel::machine(), 0) {
///     println!("{} are free", evenkeel::human_bytes(bytes));
/// }
/// assert_eq!(evenkeel::room_on_gpu(evenkeel::machine(), usize::MAX), None, "there is no such GPU");
/// ```
pub fn room_on_gpu(survey: &Survey, ordinal: usize) -> Option<u64> {
    survey.gpus.iter().find(|gpu| gpu.ordinal == ordinal).and_then(room_on)
}

/// Bytes of tensors that a GPU has room for; `None` if the GPU is not supported.
fn room_on(gpu: &GpuFacts) -> Option<u64> {
    let free = gpu.free_bytes.unwrap_or(gpu.total_bytes);
    gpu.is_supported().then(|| free.saturating_sub(DRIVER_ROOM_BYTES + CONTEXT_BYTES))
}

#[cfg(test)]
mod tests {
    use keel_cuda::CudaError;

    use crate::Error;

    use super::*;

    fn gpu(ordinal: usize, capability: (u32, u32), free: u64) -> GpuFacts {
        let name = format!("GPU {ordinal}");
        GpuFacts { ordinal, name, capability, total_bytes: 80 << 30, free_bytes: Some(free << 30) }
    }

    fn survey(gpus: Vec<GpuFacts>) -> Survey {
        Survey { driver: Ok((13, 0)), gpus, compiler: Ok((13, 0)), blas: Ok((13, 0)), kernel_cache: None }
    }

    fn chosen(survey: &Survey, gib: u64) -> Placement {
        choose(survey, &mut |_| Ok::<_, Error>(gib << 30))
    }

    #[test]
    fn the_first_gpu_on_which_the_plan_fits() {
        let survey =
            survey(vec![gpu(0, (7, 5), 70), gpu(1, (8, 0), 10), gpu(2, (9, 0), 70), gpu(3, (9, 0), 70)]);
        let Placement { device, why } = chosen(&survey, 4);
        assert_eq!(
            (device, why.as_str()),
            (Device::Cuda(1), "running on cuda:1 (GPU 1): 4.0 GiB are planned, 8.5 GiB are free")
        );
        assert_eq!(chosen(&survey, 40).device, Device::Cuda(2));
        let Placement { device, why } = chosen(&survey, 69);
        assert_eq!(device, Device::Cpu, "the driver takes some, too");
        for part in ["before 8.0", "69.0 GiB are planned", "cuda:3 (GPU 3) has 68.5 GiB free"] {
            assert!(why.contains(part), "{why}");
        }
    }

    #[test]
    fn without_a_gpu_the_reason_is_said() {
        let missing = |library| CudaError::Missing { library, advice: "install it" };
        let no_driver = Survey { driver: Err(missing("libcuda")), ..survey(Vec::new()) };
        assert_eq!(
            chosen(&no_driver, 1),
            Placement { device: Device::Cpu, why: "running on the CPU: there is no NVIDIA driver".into() }
        );
        assert_eq!(chosen(&survey(Vec::new()), 1).why, "running on the CPU: there is no NVIDIA GPU");
        let no_compiler = Survey { compiler: Err(missing("libnvrtc")), ..survey(vec![gpu(0, (9, 0), 70)]) };
        let Placement { device, why } = chosen(&no_compiler, 1);
        assert!(device == Device::Cpu && why.contains("libnvrtc was not found: install it"), "{why}");
    }

    #[test]
    fn what_a_gpu_cannot_plan_is_left_to_the_cpu() {
        let Placement { device, why } =
            choose(&survey(vec![gpu(0, (9, 0), 70)]), &mut |_| Err("no such kernel"));
        assert!(device == Device::Cpu && why.contains("cuda:0 (GPU 0): no such kernel"), "{why}");
    }
}
