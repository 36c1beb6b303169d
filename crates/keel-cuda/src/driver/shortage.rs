//! Devices with too little free memory for what is taken outside of plans: the context, the buffers of a backend, and
//! those of a measurement. A plan compares itself with the free memory before; here the driver's refusal comes first.

use super::device::{MemoryInfo, memory_info};
use super::driver;
use super::survey::facts;
use crate::CudaError;
use cudarc::driver::sys::CUdevice;

/// What a backend takes of its device before any plan.
pub(crate) const OPENING: &str = "the driver's context and small buffers";

/// The call that takes memory of the host.
const OF_HOST: &str = "cuMemHostAlloc";

/// Gives an error for a lack of the device's memory the device's name, its free memory, and what to do. `purpose` is
/// what the memory is for. Other errors stay as they are.
pub(crate) fn explained(device: CUdevice, purpose: &'static str) -> impl FnOnce(CudaError) -> CudaError {
    move |error| with_numbers(error, device, purpose, || free_and_total(device))
}

fn with_numbers(
    error: CudaError,
    device: CUdevice,
    purpose: &'static str,
    numbers: impl FnOnce() -> Option<(u64, u64)>,
) -> CudaError {
    match error {
        CudaError::OutOfMemory { call } if call != OF_HOST => {
            CudaError::DeviceFull { ordinal: device as usize, purpose, free_and_total: numbers(), call }
        }
        error => error,
    }
}

/// Bytes of a device that are free, and all of them; `None` if nothing tells. The driver tells if the device's context
/// is current. NVML needs no context.
fn free_and_total(device: CUdevice) -> Option<(u64, u64)> {
    let mut current = 0;
    // SAFETY: the pointer is to a local.
    let has_context = unsafe { driver!(cuCtxGetDevice(&mut current)) }.is_ok() && current == device;
    match memory_info() {
        Ok(MemoryInfo { free, total }) if has_context => Some((free, total)),
        _ => facts(device).ok().and_then(|facts| Some((facts.free_bytes?, facts.total_bytes))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::check;
    use cudarc::driver::sys::CUresult;

    fn refused(call: &'static str) -> CudaError {
        check(call, CUresult::CUDA_ERROR_OUT_OF_MEMORY).expect_err("no success")
    }

    #[test]
    fn a_device_that_is_full_is_named_with_its_free_memory_and_what_to_do() {
        let told = Some((120 << 20, 81_559 << 20));
        let error = with_numbers(refused("cuMemAlloc_v2"), 1, OPENING, || told);
        assert_eq!(
            error.to_string(),
            "cuda:1 has too little free memory for the driver's context and small buffers: 120 of 81559 MiB are free; \
             nvidia-smi shows which programs hold its memory: end one of them, or choose another device \
             (cuMemAlloc_v2: out of memory)"
        );
        // The device of the first error, if one follows from another.
        let again = with_numbers(error.clone(), 2, OPENING, || None);
        assert_eq!(again.to_string(), error.to_string());
        let untold = with_numbers(refused("cuDevicePrimaryCtxRetain"), 0, OPENING, || None).to_string();
        assert!(untold.starts_with("cuda:0 has too little free memory for the driver's context"), "{untold}");
        assert!(untold.contains("small buffers; nvidia-smi shows") && !untold.contains("MiB"), "{untold}");
    }

    #[test]
    fn a_lack_of_the_hosts_memory_is_not_the_devices() {
        let numbers = || unreachable!("the device is not asked");
        let error = with_numbers(refused(OF_HOST), 1, OPENING, numbers).to_string();
        assert_eq!(error, "cuMemHostAlloc: out of memory");
        let other = CudaError::Peer { reason: "device 1 has failed".into() };
        assert_eq!(with_numbers(other, 0, OPENING, numbers).to_string(), "device 1 has failed");
    }
}
