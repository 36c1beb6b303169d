//! The device to run on, and limits on its use.

use std::sync::{Arc, OnceLock};

use keel_array::{Backend, Compute, Runtime, RuntimeOptions};
use keel_cpu::isa::Isa;
use keel_cpu::{CpuBackend, CpuOptions};
use keel_cuda::{CudaBackend, CudaOptions, Determinism, Precision, Survey};
use keel_engine::EngineOptions;
use keel_models::SumOrder;

use crate::Result;

/// The device to run on.
///
/// ```
/// use evenkeel::{Device, DeviceOptions};
/// let second_gpu = DeviceOptions { device: Some(Device::Cuda(1)), ..DeviceOptions::default() };
/// assert!(second_gpu.is_gpu());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// The CPU.
    Cpu,
    /// An NVIDIA GPU, by its number.
    Cuda(usize),
}

/// The device and its bounds. The default is any device, without a limit.
///
/// ```
/// use evenkeel::{Device, DeviceOptions, LoadOptions};
/// let device = DeviceOptions { device: Some(Device::Cpu), threads: Some(2), ..DeviceOptions::default() };
/// let options = LoadOptions { device, ..LoadOptions::default() };
/// assert_eq!(options.device.device(), Device::Cpu);
/// ```
#[derive(Clone, Debug, Default)]
pub struct DeviceOptions {
    /// The device. `None` is the first GPU on which the plan fits, else the CPU.
    pub device: Option<Device>,
    /// Threads of the CPU; by default one for each core.
    pub threads: Option<usize>,
    /// The most advanced instructions to use; by default the best that the CPU has.
    pub isa: Option<Isa>,
    /// Take all planned memory from the system at the start, not when it is first used (CPU).
    pub resident: bool,
    /// Choices that do not change the bits of a row: how work is cut into steps, and how many devices share a layer. On
    /// the CPU this always holds for the first, and `Steps` also gives the second.
    pub determinism: Determinism,
    /// The most bytes of tensor memory. By default a GPU's limit is its free memory, and the CPU has none. Plans are
    /// compared with the free memory as well.
    pub memory_limit: Option<u64>,
}

impl DeviceOptions {
    /// The device. If none is set and no plan has chosen one: the first usable GPU, else the CPU.
    ///
    /// ```
    /// use evenkeel::{Device, DeviceOptions};
    /// let options = DeviceOptions { device: Some(Device::Cpu), ..DeviceOptions::default() };
    /// assert_eq!(options.device(), Device::Cpu);
    /// ```
    pub fn device(&self) -> Device {
        if let Some(device) = self.device {
            return device;
        }
        if machine().obstacle().is_some() {
            return Device::Cpu;
        }
        let usable = machine().gpus.iter().find(|gpu| gpu.is_supported());
        usable.map_or(Device::Cpu, |gpu| Device::Cuda(gpu.ordinal))
    }

    /// Whether the device is a GPU, which has memory of its own.
    ///
    /// ```
    /// use evenkeel::{Device, DeviceOptions};
    /// assert!(!DeviceOptions { device: Some(Device::Cpu), ..DeviceOptions::default() }.is_gpu());
    /// ```
    pub fn is_gpu(&self) -> bool {
        self.device() != Device::Cpu
    }

    /// The engine's options on this device: those given, and the order of sums over columns.
    ///
    /// ```
    /// use evenkeel::{Determinism, Device, DeviceOptions, engine::EngineOptions, models::SumOrder};
    /// let cpu = Some(Device::Cpu);
    /// let cpu = DeviceOptions { device: cpu, determinism: Determinism::Steps, ..DeviceOptions::default() };
    /// assert_eq!(cpu.engine_options(EngineOptions::default()).sums, SumOrder::Fixed);
    /// ```
    pub fn engine_options(&self, options: EngineOptions) -> EngineOptions {
        // On a GPU the fixed order takes a launch for each part of a layer, so it has to be asked for.
        let least = if self.is_gpu() { Determinism::Devices } else { Determinism::Steps };
        match self.determinism >= least {
            true => EngineOptions { sums: SumOrder::Fixed, ..options },
            false => options,
        }
    }

