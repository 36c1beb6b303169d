//! What a GPU's driver holds beside tensor memory, and the limit that leaves it room.

use keel_array::{DeviceUsage, Runtime};
use serde_json::{Value, json};

use crate::report::human_bytes;

/// Bytes that the default limit leaves free: for the code of kernels and libraries, which comes onto the device as it is first
/// used, and for other programs.
pub const ROOM_BYTES: u64 = 512 << 20;

/// What the driver holds for this process: context, code of kernels, libraries. It is outside of the ledger and of the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Driver {
    usage: DeviceUsage,
    /// As [`DeviceUsage::driver_bytes`] has it.
    pub bytes: u64,
}

impl Driver {
    /// As of now; `None` where tensors lie in the host's memory.
    pub fn measure(runtime: &Runtime) -> Option<Driver> {
        runtime.device_usage().map(|(usage, bytes)| Driver { usage, bytes })
    }

    /// Bytes of tensors on the device that the default limit allows, asked before there are any.
    pub fn limit(&self) -> u64 {
        self.usage.free.saturating_sub(ROOM_BYTES)
    }

    /// What is in these bytes.
    pub fn what(&self) -> &'static str {
        match self.usage.others() {
            Some(_) => "context, code of kernels, libraries: measured, beside the plan",
            None => {
                "context, code of kernels, libraries, and all that other programs have: measured, beside the plan"
            }
        }
    }

    /// Bytes with a unit, and what they are.
    pub fn to_line(self) -> String {
        format!("{} ({})", human_bytes(self.bytes), self.what())
    }

    /// `bytes`, those of `others` (null where nothing tells; they are then among `bytes`), and what the device has.
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
