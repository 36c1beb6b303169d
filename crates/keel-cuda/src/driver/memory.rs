//! Device memory, and pinned host memory for transfers between the two.

use super::{Device, GRANULE, Reservation, driver};
use crate::error::Result;
use cudarc::driver::sys::{CU_MEMHOSTALLOC_PORTABLE, CUdeviceptr};
use keel_array::DeviceMemory;
use std::any::Any;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Fills freed memory on request: a NaN in every float type, an index out of every range.
const POISON: u8 = 0xff;

/// Zeroed device memory, or only its size for a plan.
pub(crate) struct CudaMemory {
    /// Present if the memory grows in place. Dropped before the device.
    reservation: Option<Mutex<Reservation>>,
    device: Option<Arc<Device>>,
    start: CUdeviceptr,
    bytes: AtomicUsize,
    poison: bool,
}

impl CudaMemory {
    /// Only a size, without memory. Its addresses are those of no other memory of this kind: which kernels a launch
    /// has depends on whether operands overlap.
    pub fn counted(bytes: usize) -> CudaMemory {
        static NEXT: AtomicU64 = AtomicU64::new(GRANULE as u64);
        let apart = bytes.max(1).checked_next_multiple_of(GRANULE).unwrap_or(bytes);
        let start = NEXT.fetch_add(apart as u64, Ordering::Relaxed);
        CudaMemory { reservation: None, device: None, start, bytes: bytes.into(), poison: false }
    }

    /// Zeroed memory.
    pub fn zeroed(device: &Arc<Device>, bytes: usize) -> Result<CudaMemory> {
        device.bind()?;
        let mut start = 0;
        // SAFETY: the pointer is to a local; a size of zero is refused by the driver, hence one byte at least.
        unsafe { driver!(cuMemAlloc_v2(&mut start, bytes.max(1)))? };
        let device = Some(Arc::clone(device));
        let memory = CudaMemory { reservation: None, device, start, bytes: bytes.into(), poison: false };
        memory.zero(0, bytes.max(1))?;
        Ok(memory)
    }

    /// Zeroed memory that grows in place; `None` if the device has no such memory.
    pub fn growing(device: &Arc<Device>, bytes: usize) -> Result<Option<CudaMemory>> {
        device.bind()?;
        let Some(reservation) = Reservation::new(device)? else { return Ok(None) };
        let start = reservation.start();
        let (device, reservation) = (Some(Arc::clone(device)), Some(Mutex::new(reservation)));
        let memory = CudaMemory { reservation, device, start, bytes: 0.into(), poison: false };
        Ok(memory.grow(bytes)?.then_some(memory))
    }

    /// The memory, overwritten when it is freed if `poison`.
    pub fn poisoned_when_freed(mut self, poison: bool) -> CudaMemory {
        self.poison = poison;
        self
    }

    /// Adds zeroed memory at the end until there are `bytes` bytes; false if the memory cannot grow in place.
    pub fn grow(&self, bytes: usize) -> Result<bool> {
        let (Some(device), Some(reservation)) = (&self.device, &self.reservation) else {
            return Ok(false);
        };
        device.bind()?;
        let mut reservation = reservation.lock().unwrap_or_else(|e| e.into_inner());
        let before = self.bytes();
        if bytes <= before {
            return Ok(true);
        }
        if !reservation.grow(device, bytes)? {
            return Ok(false);
        }
        self.zero(before, bytes - before)?;
        self.bytes.store(bytes, Ordering::Release);
        Ok(true)
    }

    /// Zeroes bytes of the memory, after the work on the stream.
    fn zero(&self, offset: usize, len: usize) -> Result<()> {
        let Some(device) = &self.device else { return Ok(()) };
        let _no_capture = device.no_capture();
        // SAFETY: within the allocation.
        unsafe { driver!(cuMemsetD8Async(self.at(offset), 0, len, device.stream())) }
    }

    fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Acquire)
    }

    /// The memory as the type that this backend allocated.
    pub fn of(memory: &dyn DeviceMemory) -> &CudaMemory {
        memory.as_any().downcast_ref().expect("the CUDA backend works on memory that it allocated")
    }

    /// Address of byte `offset`.
    pub fn at(&self, offset: usize) -> CUdeviceptr {
        self.start + offset as u64
    }

    /// Address of byte `offset`, from which `len` bytes are used.
    ///
    /// # Panics
    /// If they are not within the memory.
    pub fn range(&self, offset: usize, len: usize) -> CUdeviceptr {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.bytes()),
            "{len} bytes at {offset} of device memory of {}",
            self.bytes()
        );
        self.at(offset)
    }
}

impl DeviceMemory for CudaMemory {
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        let Some(device) = &self.device else { return };
        let bytes = self.bytes();
        // Nothing will read the host's writes to this memory that are not delivered yet.
        let gone = self.start..self.start + bytes as u64;
        device.deliveries().retain(|delivery| !delivery.touches(&gone));
        // Nothing can be done about a device that refuses.
        let _ = device.bind();
        if self.poison && bytes > 0 {
            let _no_capture = device.no_capture();
            // SAFETY: this value owns the bytes, and no submission holds it any more.
            let _ = unsafe { driver!(cuMemsetD8Async(self.start, POISON, bytes, device.stream())) };
        }
        if !device.is_done() {
            // Memory that a kernel may still use is lost to this process, and never given to anyone else.
            note_unfreed(device, bytes);
            std::mem::forget(self.reservation.take());
            return;
        }
        if self.reservation.is_none() {
            // SAFETY: allocated by `zeroed`, freed once, and the stream has passed its last use.
            let _ = unsafe { driver!(cuMemFree_v2(self.start)) };
        }
    }
}

/// Reports memory that a device may still use, so that it is not freed. A lost device has thousands of buffers, so only
/// the first is an error in the log.
fn note_unfreed(device: &Device, bytes: usize) {
    match device.unfreed.fetch_add(bytes as u64, Ordering::Relaxed) {
        0 => tracing::error!(
            "{}: memory is not freed, because the device has not ended what may use it",
            device.name
        ),
        before => tracing::debug!("{}: {} bytes are not freed", device.name, before + bytes as u64),
    }
}

/// Page-locked host memory: the device copies to and from it without the driver's own bounce buffer.
pub(crate) struct PinnedBuffer {
    device: Arc<Device>,
    start: *mut u8,
    bytes: usize,
}

// SAFETY: the memory belongs to this value alone.
unsafe impl Send for PinnedBuffer {}
// SAFETY: through a shared reference, threads reach the first word alone, which is atomic.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// Memory of this size.
    pub fn new(device: &Arc<Device>, bytes: usize) -> Result<PinnedBuffer> {
        device.bind()?;
        let mut start = std::ptr::null_mut();
        // SAFETY: the pointer is to a local; freed on drop.
        unsafe { driver!(cuMemHostAlloc(&mut start, bytes, CU_MEMHOSTALLOC_PORTABLE))? };
        Ok(PinnedBuffer { device: Arc::clone(device), start: start.cast(), bytes })
    }

    /// Some of the bytes. The caller has waited until the device is done with them.
    ///
    /// # Panics
    /// If they are not within the memory.
    pub fn bytes(&mut self, at: Range<usize>) -> &mut [u8] {
        assert!(at.start <= at.end && at.end <= self.bytes, "{at:?} of {} pinned bytes", self.bytes);
        // SAFETY: within the allocation, which the system zeroed before its first use, and nothing else uses these
        // bytes.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at.start), at.len()) }
    }

    /// The first word, which the host writes while the device reads it.
    pub fn word(&self) -> &AtomicU32 {
        assert!(self.bytes >= size_of::<u32>(), "{} pinned bytes are no word", self.bytes);
        // SAFETY: allocated in whole pages and zeroed by the system; only this reads or writes it as long as the
        // bytes are not borrowed.
        unsafe { AtomicU32::from_ptr(self.start.cast()) }
    }

    /// Address for the driver.
    pub fn address(&self) -> *mut u8 {
        self.start
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        // Nothing can be done about a device that refuses.
        let _ = self.device.bind();
        if !self.device.is_done() {
            // A kernel may still report to it.
            note_unfreed(&self.device, self.bytes);
            return;
        }
        // SAFETY: allocated by `new`, freed once, and the stream has passed its last use.
        let _ = unsafe { driver!(cuMemFreeHost(self.start.cast())) };
    }
}
