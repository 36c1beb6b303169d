//! A device's memory as its driver counts it, next to the ledger's numbers.

use serde::{Deserialize, Serialize};

use crate::ledger::MemoryReport;

/// Memory of a device as its driver counts it, for all programs that use the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceUsage {
    /// Bytes of the device for all programs.
    pub total: u64,
    /// Bytes free now.
    pub free: u64,
    /// Bytes that were free before this process first used the device; `None` if unknown.
    pub free_before: Option<u64>,
}

impl DeviceUsage {
    /// Bytes that all programs have now.
    pub fn in_use(&self) -> u64 {
        self.total.saturating_sub(self.free)
    }

    /// Bytes that other programs had before this process first used the device; `None` if unknown.
    pub fn others(&self) -> Option<u64> {
        self.free_before.map(|free| self.total.saturating_sub(free))
    }

    /// The driver's own memory for this process: `in use - others - tensors`. Tensors are the bytes of `allocated` on
    /// the device: without [`MemoryReport::on_host`], and without `host_bytes` of the backend's own.
    ///
    /// Contains the context, the code of kernels used so far, memory of libraries, and the unused rest of each
    /// allocation's last granule. The driver has one account for a device, so this number also contains:
    /// - memory that other programs have taken since then, or all of theirs if [`DeviceUsage::others`] is unknown;
    /// - tensors of this process's other runtimes.
    pub fn driver_bytes(&self, allocated: &MemoryReport, host_bytes: u64) -> u64 {
        let tensors = (allocated.total() - allocated.on_host()).saturating_sub(host_bytes);
        self.in_use().saturating_sub(self.others().unwrap_or(0)).saturating_sub(tensors)
    }
}

/// A device's memory as [`Gauge::device_usage`](crate::Gauge::device_usage) reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceReading {
    /// The device's memory.
    pub usage: DeviceUsage,
    /// The value of [`DeviceUsage::driver_bytes`].
    pub driver_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::{Category, Ledger};

    #[test]
    fn the_driver_has_what_is_neither_tensors_nor_of_others() {
        let ledger = Ledger::default();
        let usage = DeviceUsage { total: 80_000, free: 60_000, free_before: Some(78_000) };
        assert_eq!((usage.in_use(), usage.others()), (20_000, Some(2_000)));
        assert_eq!(usage.driver_bytes(&ledger.active(), 0), 18_000, "nothing is allocated");

        let host = [(Category::Swap, 9_000), (Category::Features, 500)];
        let charges = [(Category::Weights, 15_000), (Category::Kv, 2_300), host[0], host[1]];
        let _held = charges.map(|(category, bytes)| ledger.charge(category, bytes).expect("no limit"));
        assert_eq!(
            usage.driver_bytes(&ledger.active(), 0),
            700,
            "parked sequences and features are in the host's memory"
        );
        let unknown = DeviceUsage { free_before: None, ..usage };
        assert_eq!((unknown.others(), unknown.driver_bytes(&ledger.active(), 0)), (None, 2_700));
    }

    #[test]
    fn what_others_give_back_meanwhile_is_not_below_nothing() {
        let usage = DeviceUsage { total: 80_000, free: 79_000, free_before: Some(70_000) };
        assert_eq!(usage.driver_bytes(&MemoryReport::default(), 0), 0);
    }
}
