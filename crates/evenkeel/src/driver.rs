//! The memory that a GPU's driver uses in addition to tensor memory, and a limit that leaves room for it.

use keel_array::{DeviceReading, DeviceUsage, Runtime};

use crate::human_bytes;

/// Bytes that the default limit leaves free. They are for other programs, and for code of kernels and libraries, which
/// is loaded on first use.
///
/// ```
/// assert_eq!(evenkeel::human_bytes(evenkeel::DRIVER_ROOM_BYTES), "512 MiB");
/// ```
pub const DRIVER_ROOM_BYTES: u64 = 512 << 20;

/// The memory of a GPU's driver for this process: context, code of kernels, libraries. It is neither in the ledger nor
/// in the plan.
///
/// ```
/// use evenkeel::array::{Compute, DeviceUsage};
/// use evenkeel::{Device, DeviceOptions, DriverMemory, human_bytes};
/// let device = DeviceOptions { device: Some(Device::Cpu), ..DeviceOptions::default() };
/// let runtime = device.runtime(Compute::Auto)?;
/// assert!(DriverMemory::measure(&runtime).is_none(), "a CPU has no driver");
///
/// let usage = DeviceUsage { total: 24 << 30, free: 20 << 30, free_before: None };
/// let gpu = DriverMemory { usage, bytes: 1 << 30, pinned: 0, held: 0 };
/// assert_eq!(human_bytes(gpu.limit()), "19.5 GiB");
/// assert_eq!(gpu.to_line(), format!("1.0 GiB ({})", gpu.what()));
/// # Ok::<(), evenkeel::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverMemory {
    /// The device's memory.
    pub usage: DeviceUsage,
    /// The value of [`DeviceUsage::driver_bytes`].
    pub bytes: u64,
    /// Bytes of the plan that are not on the device but in pinned memory of the host.
    pub pinned: u64,
    /// Bytes of the plan that the backend holds on the device already, so that they are not free any more.
    pub held: u64,
}

impl DriverMemory {
    /// Measures the current state. Returns `None` if tensors are in host memory.
    pub fn measure(runtime: &Runtime) -> Option<DriverMemory> {
        let own = runtime.backend().own_memory();
        let (pinned, held) = (own.host_bytes, own.device_bytes);
        let DeviceReading { usage, driver_bytes } = runtime.device_usage()?;
        Some(DriverMemory { usage, bytes: driver_bytes, pinned, held })
    }

    /// The default limit on tensor bytes. It must be taken before tensors exist.
    pub fn limit(&self) -> u64 {
        (self.usage.free + self.held).saturating_sub(DRIVER_ROOM_BYTES)
    }

    /// Describes the contents of these bytes.
    pub fn what(&self) -> &'static str {
        match self.usage.others() {
            Some(_) => "context, code of kernels, libraries: measured, in addition to the plan",
            None => {
                "context, code of kernels, libraries, and all that other programs have: measured, in addition to the plan"
            }
        }
    }

    /// The bytes with a unit, and their description.
    pub fn to_line(self) -> String {
        format!("{} ({})", human_bytes(self.bytes), self.what())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_limit_leaves_room_for_code() {
        let of = |free, held| {
            let usage = DeviceUsage { total: 80 << 30, free, free_before: None };
            DriverMemory { usage, bytes: 0, pinned: 0, held }.limit()
        };
        assert_eq!(of(79 << 30, 0), (79 << 30) - (512 << 20));
        assert_eq!(of(100 << 20, 0), 0, "less than the room is free");
        // A plan counts buffers of exchanges between devices, which are there before it is compared.
        assert_eq!(of(78 << 30, 1 << 30), (79 << 30) - (512 << 20));
    }
}
