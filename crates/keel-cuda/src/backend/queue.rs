//! Launches that the host has not waited for.
//!
//! Each has a slot of pinned memory and an event. Its kernels report wrong data to the slot, and its result arrives
//! there. The event follows the launch on the stream. Slot 0 belongs to launches that are waited for at once.

use super::fault::WRONG_BYTES;
use crate::driver::{Device, Event, PinnedBuffer};
use crate::error::Result;
use keel_array::{ArrayError, LAUNCHES_MAX, RESULT_BYTES_MAX};
use std::ops::Range;
use std::sync::Arc;

const SLOT_BYTES: usize = WRONG_BYTES + RESULT_BYTES_MAX;

/// The slot of launches that are waited for at once.
pub(super) const WAITED: usize = 0;

/// A launch under way.
#[derive(Clone, Copy)]
pub(super) struct InFlightLaunch {
    number: u64,
    pub slot: usize,
    /// Number of the header with which its kernels report.
    pub header: u32,
    /// Bytes staged for it and for all launches before it.
    pub staged: u64,
}

/// The launches under way, each with a slot.
#[derive(Default)]
struct InFlightLaunches {
    /// In the order of their launch.
    in_flight: Vec<InFlightLaunch>,
    next: u64,
}

impl InFlightLaunches {
    /// A slot that no launch under way uses.
    fn free_slot(&self) -> Option<usize> {
        (WAITED + 1..=LAUNCHES_MAX).find(|&slot| self.in_flight.iter().all(|launch| launch.slot != slot))
    }

    /// Gives a free slot to a launch. Returns the number of the launch.
    fn take(&mut self, slot: usize, header: u32, staged: u64) -> u64 {
        let number = self.next;
        self.in_flight.push(InFlightLaunch { number, slot, header, staged });
        self.next += 1;
        number
    }

    /// Frees the slot of a launch.
    ///
    /// # Panics
    /// If no such launch is under way: each one is waited for once.
    fn give_back(&mut self, number: u64) -> InFlightLaunch {
        let at = self.in_flight.iter().position(|launch| launch.number == number);
        let at = at.unwrap_or_else(|| panic!("launch {number} is not under way"));
        self.in_flight.remove(at)
    }
}

pub(super) struct Queue {
    memory: PinnedBuffer,
    /// Events of all slots except the first.
    events: Vec<Event>,
    launches: InFlightLaunches,
}

impl Queue {
    pub fn new(device: &Arc<Device>) -> Result<Queue> {
        Ok(Queue {
            memory: PinnedBuffer::new(device, (1 + LAUNCHES_MAX) * SLOT_BYTES)?,
            events: (0..LAUNCHES_MAX).map(|_| Event::new(device)).collect::<Result<_>>()?,
            launches: InFlightLaunches::default(),
        })
    }

    /// The slot of the next launch.
    ///
    /// # Errors
    /// If the largest allowed number of launches is under way.
    pub fn next_slot(&self) -> Result<usize, ArrayError> {
        self.launches.free_slot().ok_or_else(|| {
            let reason = format!("{LAUNCHES_MAX} launches are under way; wait for one first");
            ArrayError::Argument { op: "launch", reason }
        })
    }

    /// Notes that all of the launch with the [next slot](Queue::next_slot) is on the stream, and records its event
    /// there. Returns its number.
    pub fn push(&mut self, slot: usize, header: u32, staged: u64) -> Result<u64, ArrayError> {
        self.events[slot - 1].record().map_err(|e| e.in_op("launch"))?;
        Ok(self.launches.take(slot, header, staged))
    }

    /// Waits for the launch with this number, and therefore for those before it on the stream. Their slots keep their
    /// contents until they are waited for as well: a run of many pieces waits for its own first pieces while the last
    /// pieces of the run before it are still unread.
    pub fn wait(&mut self, number: u64) -> (InFlightLaunch, Result<()>) {
        let launch = self.launches.give_back(number);
        let outcome = self.events[launch.slot - 1].wait();
        (launch, outcome)
    }

    /// Address of a slot: of its kernels' report, which its result follows.
    pub fn address(&self, slot: usize) -> u64 {
        self.memory.address() as u64 + (slot * SLOT_BYTES) as u64
    }

    /// The report of the kernels of a slot's launch, which has ended.
    pub fn report(&mut self, slot: usize) -> &mut [u8] {
        self.memory.bytes(slot * SLOT_BYTES..slot * SLOT_BYTES + WRONG_BYTES)
    }

    /// Clears the reports of all slots. The stream is empty.
    pub fn forget_reports(&mut self) {
        (WAITED..=LAUNCHES_MAX).for_each(|slot| self.report(slot).fill(0));
    }

    /// Address of the result in a slot.
    pub fn result_address(&self, slot: usize) -> u64 {
        self.address(slot) + WRONG_BYTES as u64
    }

    /// The result of a slot's launch, which has ended.
    pub fn result(&mut self, slot: usize, bytes: Range<usize>) -> &[u8] {
        let start = slot * SLOT_BYTES + WRONG_BYTES;
        self.memory.bytes(start + bytes.start..start + bytes.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launch_may_be_waited_for_before_earlier_ones() {
        let mut launches = InFlightLaunches::default();
        let take = |launches: &mut InFlightLaunches| {
            let slot = launches.free_slot().expect("a free slot");
            (launches.take(slot, 0, 0), slot)
        };
        // Two runs, each with half of the slots: the second has more pieces and waits for its own.
        let first: Vec<_> = (0..LAUNCHES_MAX / 2).map(|_| take(&mut launches)).collect();
        let mut second: Vec<_> = (0..LAUNCHES_MAX / 2).map(|_| take(&mut launches)).collect();
        assert_eq!(launches.free_slot(), None);
        for piece in 0..20 {
            let (number, slot) = second.remove(0);
            assert_eq!(launches.give_back(number).slot, slot);
            second.push(take(&mut launches));
            assert_eq!(second.last().map(|&(_, slot)| slot), Some(slot), "piece {piece}: the one free slot");
        }
        for (number, slot) in first.into_iter().chain(second) {
            assert_eq!(launches.give_back(number).slot, slot, "no other launch had it in between");
        }
        assert!(launches.in_flight.is_empty());
    }

    #[test]
    #[should_panic(expected = "launch 0 is not under way")]
    fn a_launch_is_waited_for_once() {
        let mut launches = InFlightLaunches::default();
        let number = launches.take(1, 0, 0);
        launches.give_back(number);
        launches.give_back(number);
    }
}
