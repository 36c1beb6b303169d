//! The GPUs and libraries of a machine, found without taking memory on a device.

use super::device::{DRIVER_MIN, attribute_of, name_of};
use super::nvml::Nvml;
use super::{compiler, driver, kernel_cache};
use crate::CudaError;
use crate::error::Result;
use cudarc::driver::sys::{self, CUdevice, CUdevice_attribute};
use std::path::PathBuf;

/// A version: major and minor.
pub type Version = (u32, u32);

/// One GPU, as the driver describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuFacts {
    /// Its number among the devices that the process may use.
    pub ordinal: usize,
    /// Its name.
    pub name: String,
    /// Compute capability: major, minor.
    pub capability: (u32, u32),
    /// Bytes of its memory.
    pub total_bytes: u64,
    /// Bytes that no program uses; `None` if NVML is missing.
    pub free_bytes: Option<u64>,
}

impl GpuFacts {
    /// Whether its generation has the instructions that the kernels need.
    pub fn is_supported(&self) -> bool {
        self.capability.0 >= 8
    }
}

/// Driver, GPUs and libraries of the machine. A part that is missing holds its error.
#[derive(Clone, Debug)]
pub struct Survey {
    /// The CUDA version that the driver supports.
    pub driver: Result<Version>,
    /// The GPUs that answer; none without a driver.
    pub gpus: Vec<GpuFacts>,
    /// NVRTC, which compiles kernels.
    pub compiler: Result<Version>,
    /// cuBLASLt, which multiplies large matrices.
    pub blas: Result<Version>,
    /// Where compiled kernels are kept, if the environment names a place.
    pub kernel_cache: Option<PathBuf>,
}

impl Survey {
    /// Looks at the machine. This makes no context, so it takes no GPU's memory. It takes about 100 ms if there is a
    /// driver.
    pub fn take() -> Survey {
        let driver = driver_version();
        let gpus = if driver.is_ok() { gpus() } else { Vec::new() };
        Survey {
            driver,
            gpus,
            compiler: compiler::version(),
            blas: super::blas::version(),
            kernel_cache: kernel_cache::cache_folder(),
        }
    }

    /// The first error that keeps every GPU from being used; `None` if there is none.
    pub fn obstacle(&self) -> Option<CudaError> {
        let driver = self.driver.as_ref().err();
        let library = || self.compiler.as_ref().err().or(self.blas.as_ref().err());
        driver.or_else(library).cloned()
    }
}

fn driver_version() -> Result<Version> {
    // SAFETY: asks the loader whether the library can be opened.
    if !unsafe { sys::is_culib_present() } {
        return Err(super::device::no_driver());
    }
    let mut found = 0;
    // SAFETY: the pointer is to a local, and cuInit is called first.
    unsafe {
        driver!(cuInit(0))?;
        driver!(cuDriverGetVersion(&mut found))?;
    }
    if found < DRIVER_MIN {
        return Err(CudaError::DriverTooOld { found, needed: DRIVER_MIN });
    }
    Ok((found as u32 / 1000, found as u32 % 1000 / 10))
}

/// The devices of an initialised driver.
fn gpus() -> Vec<GpuFacts> {
    let mut count = 0;
    // SAFETY: the pointer is to a local.
    match unsafe { driver!(cuDeviceGetCount(&mut count)) } {
        Ok(()) => those_that_answer((0..count).map(|ordinal| (ordinal, facts(ordinal)))),
        Err(error) => {
            tracing::warn!("the driver does not tell which GPUs there are: {error}");
            Vec::new()
        }
    }
}

/// The facts of the devices that answer. One that is broken must not hide the others, so its error is only logged.
fn those_that_answer(all: impl Iterator<Item = (i32, Result<GpuFacts>)>) -> Vec<GpuFacts> {
    all.filter_map(|(ordinal, facts)| {
        facts.inspect_err(|error| tracing::warn!("cuda:{ordinal} is left out: {error}")).ok()
    })
    .collect()
}

pub(super) fn facts(ordinal: i32) -> Result<GpuFacts> {
    let mut device: CUdevice = 0;
    let mut total = 0;
    // SAFETY: the pointers are to locals, the device exists.
    unsafe {
        driver!(cuDeviceGet(&mut device, ordinal))?;
        driver!(cuDeviceTotalMem_v2(&mut total, device))?;
    }
    let attribute = |a| attribute_of(device, a);
    Ok(GpuFacts {
        ordinal: ordinal as usize,
        name: name_of(device)?,
        capability: (
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        total_bytes: total as u64,
        free_bytes: Nvml::open(device).as_ref().and_then(Nvml::free_bytes),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named_and_nothing_panics() {
        let survey = Survey::take();
        assert!(survey.driver.is_ok() || survey.gpus.is_empty());
        if let Err(error) = &survey.driver {
            assert!(survey.obstacle().is_some_and(|o| o.to_string() == error.to_string()));
        }
    }

    #[test]
    fn a_gpu_that_does_not_answer_hides_no_other() {
        let gpu = |ordinal: i32| GpuFacts {
            ordinal: ordinal as usize,
            name: format!("GPU {ordinal}"),
            capability: (9, 0),
            total_bytes: 80 << 30,
            free_bytes: None,
        };
        let lost = || CudaError::Driver { call: "cuDeviceTotalMem_v2", reason: "injected".into() };
        let answer = |ordinal| (ordinal, if ordinal == 1 { Err(lost()) } else { Ok(gpu(ordinal)) });
        assert_eq!(those_that_answer((0..3).map(answer)), [gpu(0), gpu(2)]);
    }

    #[test]
    fn the_first_obstacle_is_that_of_the_driver() {
        let missing = |library| Err(CudaError::Missing { library, advice: "get it" });
        let of = |driver, compiler, blas| {
            let survey = Survey { driver, gpus: Vec::new(), compiler, blas, kernel_cache: None };
            survey.obstacle().map(|error| error.to_string())
        };
        let there = || Ok((13, 0));
        let says = |text: Option<String>, name| text.is_some_and(|text| text.starts_with(name));
        assert!(says(of(missing("libcuda"), missing("libnvrtc"), there()), "libcuda"));
        assert!(says(of(there(), missing("libnvrtc"), there()), "libnvrtc"));
        assert!(says(of(there(), there(), missing("libcublasLt")), "libcublasLt"));
        assert_eq!(of(there(), there(), there()), None);
    }
}
