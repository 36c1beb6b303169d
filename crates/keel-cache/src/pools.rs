//! Free pages, slots and checkpoints, and their way back.
//!
//! The cache, its sequences and leases share the pools. A sequence or a lease gives back its pages, slot, checkpoint or
//! blocks when it is dropped, wherever that happens: after an error, in the middle of an iteration, in a panic.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{CheckpointId, FailedStepState, HostBlockId, PageAllocator, PageId, SequenceCache, SlotId};

/// Free pages, slots, checkpoints and blocks of host memory.
#[derive(Debug)]
pub(crate) struct Pools {
    pub pages: PageAllocator,
    pub sliding_pages: PageAllocator,
    pub slots: Vec<SlotId>,
    pub checkpoints: Vec<CheckpointId>,
    pub blocks: Vec<HostBlockId>,
    /// By slot: how a failed step left it. It is cleared when the slot is taken: when a sequence gives its slot back, a
    /// step of it may still be under way.
    pub failed_steps: Vec<Option<FailedStepState>>,
}

/// The pools, shared by the cache, its sequences and leases.
#[derive(Clone, Debug)]
pub(crate) struct SharedPools(Arc<Mutex<Pools>>);

impl SharedPools {
    pub fn new(pools: Pools) -> SharedPools {
        SharedPools(Arc::new(Mutex::new(pools)))
    }

    /// Whether both are handles to the same pools.
    pub fn is_same(&self, other: &SharedPools) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The pools. Every change is complete before the guard is dropped, so a panic of another holder does no harm.
    pub fn lock(&self) -> MutexGuard<'_, Pools> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A free checkpoint; `None` if there is none.
    pub fn take_checkpoint(&self) -> Option<CheckpointLease> {
        let id = self.lock().checkpoints.pop()?;
        Some(CheckpointLease { id, home: self.clone() })
    }

    /// Holds a page for a block of a prefix tree.
    pub fn remember(&self, page: PageId) -> PageLease {
        self.lock().pages.remember(page);
        PageLease { id: page, home: self.clone() }
    }

    /// Takes back everything that a sequence holds on the device.
    pub fn take_from(&self, sequence: &mut SequenceCache) {
        // Each lease locks the pools.
        sequence.checkpoints.clear();
        let mut pools = self.lock();
        sequence.pages.drain(..).for_each(|page| pools.pages.release(page));
        sequence.sliding_pages.drain(..).for_each(|page| pools.sliding_pages.release(page));
        pools.slots.extend(sequence.slot.take());
    }
}

/// Holds a checkpoint, which is free again when the lease is dropped.
#[derive(Debug)]
pub struct CheckpointLease {
    id: CheckpointId,
    home: SharedPools,
}

impl CheckpointLease {
    /// The checkpoint.
    pub fn id(&self) -> CheckpointId {
        self.id
    }
}

impl Drop for CheckpointLease {
    fn drop(&mut self) {
        self.home.lock().checkpoints.push(self.id);
    }
}

/// Holds a page for a block of a prefix tree, until the lease is dropped.
#[derive(Debug)]
pub(crate) struct PageLease {
    id: PageId,
    home: SharedPools,
}

impl PageLease {
    /// The page.
    pub fn id(&self) -> PageId {
        self.id
    }
}

impl Drop for PageLease {
    fn drop(&mut self) {
        self.home.lock().pages.forget(self.id);
    }
}

impl Drop for SequenceCache {
    fn drop(&mut self) {
        let home = self.home.clone();
        home.take_from(self);
        home.lock().blocks.extend(self.parked.take().into_iter().flatten());
    }
}
