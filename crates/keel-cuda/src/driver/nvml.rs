//! NVML, which tells how much of a device's memory is free without a context on it. It comes with the driver, but not
//! everywhere: containers may lack it. So only the attribution of memory use depends on it.

use super::check;
use cudarc::driver::sys::{self, CUdevice};
use libloading::Library;
use std::ffi::{c_char, c_int, c_void};

const LIBRARY: &str = if cfg!(windows) { "nvml.dll" } else { "libnvidia-ml.so.1" };

/// Bytes of the text of a device's address on the bus, at most, with the zero at its end.
const ADDRESS_BYTES: usize = 32;

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Default)]
struct MemoryInfo {
    total: u64,
    free: u64,
    used: u64,
}

type Plain = unsafe extern "C" fn() -> c_int;
type HandleByAddress = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int;
type GetMemoryInfo = unsafe extern "C" fn(*mut c_void, *mut MemoryInfo) -> c_int;

/// NVML, initialised, with its handle of one device.
pub(super) struct Nvml {
    device: *mut c_void,
    memory_info: GetMemoryInfo,
    shutdown: Plain,
    /// Holds the functions above.
    _library: Library,
}

impl Nvml {
    /// NVML for a device of the driver; `None` if it is not there or does not know the device.
    pub fn open(device: CUdevice) -> Option<Nvml> {
        let mut address: [c_char; ADDRESS_BYTES] = [0; ADDRESS_BYTES];
        // SAFETY: the driver writes at most ADDRESS_BYTES bytes, the last one a zero.
        let found = unsafe { sys::cuDeviceGetPCIBusId(address.as_mut_ptr(), ADDRESS_BYTES as c_int, device) };
        check("cuDeviceGetPCIBusId", found).ok()?;
        // SAFETY: a library of the driver's maker, whose loading runs nothing that depends on this process; its
        // functions have these types in all versions.
        let (library, init, shutdown, by_address, memory_info) = unsafe {
            let library = Library::new(LIBRARY).ok()?;
            let init = *library.get::<Plain>(b"nvmlInit_v2\0").ok()?;
            let shutdown = *library.get::<Plain>(b"nvmlShutdown\0").ok()?;
            let by_address = *library.get::<HandleByAddress>(b"nvmlDeviceGetHandleByPciBusId_v2\0").ok()?;
            let memory_info = *library.get::<GetMemoryInfo>(b"nvmlDeviceGetMemoryInfo\0").ok()?;
            (library, init, shutdown, by_address, memory_info)
        };
        // SAFETY: of the library above; undone on drop.
        if unsafe { init() } != 0 {
            return None;
        }
        let mut nvml = Nvml { device: std::ptr::null_mut(), memory_info, shutdown, _library: library };
        // SAFETY: the text ends with a zero, the pointer is to a field of the right type.
        let found = unsafe { by_address(address.as_ptr(), &mut nvml.device) };
        (found == 0).then_some(nvml)
    }

    /// Bytes that no program uses.
    pub fn free_bytes(&self) -> Option<u64> {
        let mut info = MemoryInfo::default();
        // SAFETY: a device of this library, and a structure of the type that it fills.
        let said = unsafe { (self.memory_info)(self.device, &mut info) };
        (said == 0).then_some(info.free)
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: initialised once by `open`, and shut down once.
        let _ = unsafe { (self.shutdown)() };
    }
}
