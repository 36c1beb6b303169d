//! A device: its context, its stream, and its properties.

use super::compiler::Architecture;
use super::nvml::Nvml;
use super::stand_in::StandIn;
use super::{Event, OPENING, check, driver, explained};
use crate::{CudaError, error::Result};
use cudarc::driver::sys::{self, CUcontext, CUdevice, CUdevice_attribute, CUresult, CUstream};
use keel_array::DeviceUsage;
use std::collections::BTreeMap;
use std::ffi::CStr;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

/// The CUDA version whose driver interface the kernels and graphs need: 12.0.
pub(super) const DRIVER_MIN: i32 = 12_000;

/// How often a host that waits asks the driver before it looks at the device's peers.
const QUERIES: usize = 32;

/// How long a host waits without giving its core to others, and the pauses after that.
const AWAKE: Duration = Duration::from_millis(20);
const PAUSE: Duration = Duration::from_micros(50);

/// The longest wait for a stream whose exchanges were ended.
pub(crate) const DRAIN: Duration = Duration::from_secs(10);

/// Tells why a host must not wait on; see [`Device::watch`].
type Watch = Box<dyn Fn() -> Result<()> + Send + Sync>;

/// A small write of the host that waits for its delivery.
#[derive(Clone, Debug)]
pub(crate) struct Delivery {
    /// Device addresses.
    pub to: Range<u64>,
    /// Address in pinned memory.
    pub from: u64,
}

impl Delivery {
    /// True if it writes any of these addresses.
    pub fn touches(&self, addresses: &Range<u64>) -> bool {
        overlap(&self.to, addresses)
    }
}

/// Whether two ranges of addresses overlap.
pub(crate) fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

/// The context that all users of a GPU in this process share. Released on drop, with streams that are left in it.
struct PrimaryContext {
    device: CUdevice,
    context: CUcontext,
}

impl PrimaryContext {
    /// Takes the context of a device that exists, and makes it current on this thread.
    fn retain(device: CUdevice) -> Result<PrimaryContext> {
        let mut context = std::ptr::null_mut();
        // SAFETY: the pointer is to a local; released on drop.
        unsafe { driver!(cuDevicePrimaryCtxRetain(&mut context, device))? };
        let retained = PrimaryContext { device, context };
        // SAFETY: the context was just retained.
        unsafe { driver!(cuCtxSetCurrent(context))? };
        Ok(retained)
    }
}

impl Drop for PrimaryContext {
    fn drop(&mut self) {
        // A device that is lost refuses this call, and nothing more can be done.
        // SAFETY: retained once, released once.
        let _ = unsafe { check("cuDevicePrimaryCtxRelease", sys::cuDevicePrimaryCtxRelease_v2(self.device)) };
    }
}

/// A GPU with its primary context and the one stream on which everything runs.
pub(crate) struct Device {
    device: CUdevice,
    context: PrimaryContext,
    stream: CUstream,
    /// For reads that do not wait for the work on `stream`.
    side: CUstream,
    pub name: String,
    /// Compute capability by which kernels are chosen: major, minor.
    pub capability: (u32, u32),
    /// The architecture that kernels are compiled for.
    pub architecture: Architecture,
    pub multiprocessors: usize,
    /// Bytes of shared memory that a block may have.
    pub shared_bytes_max: usize,
    /// Whether memory can be mapped into address space that was reserved before.
    pub maps_memory: bool,
    /// Bytes that were free before this process had a context; the context itself takes some.
    free_before: Option<u64>,
    deliveries: Mutex<Vec<Delivery>>,
    /// Held while `stream` is captured, and by other threads while they use it.
    capturing: Mutex<()>,
    watch: OnceLock<Watch>,
    /// Whether [`Device::is_done`] has waited for [`DRAIN`] in vain. It does not wait that long a second time.
    is_stuck: AtomicBool,
    /// Bytes that are lost to this process, because the device has not ended the work that may use them.
    pub(super) unfreed: AtomicU64,
}

// SAFETY: the driver's handles may be used from any thread that has made the context current, which every method does.
unsafe impl Send for Device {}
// SAFETY: the runtime's stream calls the backend one at a time; the driver itself is thread-safe.
unsafe impl Sync for Device {}