    /// The options of the CPU backend.
    ///
    /// ```
    /// use evenkeel::DeviceOptions;
    /// let options = DeviceOptions { threads: Some(3), ..DeviceOptions::default() };
    /// assert_eq!(options.cpu_options().threads, Some(3));
    /// ```
    pub fn cpu_options(&self) -> CpuOptions {
        CpuOptions { threads: self.threads, isa: self.isa, resident: self.resident, ..CpuOptions::default() }
    }

    /// The options of the CUDA backend of a GPU.
    ///
    /// ```
    /// use evenkeel::{Determinism, DeviceOptions, array::Compute};
    /// let options = DeviceOptions { determinism: Determinism::Steps, ..DeviceOptions::default() };
    /// assert_eq!(options.cuda_options(1, Compute::Auto).determinism, Determinism::Steps);
    /// ```
    pub fn cuda_options(&self, ordinal: usize, compute: Compute) -> CudaOptions {
        let precision = if compute == Compute::F32 { Precision::F32 } else { Precision::Fast };
        CudaOptions { ordinal, precision, determinism: self.determinism, ..CudaOptions::default() }
    }

    /// A backend that counts memory without allocating it. It needs no GPU.
    ///
    /// ```
    /// use evenkeel::{Device, DeviceOptions, array::Compute};
    /// let gpu = DeviceOptions { device: Some(Device::Cuda(0)), ..DeviceOptions::default() };
    /// assert!(gpu.planning_backend(Compute::Auto).is_planning());
    /// ```
    pub fn planning_backend(&self, compute: Compute) -> Arc<dyn Backend> {
        match self.device() {
            Device::Cpu => Arc::new(CpuBackend::planning(self.cpu_options())),
            Device::Cuda(n) => Arc::new(CudaBackend::planning(&self.cuda_options(n, compute))),
        }
    }

    /// A backend that can run.
    ///
    /// # Errors
    /// The GPU, its driver or its libraries are missing.
    ///
    /// ```
    /// use evenkeel::{Device, DeviceOptions, array::Compute};
    /// let cpu = DeviceOptions { device: Some(Device::Cpu), ..DeviceOptions::default() };
    /// assert!(!cpu.backend(Compute::Auto)?.is_planning());
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn backend(&self, compute: Compute) -> Result<Arc<dyn Backend>> {
        Ok(match self.device() {
            Device::Cpu => Arc::new(CpuBackend::new(self.cpu_options())),
            Device::Cuda(n) => Arc::new(CudaBackend::new(&self.cuda_options(n, compute))?),
        })
    }

    /// A runtime on the device, with its memory limit. It is all that arrays need.
    ///
    /// # Errors
    /// As [`DeviceOptions::backend`].
    ///
    /// ```
    /// use evenkeel::DeviceOptions;
    /// use evenkeel::array::{Array, Compute};
    /// let runtime = DeviceOptions::default().runtime(Compute::Auto)?;
    /// let sum = Array::from_slice(&runtime, &[1.0f32, 2.0, 3.0], [3])?.sum(0)?;
    /// assert_eq!(sum.to_vec::<f32>()?, [6.0]);
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn runtime(&self, compute: Compute) -> Result<Runtime> {
        Ok(self.runtime_on(self.backend(compute)?))
    }

    /// A runtime on a backend of the device, with the device's memory limit.
    ///
    /// ```
    /// use evenkeel::{Device, DeviceOptions, array::Compute};
    /// let cpu = DeviceOptions { device: Some(Device::Cpu), ..DeviceOptions::default() };
    /// let runtime = cpu.runtime_on(cpu.planning_backend(Compute::Auto));
    /// assert!(runtime.backend().is_planning());
    /// ```
    pub fn runtime_on(&self, backend: Arc<dyn Backend>) -> Runtime {
        Runtime::new(backend, RuntimeOptions { memory_limit: self.memory_limit, ..RuntimeOptions::default() })
    }
}

/// The GPUs and CUDA libraries of this machine. They are detected once.
///
/// ```
/// let machine = evenkeel::machine();
/// for gpu in &machine.gpus {
///     println!("cuda:{} is a {}", gpu.ordinal, gpu.name);
/// }
/// assert!(machine.obstacle().is_some() || machine.driver.is_ok(), "without a driver no GPU can be used");
/// ```
pub fn machine() -> &'static Survey {
    static MACHINE: OnceLock<Survey> = OnceLock::new();
    MACHINE.get_or_init(Survey::take)
}
