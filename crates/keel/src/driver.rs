//! The memory that a GPU's driver uses in addition to tensor memory, and a limit that leaves room for it.

use keel_array::{DeviceUsage, Runtime};
use serde_json::{Value, json};

use crate::report::human_bytes;

/// Bytes that the default limit leaves free. They are for other programs, and for code of kernels and libraries, which
/// is loaded on first use.
pub const ROOM_BYTES: u64 = 512 << 20;

/// The memory of the driver for this process: context, code of kernels, libraries. It is neither in the ledger nor in
/// the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Driver {
    usage: DeviceUsage,
    /// The value of [`DeviceUsage::driver_bytes`].
    pub bytes: u64,
}

impl Driver {
    /// Measures the current state. Returns `None` if tensors are in host memory.
    pub fn measure(runtime: &Runtime) -> Option<Driver> {
        runtime.device_usage().map(|(usage, bytes)| Driver { usage, bytes })
    }

    /// The default limit on tensor bytes. It must be taken before tensors exist.
    pub fn limit(&self) -> u64 {
        self.usage.free.saturating_sub(ROOM_BYTES)
    }

    /// Describes the contents of these bytes.
    pub fn what(&self) -> &'static str {
        match self.usage.others() {
            Some(_) => "context, code of kernels, libraries: measured, beside the plan",
            None => {
                "context, code of kernels, libraries, and all that other programs have: measured, beside the plan"
            }
        }
    }

    /// The bytes with a unit, and their description.
    pub fn to_line(self) -> String {
        format!("{} ({})", human_bytes(self.bytes), self.what())
    }

    /// `bytes`; `others` (null if they cannot be measured, and are therefore part of `bytes`); and the device's `free`
    /// and `total`.
    pub fn to_json(self) -> Value {
        let DeviceUsage { total, free, .. } = self.usage;
        json!({"bytes": self.bytes, "others": self.usage.others(), "free": free, "total": total})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_limit_leaves_room_for_code() {
        let of = |free| {
            Driver { usage: DeviceUsage { total: 80 << 30, free, free_before: None }, bytes: 0 }.limit()
        };
        assert_eq!(of(79 << 30), (79 << 30) - (512 << 20));
        assert_eq!(of(100 << 20), 0, "less than the room is free");
    }
}
