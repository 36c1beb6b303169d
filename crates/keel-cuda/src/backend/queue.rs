//! Launches that the host has not waited for.
//!
//! Each has a slot of pinned memory, where its kernels report what is wrong and its result arrives, and an event behind it.
//! Slot 0 is that of the launches that are waited for at once.

use crate::driver::{Device, Event, PinnedBuffer};
use crate::error::Result;
use keel_array::{ArrayError, LAUNCHES_MAX, RESULT_BYTES_MAX};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// `Wrong` of `common.cuh`.
pub(super) const WRONG_BYTES: usize = 16;

const SLOT_BYTES: usize = WRONG_BYTES + RESULT_BYTES_MAX;

/// The slot of launches that are waited for at once.
pub(super) const WAITED: usize = 0;

/// A launch under way.
pub(super) struct Entry {
    number: u64,
    pub slot: usize,
    /// What had been staged for it and for those before it.
    pub staged: u64,
}

pub(super) struct Queue {
    slots: PinnedBuffer,
    /// Of the slots but the first.
    events: Vec<Event>,
    /// The first first.
    entries: VecDeque<Entry>,
    next: u64,
}

impl Queue {
    pub fn new(device: &Arc<Device>) -> Result<Queue> {
        Ok(Queue {
            slots: PinnedBuffer::new(device, (1 + LAUNCHES_MAX) * SLOT_BYTES)?,
            events: (0..LAUNCHES_MAX).map(|_| Event::new(device)).collect::<Result<_>>()?,
            entries: VecDeque::with_capacity(LAUNCHES_MAX),
            next: 0,
        })
    }

    /// The slot of the next launch.
    ///
    /// # Errors
    /// If as many are under way as may.
    pub fn next_slot(&self) -> Result<usize, ArrayError> {
        if self.entries.len() == LAUNCHES_MAX {
            let reason = format!("{LAUNCHES_MAX} launches are under way; wait for one first");
            return Err(ArrayError::Argument { op: "launch", reason });
        }
        Ok(1 + (self.next % LAUNCHES_MAX as u64) as usize)
    }

    /// Notes that a launch is on the stream, whole, and puts its event there. Returns its number.
    pub fn push(&mut self, staged: u64) -> Result<u64, ArrayError> {
        let slot = self.next_slot()?;
        self.events[slot - 1].record().map_err(|e| e.in_op("launch"))?;
        let number = self.next;
        self.entries.push_back(Entry { number, slot, staged });
        self.next += 1;
        Ok(number)
    }

    /// Waits for the first launch, which has this number.
    ///
    /// # Panics
    /// If it has another: launches are waited for in their order.
    pub fn wait(&mut self, number: u64) -> (Entry, Result<()>) {
        let entry = self.entries.pop_front().filter(|entry| entry.number == number);
        let entry = entry.unwrap_or_else(|| panic!("launch {number} is not the first of those under way"));
        let outcome = self.events[entry.slot - 1].wait();
        (entry, outcome)
    }

    /// Address of a slot: of what its kernels report, and behind it of its result.
    pub fn address(&self, slot: usize) -> u64 {
        self.slots.address() as u64 + (slot * SLOT_BYTES) as u64
    }

    /// What the kernels of a slot's launch, which has ended, have reported.
    pub fn wrong(&mut self, slot: usize) -> &mut [u8] {
        self.slots.bytes(slot * SLOT_BYTES..slot * SLOT_BYTES + WRONG_BYTES)
    }

    /// Address of the result in a slot.
    pub fn result_address(&self, slot: usize) -> u64 {
        self.address(slot) + WRONG_BYTES as u64
    }

    /// The result of a slot's launch, which has ended.
    pub fn result(&mut self, slot: usize, bytes: Range<usize>) -> &[u8] {
        let start = slot * SLOT_BYTES + WRONG_BYTES;
        self.slots.bytes(start + bytes.start..start + bytes.end)
    }
}
