//! The free memory of a device, CPU or GPU. No other module computes it.

use keel_array::{MemoryReport, Runtime};
use keel_cpu::memory::{self, Bound};
use keel_engine::EngineOptions;

use crate::driver::{DRIVER_ROOM_BYTES, DriverMemory};
use crate::{OutOfMemory, Result, human_bytes};

/// Host memory that a plan leaves free for the program itself, its heap and its threads.
const HOST_ROOM_BYTES: u64 = 64 << 20;

/// The bytes that a plan may use, and why not more.
///
/// ```
/// if let Some(room) = evenkeel::FreeMemory::of_host() {
///     println!("{} are free: {}", evenkeel::human_bytes(room.bytes), room.why);
///     assert!(room.why.starts_with("free memory of "));
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FreeMemory {
    /// Bytes for the plan's categories that are on the device.
    pub bytes: u64,
    /// The reason, printed after the number.
    pub why: String,
}

impl FreeMemory {
    /// Free memory on the device of a runtime without allocations. Returns `None` if it is unknown.
    ///
    /// ```
    /// use evenkeel::{Device, DeviceOptions, FreeMemory, array::Compute};
    /// let cpu = DeviceOptions { device: Some(Device::Cpu), ..DeviceOptions::default() };
    /// let room = FreeMemory::of(&cpu.runtime(Compute::Auto)?);
    /// assert_eq!(room.is_some(), FreeMemory::of_host().is_some(), "a CPU's tensors are in host memory");
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn of(runtime: &Runtime) -> Option<FreeMemory> {
        match DriverMemory::measure(runtime) {
            Some(driver) => Some(FreeMemory::of_gpu(&driver)),
            None => FreeMemory::of_host(),
        }
    }

    /// Free memory of the host.
    pub fn of_host() -> Option<FreeMemory> {
        let free = memory::free()?;
        let who = match free.bound {
            Bound::Machine => "this machine",
            Bound::ControlGroup => "the control group (container) of this process",
        };
        let (bytes, room) = (free.bytes.saturating_sub(HOST_ROOM_BYTES), human_bytes(HOST_ROOM_BYTES));
        Some(FreeMemory { bytes, why: format!("free memory of {who}, minus {room} for the program") })
    }

    /// Free memory of a GPU.
    ///
    /// ```
    /// use evenkeel::{DriverMemory, FreeMemory, array::DeviceUsage};
    /// let usage = DeviceUsage { total: 24 << 30, free: 20 << 30, free_before: None };
    /// let driver = DriverMemory { usage, bytes: 1 << 30, pinned: 0, held: 0 };
    /// assert_eq!(FreeMemory::of_gpu(&driver).bytes, driver.limit());
    /// ```
    pub fn of_gpu(driver: &DriverMemory) -> FreeMemory {
        let room = human_bytes(DRIVER_ROOM_BYTES);
        FreeMemory {
            bytes: driver.limit(),
            why: format!("free memory of the GPU, minus {room} for its driver"),
        }
    }

    /// Compares the part of a plan that takes this memory, `needed` bytes, with the free bytes.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory) if it is more.
    ///
    /// ```
    /// use evenkeel::{FreeMemory, LoadOptions, ModelFiles, engine::EngineOptions};
    /// let planned = ModelFiles::built_in()?.plan(&LoadOptions::default())?;
    /// let room = FreeMemory { bytes: planned.total(), why: "the memory limit".into() };
    /// let options = EngineOptions::default();
    /// assert!(room.check(planned.total(), &planned, &options).is_ok());
    /// assert!(room.check(planned.total() + 1, &planned, &options).is_err());
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn check(&self, needed: u64, planned: &MemoryReport, options: &EngineOptions) -> Result<()> {
        if needed <= self.bytes {
            return Ok(());
        }
        let EngineOptions { context, sequences, .. } = *options;
        let (limit, whose, planned) = (self.bytes, self.why.clone(), *planned);
        Err(Box::new(OutOfMemory { needed, limit, whose, context, sequences, planned }).into())
    }
}

/// The bytes of a plan on the device. On a GPU, parked sequences, the features of pictures and the memory in which
/// tokens are drawn are in host memory instead.
///
/// ```
/// use evenkeel::{LoadOptions, ModelFiles, on_device, on_host};
/// let planned = ModelFiles::built_in()?.plan(&LoadOptions::default())?;
/// assert_eq!(on_device(&planned, true) + on_host(&planned, true), planned.total());
/// assert_eq!(on_device(&planned, false), planned.total());
/// # Ok::<(), evenkeel::Error>(())
/// ```
pub fn on_device(planned: &MemoryReport, is_gpu: bool) -> u64 {
    if is_gpu { planned.total() - planned.on_host() } else { planned.total() }
}

/// The bytes of a plan in host memory.
///
/// ```
/// use evenkeel::{LoadOptions, ModelFiles, on_host};
/// let planned = ModelFiles::built_in()?.plan(&LoadOptions::default())?;
/// assert_eq!(on_host(&planned, false), planned.total());
/// # Ok::<(), evenkeel::Error>(())
/// ```
pub fn on_host(planned: &MemoryReport, is_gpu: bool) -> u64 {
    if is_gpu { planned.on_host() } else { planned.total() }
}
