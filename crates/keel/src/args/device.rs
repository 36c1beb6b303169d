//! Where to run, and how much of it.

use std::sync::Arc;

use anyhow::Result;
use clap::{Args, ValueEnum};
use keel_array::{Backend, Compute};
use keel_cpu::isa::Isa;
use keel_cpu::{CpuBackend, CpuOptions};
use keel_cuda::{CudaBackend, CudaOptions, Precision};

use super::parse_bytes;
use crate::failure::usage;

/// The device and its bounds.
#[derive(Clone, Debug, Args)]
pub struct DeviceArgs {
    /// Device to run on: cpu, or cuda:N for an NVIDIA GPU (cuda is cuda:0).
    #[arg(long, value_name = "DEVICE", default_value = "cpu", value_parser = parse_device)]
    device: Device,
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

fn parse_device(text: &str) -> Result<Device, String> {
    let number = |n: &str| n.parse().map(Device::Cuda).map_err(|_| format!("{n:?} is no number of a GPU"));
    match text.split_once(':') {
        None if text == "cpu" => Ok(Device::Cpu),
        None if text == "cuda" => Ok(Device::Cuda(0)),
        Some(("cuda", n)) => number(n),
        _ => Err("there is no such device; use cpu, or cuda:0".into()),
    }
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
    /// The device.
    pub fn device(&self) -> Device {
        self.device
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
        match self.device {
            Device::Cpu => Arc::new(CpuBackend::planning(self.cpu_options())),
            Device::Cuda(n) => Arc::new(CudaBackend::planning(&self.cuda_options(n, compute))),
        }
    }

    /// A backend that runs.
    ///
    /// # Errors
    /// If the GPU, its driver or its libraries are not there.
    pub fn backend(&self, compute: Compute) -> Result<Arc<dyn Backend>> {
        Ok(match self.device {
            Device::Cpu => Arc::new(CpuBackend::new(self.cpu_options())),
            Device::Cuda(n) => Arc::new(CudaBackend::new(&self.cuda_options(n, compute))?),
        })
    }

    /// A CPU backend that measures the time of each operation.
    ///
    /// # Errors
    /// If the device is a GPU.
    pub fn profiled_backend(&self) -> Result<CpuBackend> {
        match self.device {
            Device::Cpu => Ok(CpuBackend::new(CpuOptions { profile: true, ..self.cpu_options() })),
            Device::Cuda(_) => Err(usage("--profile is for --device cpu")),
        }
    }
}
