//! Where to run, and how much of it.

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use keel_cpu::isa::Isa;
use keel_cpu::{CpuBackend, CpuOptions};

use super::parse_bytes;
use crate::failure::usage;

/// The device and its bounds.
#[derive(Clone, Debug, Args)]
pub struct DeviceArgs {
    /// Device to run on: cpu.
    #[arg(long, default_value = "cpu")]
    device: String,
    /// Threads; by default one for each core.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,
    /// Instructions to use at most, to compare: by default the best that the machine has.
    #[arg(long, value_enum, value_name = "LEVEL")]
    cpu_isa: Option<IsaArg>,
    /// Hard limit on tensor memory, for example 800M or 1.5Gi.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub memory_limit: Option<u64>,
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
    /// How the CPU backend is made.
    ///
    /// # Errors
    /// If another device is asked for.
    pub fn cpu_options(&self) -> Result<CpuOptions> {
        match self.device.as_str() {
            "cpu" => {}
            "cuda" | "gpu" => bail!("--device {}: CUDA is not built in yet; use --device cpu", self.device),
            other => {
                return Err(usage(format!("--device {other}: there is no such device; use --device cpu")));
            }
        }
        let threads = self.threads.map(|n| n as usize);
        Ok(CpuOptions { threads, isa: self.cpu_isa.map(Isa::from), ..CpuOptions::default() })
    }

    /// A backend that counts memory and touches none.
    ///
    /// # Errors
    /// If another device is asked for.
    pub fn planning_backend(&self) -> Result<CpuBackend> {
        Ok(CpuBackend::planning(self.cpu_options()?))
    }

    /// A backend that runs.
    ///
    /// # Errors
    /// If another device is asked for.
    pub fn backend(&self) -> Result<CpuBackend> {
        Ok(CpuBackend::new(self.cpu_options()?))
    }
}