impl Device {
    /// Opens a device.
    ///
    /// # Errors
    /// If there is no driver, it is too old, there is no such device, it is too old, or its memory is full.
    pub fn open(ordinal: usize) -> Result<Device> {
        // SAFETY: asks the loader whether the library can be opened.
        if !unsafe { sys::is_culib_present() } {
            return Err(no_driver());
        }
        let (mut found, mut count, mut device) = (0, 0, 0);
        // SAFETY: the pointers are to locals of the right types, and cuInit is called first.
        unsafe {
            driver!(cuInit(0))?;
            driver!(cuDriverGetVersion(&mut found))?;
            driver!(cuDeviceGetCount(&mut count))?;
        }
        if found < DRIVER_MIN {
            return Err(CudaError::DriverTooOld { found, needed: DRIVER_MIN });
        }
        if ordinal >= count as usize {
            return Err(CudaError::NoDevice { ordinal, count: count as usize });
        }
        // SAFETY: a device that exists.
        unsafe { driver!(cuDeviceGet(&mut device, ordinal as i32))? };
        Device::start(device).map_err(explained(device, OPENING))
    }

    /// Makes the context and the streams of a device that exists.
    fn start(device: CUdevice) -> Result<Device> {
        let name = name_of(device)?;
        let attribute = |a| attribute_of(device, a);
        let major = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        if major < 8 {
            return Err(CudaError::Capability { name, capability: (major, minor) });
        }
        let multiprocessors = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let shared = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let maps = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED)?;
        let own = StandIn { capability: (major, minor), shared_bytes_max: shared as usize };
        let stand_in = StandIn::named()?.filter(|other| other.capability != own.capability);
        let StandIn { capability, shared_bytes_max } = stand_in.unwrap_or(own);
        let before = Before::of(device);
        let context = PrimaryContext::retain(device)?;
        let free_before = before.free_bytes(device, memory_info()?.free);
        let (stream, side) = (new_stream()?, new_stream()?);
        Ok(Device {
            device,
            context,
            stream,
            side,
            name,
            capability,
            architecture: Architecture { capability: own.capability, is_portable: stand_in.is_some() },
            multiprocessors: multiprocessors as usize,
            shared_bytes_max: shared_bytes_max.min(own.shared_bytes_max),
            maps_memory: maps != 0,
            free_before,
            deliveries: Mutex::default(),
            capturing: Mutex::default(),
            watch: OnceLock::new(),
            is_stuck: AtomicBool::new(false),
            unfreed: AtomicU64::new(0),
        })
    }

    /// Its number among the devices of the process.
    pub fn ordinal(&self) -> CUdevice {
        self.device
    }

    /// Writes of the host that wait for the next launch.
    pub fn deliveries(&self) -> MutexGuard<'_, Vec<Delivery>> {
        self.deliveries.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// While this guard lives, no thread captures the stream. So work put on the stream enters no graph, and the driver
    /// does not refuse it.
    ///
    /// The thread that captures has the session. Memory is zeroed and freed by any thread, also without the session.
    /// So these calls hold this lock, but do not wait for the device with it: its stream may wait for a peer until the
    /// session ends its exchanges.
    pub fn no_capture(&self) -> MutexGuard<'_, ()> {
        self.capturing.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Makes the context current on this thread.
    pub fn bind(&self) -> Result<()> {
        // SAFETY: the context lives as long as this value.
        unsafe { driver!(cuCtxSetCurrent(self.context.context)) }
    }

    /// The stream.
    pub fn stream(&self) -> CUstream {
        self.stream
    }

    /// Copies device bytes to the host and waits for the copy, but not for the work on the stream.
    ///
    /// # Safety
    /// The bytes are on the device and in pinned memory, and nothing on the stream writes either.
    pub unsafe fn read_settled(&self, to: *mut std::ffi::c_void, from: u64, bytes: usize) -> Result<()> {
        // SAFETY: as promised by the caller; the stream lives as long as this value.
        unsafe {
            driver!(cuMemcpyDtoHAsync_v2(to, from, bytes, self.side))?;
            driver!(cuStreamSynchronize(self.side))
        }
    }

    /// Makes waits for this device end with the error of `watch`: its stream may wait for devices that never come.
    pub fn watch(&self, watch: impl Fn() -> Result<()> + Send + Sync + 'static) {
        // A second call changes nothing: a device never changes its group.
        let _ = self.watch.set(Box::new(watch));
    }

    /// Waits for everything on the stream.
    pub fn synchronize(&self) -> Result<()> {
        self.wait(
            // SAFETY: the stream lives as long as this value.
            || unsafe { driver!(cuStreamSynchronize(self.stream)) },
            // SAFETY: as above.
            || unsafe { sys::cuStreamQuery(self.stream) },
        )
    }

    /// Waits with `block`, or, if the device is [watched](Device::watch), until `query` says that the work is done.
    pub fn wait(&self, block: impl Fn() -> Result<()>, query: impl Fn() -> CUresult) -> Result<()> {
        match self.watch.get() {
            None => block(),
            Some(watch) => poll(query, watch),
        }
    }

    /// Returns an error if a peer has failed and the device is [watched](Device::watch). Results of kernels may then be
    /// undefined: when one device ends its exchanges, NCCL's kernels on the others may go on with any bytes in their
    /// buffers.
    pub fn check_peers(&self) -> Result<()> {
        self.watch.get().map_or(Ok(()), |watch| watch())
    }

    /// Waits until the stream is empty, without a look at its peers.
    ///
    /// # Errors
    /// It is not empty after this time.
    pub fn drain(&self, most: Duration) -> Result<()> {
        // SAFETY: the stream lives as long as this value.
        poll_for(most, || unsafe { sys::cuStreamQuery(self.stream) })
    }

    /// Waits for everything on the stream before memory is freed, also if a peer has failed. False if the device may
    /// still use the memory, or does not tell. Any thread may ask, also while another one captures the stream.
    pub fn is_done(self: &Arc<Self>) -> bool {
        // A stream that is captured must not be waited for. A mark that was put there before the capture may be.
        let Ok(mark) = self.mark() else { return false };
        if mark.wait().is_ok() {
            self.is_stuck.store(false, Ordering::Relaxed);
            return true;
        }
        // One wait is enough for all memory of a device that does not end.
        let is_done = !self.is_stuck.load(Ordering::Relaxed) && mark.wait_for(DRAIN).is_ok();
        self.is_stuck.store(!is_done, Ordering::Relaxed);
        is_done
    }

    /// A mark after everything that is on the stream.
    fn mark(self: &Arc<Self>) -> Result<Event> {
        let mark = Event::new(self)?;
        let _no_capture = self.no_capture();
        mark.record()?;
        Ok(mark)
    }

    /// Bytes of the device, as the driver sees them.
    pub fn memory_info(&self) -> Result<MemoryInfo> {
        self.bind()?;
        memory_info()
    }

    /// The same, and the bytes that were free before the device was opened.
    pub fn usage(&self) -> Result<DeviceUsage> {
        let MemoryInfo { free, total } = self.memory_info()?;
        Ok(DeviceUsage { total, free, free_before: self.free_before })
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // A device that is lost refuses these calls, and nothing more can be done.
        // SAFETY: created by `open`, destroyed once.
        unsafe {
            let _ = check("cuStreamDestroy", sys::cuStreamDestroy_v2(self.side));
            let _ = check("cuStreamDestroy", sys::cuStreamDestroy_v2(self.stream));
        }
    }
}

