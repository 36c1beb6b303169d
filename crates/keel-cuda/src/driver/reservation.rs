//! Address space of a device, with memory mapped from its start on. It can grow, and its address stays.

use super::{Device, driver};
use crate::error::Result;
use cudarc::driver::sys::{
    CUdevice, CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags,
    CUmemAllocationHandleType, CUmemAllocationProp, CUmemAllocationProp_st__bindgen_ty_1,
    CUmemAllocationType, CUmemGenericAllocationHandle, CUmemLocation, CUmemLocationType,
};
use std::collections::BTreeSet;
use std::ops::Range;

/// Memory is mapped in multiples of this: the device's large page, which its driver asks for at least.
pub(crate) const GRANULE: usize = 2 << 20;

/// Address space costs nothing until memory is mapped.
pub(crate) struct Reservation {
    start: CUdeviceptr,
    reserved: usize,
    /// The devices that may use the memory.
    users: Vec<CUdevice>,
    /// Bytes of each mapping, in the order of addresses. Each is unmapped as it was mapped.
    mapped: Vec<usize>,
}

impl Reservation {
    /// As much address space as the device has memory, without memory; `None` if the device has no such thing, or maps
    /// in other steps. Its context is current.
    pub fn new(device: &Device) -> Result<Option<Reservation>> {
        Reservation::shared(device, device.memory_info()?.total as usize, &[device.ordinal()])
    }

    /// The same of `bytes` bytes. All `users` may use the memory, at the same addresses.
    pub fn shared(device: &Device, bytes: usize, users: &[CUdevice]) -> Result<Option<Reservation>> {
        if !device.maps_memory || !GRANULE.is_multiple_of(granularity(device)?) {
            return Ok(None);
        }
        let reserved = bytes.next_multiple_of(GRANULE);
        let mut start = 0;
        // SAFETY: the pointer is to a local; freed on drop.
        unsafe { driver!(cuMemAddressReserve(&mut start, reserved, GRANULE, 0, 0))? };
        // The driver takes each device once.
        let users: BTreeSet<CUdevice> = users.iter().copied().collect();
        Ok(Some(Reservation { start, reserved, users: users.into_iter().collect(), mapped: Vec::new() }))
    }

    /// Where it begins.
    pub fn start(&self) -> CUdeviceptr {
        self.start
    }

    /// Maps memory until there are at least `bytes` bytes; false if the address space ends before. The device's context
    /// is current.
    pub fn grow(&mut self, device: &Device, bytes: usize) -> Result<bool> {
        match missing(self.mapped.iter().sum(), bytes, self.reserved) {
            None => Ok(false),
            Some(range) if range.is_empty() => Ok(true),
            Some(range) => self.map(device, range).map(|()| true),
        }
    }

    fn map(&mut self, device: &Device, range: Range<usize>) -> Result<()> {
        let (at, bytes) = (self.start + range.start as u64, range.len());
        let properties = properties(device);
        let mut handle: CUmemGenericAllocationHandle = 0;
        // SAFETY: the pointers are to locals.
        unsafe { driver!(cuMemCreate(&mut handle, bytes, &properties, 0))? };
        // SAFETY: reserved, and nothing is mapped there yet.
        let mapped = unsafe { driver!(cuMemMap(at, bytes, 0, handle, 0)) };
        // From now on the mapping alone keeps the memory. If the driver refuses, the mapping is as good.
        // SAFETY: made above, released once.
        let _ = unsafe { driver!(cuMemRelease(handle)) };
        mapped?;
        self.mapped.push(bytes);
        let access = |&user: &CUdevice| CUmemAccessDesc {
            location: CUmemLocation { id: user, ..properties.location },
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let access: Vec<CUmemAccessDesc> = self.users.iter().map(access).collect();
        // SAFETY: mapped above; as many descriptions as are counted.
        let accessible = unsafe { driver!(cuMemSetAccess(at, bytes, access.as_ptr(), access.len())) };
        if accessible.is_err() {
            self.unmap_last();
        }
        accessible
    }

    fn unmap_last(&mut self) {
        let Some(bytes) = self.mapped.pop() else { return };
        let at = self.start + self.mapped.iter().sum::<usize>() as u64;
        // If the device refuses, nothing can be done.
        // SAFETY: mapped as a whole, and no longer used.
        let _ = unsafe { driver!(cuMemUnmap(at, bytes)) };
    }
}

impl Drop for Reservation {
    /// The device's context is current, and its stream has passed the last use.
    fn drop(&mut self) {
        while !self.mapped.is_empty() {
            self.unmap_last();
        }
        // SAFETY: reserved by `new`, freed once, with nothing mapped.
        let _ = unsafe { driver!(cuMemAddressFree(self.start, self.reserved)) };
    }
}

/// The range to map after the first `mapped` bytes so that there are `bytes`; `None` if that is more than the address
/// space.
fn missing(mapped: usize, bytes: usize, reserved: usize) -> Option<Range<usize>> {
    let end = bytes.checked_next_multiple_of(GRANULE)?.max(mapped);
    (end <= reserved).then_some(mapped..end)
}

/// Memory of the device itself, not shared with other processes.
fn properties(device: &Device) -> CUmemAllocationProp {
    CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location: CUmemLocation {
            type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: device.ordinal(),
        },
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

/// The steps in which this device maps memory.
fn granularity(device: &Device) -> Result<usize> {
    let least = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    let mut bytes = 0;
    // SAFETY: the pointers are to locals.
    unsafe { driver!(cuMemGetAllocationGranularity(&mut bytes, &properties(device), least))? };
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_granules_are_mapped_behind_what_is_there() {
        let reserved = 5 * GRANULE;
        assert_eq!(missing(0, 0, reserved), Some(0..0));
        assert_eq!(missing(0, 1, reserved), Some(0..GRANULE));
        assert_eq!(missing(GRANULE, GRANULE, reserved), Some(GRANULE..GRANULE));
        assert_eq!(missing(GRANULE, GRANULE + 1, reserved), Some(GRANULE..2 * GRANULE));
        assert_eq!(missing(3 * GRANULE, 5, reserved), Some(3 * GRANULE..3 * GRANULE), "it never shrinks");
        assert_eq!(missing(GRANULE, reserved, reserved), Some(GRANULE..reserved));
        assert_eq!(missing(GRANULE, reserved + 1, reserved), None);
        assert_eq!(missing(0, usize::MAX, reserved), None);
    }
}
