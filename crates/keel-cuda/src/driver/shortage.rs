//! Devices with too little free memory for the allocations outside of plans: the context, the buffers of a backend, and
//! those of a measurement. A plan is compared with the free memory before it is allocated. These allocations are not,
//! so the driver refuses them.

use super::device::{MemoryInfo, memory_info};
use super::driver;
use super::survey::facts;
use crate::CudaError;
use cudarc::driver::sys::CUdevice;

/// The purpose of an allocation outside of plans.
#[derive(Clone, Copy)]
pub(crate) struct Purpose {
    pub what: &'static str,
    /// More bytes than it takes. If more than this is free on the device, other memory is short.
    pub bytes: u64,
}

/// The memory that a backend takes of its device before any plan.
pub(crate) const OPENING: Purpose =
    Purpose { what: "the driver's context and small buffers", bytes: 2 << 30 };

/// The call that takes memory of the host.
const OF_HOST: &str = "cuMemHostAlloc";

/// Gives an error for a lack of the device's memory the device's name, its free memory, and what to do. Other errors
/// stay as they are.
pub(crate) fn explained(device: CUdevice, purpose: Purpose) -> impl FnOnce(CudaError) -> CudaError {
    move |error| with_memory(error, device, purpose, || memory_of(device))
}

fn with_memory(
    error: CudaError,
    device: CUdevice,
    purpose: Purpose,
    memory: impl FnOnce() -> Option<MemoryInfo>,
) -> CudaError {
    let CudaError::OutOfMemory { call } = error else { return error };
    if call == OF_HOST {
        return error;
    }
    let memory = memory();
    // The driver says the same if the host's memory lacks.
    if memory.is_some_and(|memory| memory.free > purpose.bytes) {
        return error;
    }
    CudaError::DeviceFull { ordinal: device as usize, purpose: purpose.what, memory, call }
}

/// A device's memory, from the driver if the device's context is current, else from NVML, which needs no context.
/// `None` if neither has it.
fn memory_of(device: CUdevice) -> Option<MemoryInfo> {
    let mut current = 0;
    // SAFETY: the pointer is to a local.
    let has_context = unsafe { driver!(cuCtxGetDevice(&mut current)) }.is_ok() && current == device;
    match memory_info() {
        Ok(memory) if has_context => Some(memory),
        _ => {
            let facts = facts(device).ok()?;
            Some(MemoryInfo { free: facts.free_bytes?, total: facts.total_bytes })
        }
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
        let told = Some(MemoryInfo { free: 120 << 20, total: 81_559 << 20 });
        let error = with_memory(refused("cuMemAlloc_v2"), 1, OPENING, || told);
        assert_eq!(
            error.to_string(),
            "cuda:1 has too little free memory for the driver's context and small buffers: 120 of 81559 MiB are free; \
             nvidia-smi shows which programs hold its memory: end one of them, or choose another device \
             (cuMemAlloc_v2: out of memory)"
        );
        // The device of the first error, if one follows from another.
        let again = with_memory(error.clone(), 2, OPENING, || None);
        assert_eq!(again.to_string(), error.to_string());
        let untold = with_memory(refused("cuDevicePrimaryCtxRetain"), 0, OPENING, || None).to_string();
        assert!(untold.starts_with("cuda:0 has too little free memory for the driver's context"), "{untold}");
        assert!(untold.contains("small buffers; nvidia-smi shows") && !untold.contains("MiB"), "{untold}");
    }

    #[test]
    fn a_lack_of_the_hosts_memory_is_not_the_devices() {
        let unasked = || unreachable!("the device is not asked");
        let error = with_memory(refused(OF_HOST), 1, OPENING, unasked).to_string();
        assert_eq!(error, "cuMemHostAlloc: out of memory");
        let enough = || Some(MemoryInfo { free: 70 << 30, total: 80 << 30 });
        let free = with_memory(refused("cuStreamCreate"), 1, OPENING, enough);
        assert_eq!(free.to_string(), "cuStreamCreate: out of memory", "the device has enough");
        let other = CudaError::Peer { reason: "device 1 has failed".into() };
        assert_eq!(with_memory(other, 0, OPENING, unasked).to_string(), "device 1 has failed");
    }
}