/// Asks until the work is done, at most so long.
pub(super) fn poll_for(most: Duration, query: impl Fn() -> CUresult) -> Result<()> {
    let start = Instant::now();
    let is_late = || match start.elapsed() < most {
        true => Ok(()),
        false => {
            let reason = format!("the device still works after {} s", most.as_secs());
            Err(CudaError::Driver { call: "cuStreamQuery", reason })
        }
    };
    poll(query, is_late)
}

/// Asks until the work is done, or must not be waited for any more.
fn poll(query: impl Fn() -> CUresult, watch: impl Fn() -> Result<()>) -> Result<()> {
    let start = Instant::now();
    loop {
        for _ in 0..QUERIES {
            match query() {
                CUresult::CUDA_ERROR_NOT_READY => std::hint::spin_loop(),
                code => return check("cuStreamQuery", code),
            }
        }
        watch()?;
        if start.elapsed() > AWAKE {
            std::thread::sleep(PAUSE);
        } else {
            std::thread::yield_now();
        }
    }
}

/// A stream that runs next to others. The context is current.
fn new_stream() -> Result<CUstream> {
    let mut stream = std::ptr::null_mut();
    // SAFETY: the pointer is to a local; the device destroys the stream when it is dropped.
    unsafe { driver!(cuStreamCreate(&mut stream, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32))? };
    Ok(stream)
}

