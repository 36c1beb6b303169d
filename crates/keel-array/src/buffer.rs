//! Memory with an owner in the ledger.

use std::sync::Arc;

use crate::backend::{Backend, DeviceMemory};
use crate::ledger::{Category, Charge, Ledger};
use crate::{ArrayError, Result};

struct BufferInner {
    memory: Box<dyn DeviceMemory>,
    charge: Charge,
}

/// Device memory with an owner in the ledger. Cloning shares it; the last handle gives the bytes back.
#[derive(Clone)]
pub struct Buffer(Arc<BufferInner>);

impl Buffer {
    /// Reserves in the ledger, then allocates.
    pub(crate) fn allocate(
        backend: &dyn Backend,
        ledger: &Ledger,
        category: Category,
        bytes: usize,
    ) -> Result<Buffer> {
        Buffer::charged(ledger, category, bytes, || match category {
            Category::Weights => backend.allocate_lasting(bytes),
            _ => backend.allocate(bytes),
        })
    }

    /// As [`Buffer::allocate`], for the arena of a stream.
    pub(crate) fn allocate_arena(backend: &dyn Backend, ledger: &Ledger, bytes: usize) -> Result<Buffer> {
        Buffer::charged(ledger, Category::Activations, bytes, || backend.allocate_arena(bytes))
    }

    fn charged(
        ledger: &Ledger,
        category: Category,
        bytes: usize,
        allocate: impl FnOnce() -> Result<Box<dyn DeviceMemory>, String>,
    ) -> Result<Buffer> {
        let charge = ledger.charge(category, bytes as u64)?;
        let refused = |reason| ArrayError::Allocation { category, requested: bytes as u64, reason };
        let memory = allocate().map_err(refused)?;
        Ok(Buffer(Arc::new(BufferInner { memory, charge })))
    }

    /// Grows the arena in place for all its handles; false if the backend cannot.
    pub(crate) fn grow_arena(&self, backend: &dyn Backend, ledger: &Ledger, bytes: usize) -> Result<bool> {
        let category = self.category();
        let more = ledger.charge(category, bytes.saturating_sub(self.bytes()) as u64)?;
        let refused = |reason| ArrayError::Allocation { category, requested: more.bytes(), reason };
        let grown = backend.grow_arena(self.memory(), bytes).map_err(refused)?;
        if grown {
            self.0.charge.absorb(more);
        }
        Ok(grown)
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.0.charge.bytes() as usize
    }

    /// The category it is charged to.
    pub fn category(&self) -> Category {
        self.0.charge.category()
    }

    /// The device's memory.
    pub fn memory(&self) -> &dyn DeviceMemory {
        &*self.0.memory
    }

    /// True if both are handles to the same memory.
    pub fn is_same(&self, other: &Buffer) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// A number that only the handles to this memory share, as long as there is one.
    pub(crate) fn address(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }

    /// Number of handles to this memory.
    pub(crate) fn handles(&self) -> usize {
        Arc::strong_count(&self.0)
    }
}

/// Host memory with an owner in the ledger, for data kept away from the device. Given back on drop.
pub struct HostBuffer {
    bytes: Box<[u8]>,
    charge: Charge,
}

impl HostBuffer {
    /// Reserves in the ledger, then allocates zeroed bytes; no bytes on a backend that only plans.
    pub(crate) fn allocate(
        backend: &dyn Backend,
        ledger: &Ledger,
        category: Category,
        bytes: usize,
    ) -> Result<HostBuffer> {
        let charge = ledger.charge(category, bytes as u64)?;
        let bytes = if backend.is_planning() { 0 } else { bytes };
        // The system zeroes memory at its first touch. `vec![0; bytes]` does the same, but aborts if there is no
        // memory.
        let bytes = bytemuck::try_zeroed_slice_box(bytes).map_err(|()| ArrayError::Allocation {
            category,
            requested: bytes as u64,
            reason: "the host has no memory left".into(),
        })?;
        Ok(HostBuffer { bytes, charge })
    }

    /// The category it is charged to.
    pub fn category(&self) -> Category {
        self.charge.category()
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The bytes, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

impl std::fmt::Debug for HostBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HostBuffer({} bytes, {})", self.bytes.len(), self.category())
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} bytes, {})", self.bytes(), self.category())
    }
}
