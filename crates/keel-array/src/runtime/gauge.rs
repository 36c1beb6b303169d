//! Reads a runtime's memory from outside.

use std::sync::{Arc, Weak};

use crate::backend::Backend;
use crate::ledger::Ledger;
use crate::usage::DeviceReading;

/// Reads the memory of a [`Runtime`](crate::Runtime) as long as there is one. It keeps neither the runtime nor its
/// arrays, so the ledger reads 0 as soon as their last handles are gone. Clones read the same.
#[derive(Clone)]
pub struct Gauge {
    backend: Weak<dyn Backend>,
    ledger: Ledger,
}

impl Gauge {
    pub(super) fn new(backend: &Arc<dyn Backend>, ledger: &Ledger) -> Gauge {
        Gauge { backend: Arc::downgrade(backend), ledger: ledger.clone() }
    }

    /// The account of the runtime's memory.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Memory of the device as its driver counts it, and the driver's own part of it. `None` if tensors lie in the
    /// host's memory, for a plan, and after the end of the runtime.
    pub fn device_usage(&self) -> Option<DeviceReading> {
        let backend = self.backend.upgrade()?;
        let usage = backend.device_usage()?;
        let driver_bytes = usage.driver_bytes(&self.ledger.active(), backend.own_memory().host_bytes);
        Some(DeviceReading { usage, driver_bytes })
    }
}