/// The free bytes of each device before this process first opened it; `None` if nothing tells. They are kept because a
/// context may outlive its release, if a library holds it, too.
static FREE_BEFORE: Mutex<BTreeMap<CUdevice, Option<u64>>> = Mutex::new(BTreeMap::new());

/// NVML's count of free bytes before there is a context. Devices are opened one at a time, so that none sees another's
/// context.
struct Before {
    known: MutexGuard<'static, BTreeMap<CUdevice, Option<u64>>>,
    nvml: Option<Nvml>,
    free: Option<u64>,
}

impl Before {
    fn of(device: CUdevice) -> Before {
        let known = FREE_BEFORE.lock().unwrap_or_else(|e| e.into_inner());
        let nvml = if known.contains_key(&device) { None } else { Nvml::open(device) };
        Before { free: nvml.as_ref().and_then(Nvml::free_bytes), known, nvml }
    }

    /// The free bytes before the context, given those with it. The driver's count may leave out memory that NVML counts
    /// as free, so each count is compared with itself.
    fn free_bytes(mut self, device: CUdevice, free: u64) -> Option<u64> {
        let after = self.nvml.as_ref().and_then(Nvml::free_bytes);
        let before = self.free.zip(after).map(|(before, after)| free + before.saturating_sub(after));
        *self.known.entry(device).or_insert(before)
    }
}

/// Bytes of a device's memory.
#[derive(Clone, Copy, Debug)]
pub struct MemoryInfo {
    /// Bytes that are free.
    pub free: u64,
    /// All bytes.
    pub total: u64,
}

/// Bytes of the device whose context is current.
pub(super) fn memory_info() -> Result<MemoryInfo> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: the pointers are to locals.
    unsafe { driver!(cuMemGetInfo_v2(&mut free, &mut total))? };
    Ok(MemoryInfo { free: free as u64, total: total as u64 })
}

/// The error for a missing driver.
pub(super) fn no_driver() -> CudaError {
    let advice = "it is part of the NVIDIA driver; install the driver, or use --device cpu";
    CudaError::Missing { library: "libcuda", advice }
}

pub(super) fn name_of(device: CUdevice) -> Result<String> {
    let mut name = [0; 128];
    // SAFETY: the driver writes at most this many bytes, the last one a zero.
    unsafe { driver!(cuDeviceGetName(name.as_mut_ptr(), name.len() as i32, device))? };
    // SAFETY: ended by a zero within the array.
    Ok(unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
}

pub(super) fn attribute_of(device: CUdevice, attribute: CUdevice_attribute) -> Result<u32> {
    let mut value = 0;
    // SAFETY: the pointer is to a local.
    unsafe { driver!(cuDeviceGetAttribute(&mut value, attribute, device))? };
    Ok(value.max(0) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn a_wait_ends_with_the_work_or_with_the_watch() {
        let asked = Cell::new(0);
        let query = |busy: usize| {
            let asked = &asked;
            move || {
                asked.set(asked.get() + 1);
                let is_done = asked.get() > busy;
                if is_done { CUresult::CUDA_SUCCESS } else { CUresult::CUDA_ERROR_NOT_READY }
            }
        };
        poll(query(1000), || Ok(())).expect("the work ends");
        assert_eq!(asked.replace(0), 1001);
        let watch = || match asked.get() < 500 {
            true => Ok(()),
            false => Err(CudaError::Peer { reason: "device 1 has failed".into() }),
        };
        let error = poll(query(usize::MAX), watch).expect_err("the work never ends");
        assert_eq!(error.to_string(), "device 1 has failed");
        assert!(asked.get() < 500 + 2 * QUERIES);
    }
}
