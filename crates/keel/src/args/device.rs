//! Where to run, and how much of it.

use std::sync::{Arc, OnceLock};

use anyhow::Result;
use clap::{Args, ValueEnum};
use keel_array::{Backend, Compute};
use keel_cpu::isa::Isa;
use keel_cpu::{CpuBackend, CpuOptions};
use keel_cuda::{CudaBackend, CudaOptions, Precision, Survey};

use super::parse_bytes;
use crate::failure::usage;

/// The device and its bounds.
#[derive(Clone, Debug, Args)]
pub struct DeviceArgs {
    /// Device to run on: auto (the first GPU on which the plan fits, else the CPU), cpu, or cuda:N for an NVIDIA GPU (cuda is
    /// cuda:0).
    #[arg(long, value_name = "DEVICE", env = "KEEL_DEVICE", default_value = "auto", value_parser = parse_device)]
    device: Wanted,
    /// What `auto` has become. Clones of these arguments share it.
    #[arg(skip)]
    chosen: Arc<OnceLock<Chosen>>,
    /// Threads; by default one for each core.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,
    /// Instructions to use at most, to compare: by default the best that the machine has.
    #[arg(long, value_enum, value_name = "LEVEL")]
    cpu_isa: Option<IsaArg>,
    /// Take all planned memory from the system at the start, not as it is first used (CPU). `keel serve` does by itself.
    #[arg(long)]
    resident: bool,
    /// Choose kernels so that, within prefill and within decode, bits do not depend on the prefill step, on other sequences, on
    /// drafts or on reuse. Slower on a GPU; on the CPU it always holds.
    #[arg(long)]
    deterministic: bool,
    /// Hard limit on tensor memory, for example 800M or 1.5Gi. On a GPU by default what is free there, less 512 MiB for the
    /// code of kernels and for others; none on the CPU.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub memory_limit: Option<u64>,
}

/// Where to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// The CPU.
    Cpu,
    /// An NVIDIA GPU, by its number.
    Cuda(usize),
}

/// What `--device` asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Auto,
    Only(Device),
}

/// What `auto` has become, and why, in one line.
#[derive(Clone, Debug)]
struct Chosen {
    device: Device,
    why: String,
}

fn parse_device(text: &str) -> Result<Wanted, String> {
    let number = |n: &str| n.parse().map(Device::Cuda).map_err(|_| format!("{n:?} is no number of a GPU"));
    match text.split_once(':') {
        None if text == "auto" => Ok(Wanted::Auto),
        None if text == "cpu" => Ok(Wanted::Only(Device::Cpu)),
        None if text == "cuda" => Ok(Wanted::Only(Device::Cuda(0))),
        Some(("cuda", n)) => number(n).map(Wanted::Only),
        _ => Err("there is no such device; use auto, cpu, or cuda:0".into()),
    }
}

/// GPUs and CUDA's libraries of this machine, looked for once.
pub fn machine() -> &'static Survey {
    static MACHINE: OnceLock<Survey> = OnceLock::new();
    MACHINE.get_or_init(Survey::take)
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum IsaArg {
    Portable,
    Avx2,
    Avx512,
    Avx512Vnni,
    Amx,
}

impl From<IsaArg> for Isa {
    fn from(arg: IsaArg) -> Isa {
        match arg {
            IsaArg::Portable => Isa::Portable,
            IsaArg::Avx2 => Isa::Avx2,
            IsaArg::Avx512 => Isa::Avx512,
            IsaArg::Avx512Vnni => Isa::Avx512Vnni,
            IsaArg::Amx => Isa::Amx,
        }
    }
}

impl DeviceArgs {
    /// The device. Of `auto` that nothing was planned for yet, the first GPU that can be used, or else the CPU.
    pub fn device(&self) -> Device {
        match (self.device, self.chosen.get()) {
            (Wanted::Only(device), _) => device,
            (Wanted::Auto, Some(chosen)) => chosen.device,
            (Wanted::Auto, None) if machine().obstacle().is_some() => Device::Cpu,
            (Wanted::Auto, None) => {
                let usable = machine().gpus.iter().find(|gpu| gpu.is_supported());
                usable.map_or(Device::Cpu, |gpu| Device::Cuda(gpu.ordinal))
            }
        }
    }

    /// Whether the device is still to be chosen.
    pub fn is_open(&self) -> bool {
        self.device == Wanted::Auto && self.chosen.get().is_none()
    }

    /// The same on another device.
    pub fn on(&self, device: Device) -> DeviceArgs {
        DeviceArgs { device: Wanted::Only(device), ..self.clone() }
    }

    /// What `auto` becomes from now on, and why, in one line.
    pub fn choose(&self, device: Device, why: String) {
        // What is chosen stays: models of one run share a device.
        let _ = self.chosen.set(Chosen { device, why });
    }

    /// Says on standard error which device `auto` has become, and why.
    pub fn announce(&self) {
        if let Some(chosen) = self.chosen.get().filter(|_| self.device == Wanted::Auto) {
            tracing::info!("{}", chosen.why);
        }
    }

    /// The same, with all planned memory taken from the system at the start.
    pub fn with_resident_memory(&self) -> DeviceArgs {
        DeviceArgs { resident: true, ..self.clone() }
    }

    /// How the CPU backend is made.
    pub fn cpu_options(&self) -> CpuOptions {
        let threads = self.threads.map(|n| n as usize);
        CpuOptions {
            threads,
            isa: self.cpu_isa.map(Isa::from),
            resident: self.resident,
            ..CpuOptions::default()
        }
    }

    fn cuda_options(&self, ordinal: usize, compute: Compute) -> CudaOptions {
        let precision = if compute == Compute::F32 { Precision::F32 } else { Precision::Fast };
        CudaOptions { ordinal, precision, deterministic: self.deterministic, ..CudaOptions::default() }
    }

    /// A backend that counts memory and touches none; it needs no GPU.
    pub fn planning_backend(&self, compute: Compute) -> Arc<dyn Backend> {
        match self.device() {
            Device::Cpu => Arc::new(CpuBackend::planning(self.cpu_options())),
            Device::Cuda(n) => Arc::new(CudaBackend::planning(&self.cuda_options(n, compute))),
        }
    }

    /// A backend that runs.
    ///
    /// # Errors
    /// If the GPU, its driver or its libraries are not there.
    pub fn backend(&self, compute: Compute) -> Result<Arc<dyn Backend>> {
        Ok(match self.device() {
            Device::Cpu => Arc::new(CpuBackend::new(self.cpu_options())),
            Device::Cuda(n) => Arc::new(CudaBackend::new(&self.cuda_options(n, compute))?),
        })
    }

    /// A CPU backend that measures the time of each operation.
    ///
    /// # Errors
    /// If the device is a GPU.
    pub fn profiled_backend(&self) -> Result<CpuBackend> {
        match self.device() {
            Device::Cpu => Ok(CpuBackend::new(CpuOptions { profile: true, ..self.cpu_options() })),
            Device::Cuda(_) => Err(usage("--profile is for --device cpu")),
        }
    }
}
