//! What a device's driver says of its memory, beside what the ledger counts.

use crate::ledger::{Category, MemoryReport};

/// Memory of a device as its driver counts it. All programs that use the device share these numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceUsage {
    /// Bytes that the device has for programs.
    pub total: u64,
    /// Bytes that no program has now.
    pub free: u64,
    /// Bytes that no program had before this process first used the device; `None` where nothing tells.
    pub free_before: Option<u64>,
}

impl DeviceUsage {
    /// Bytes that all programs have now.
    pub fn in_use(&self) -> u64 {
        self.total.saturating_sub(self.free)
    }

    /// Bytes that other programs had before this process first used the device; `None` where nothing tells.
    pub fn others(&self) -> Option<u64> {
        self.free_before.map(|free| self.total.saturating_sub(free))
    }

    /// What the driver has taken for this process beside tensor memory: `in use - others - tensors`, tensors being those
    /// of `allocated` that lie on the device: not parked sequences, and not `host_bytes` of the backend's own.
    ///
    /// It is the context, the code of kernels that have been used so far, what libraries hold, and the rest of the last
    /// granule of each allocation. What other programs have taken since then counts, too, and all that they have where
    /// [`DeviceUsage::others`] is unknown, and the tensors of this process's other runtimes: to its driver one device is one
    /// account.
    pub fn driver_bytes(&self, allocated: &MemoryReport, host_bytes: u64) -> u64 {
        let tensors = (allocated.total() - allocated.get(Category::Swap)).saturating_sub(host_bytes);
        self.in_use().saturating_sub(self.others().unwrap_or(0)).saturating_sub(tensors)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Ledger;

    #[test]
    fn the_driver_has_what_is_neither_tensors_nor_of_others() {
        let ledger = Ledger::default();
        let usage = DeviceUsage { total: 80_000, free: 60_000, free_before: Some(78_000) };
        assert_eq!((usage.in_use(), usage.others()), (20_000, Some(2_000)));
        assert_eq!(usage.driver_bytes(&ledger.active(), 0), 18_000, "nothing is allocated");

        let charges = [(Category::Weights, 15_000), (Category::Kv, 2_300), (Category::Swap, 9_000)];
        let _held = charges.map(|(category, bytes)| ledger.charge(category, bytes).expect("no limit"));
        assert_eq!(usage.driver_bytes(&ledger.active(), 0), 700, "parked sequences are in the host's memory");
        let unknown = DeviceUsage { free_before: None, ..usage };
        assert_eq!((unknown.others(), unknown.driver_bytes(&ledger.active(), 0)), (None, 2_700));
    }

    #[test]
    fn what_others_give_back_meanwhile_is_not_below_nothing() {
        let usage = DeviceUsage { total: 80_000, free: 79_000, free_before: Some(70_000) };
        assert_eq!(usage.driver_bytes(&MemoryReport::default(), 0), 0);
    }
}
