//! Reports of wrong data: the header that the device holds for the kernels of a launch, and the report that the host
//! finds in a slot of the queue after it.
//!
//! The device has one header, `Fault` of `common.cuh`, at an address that graphs keep. It names the slot, and the first
//! kernel that finds wrong data takes it. Each launch needs a header that is not taken, so the host posts one with the
//! launch's small writes, after the kernels before it. A report repeats the header's number. So the report that a
//! launch refused half-way has left in the slot is not taken for that of the next launch there.

/// `Wrong` of `common.cuh`, padded so that results that follow it are aligned.
pub(super) const WRONG_BYTES: usize = 32;

/// `Fault` of `common.cuh`.
pub(super) const FAULT_BYTES: usize = 16;

/// The header that the host has posted last.
#[derive(Default)]
pub(super) struct Header {
    /// Grows with each header. No header has the number 0.
    number: u32,
    /// Its slot, if the device still holds it as it was posted: its last launch has ended and has reported nothing.
    /// `None` while that is not known.
    unused: Option<usize>,
}

impl Header {
    /// Makes the next launch report to `slot`. Returns true if the header is a new one, which has to be posted.
    pub fn turn_to(&mut self, slot: usize) -> bool {
        let is_new = self.unused.take() != Some(slot);
        if is_new {
            self.number = self.number.checked_add(1).unwrap_or(1);
        }
        is_new
    }

    /// The number of the launch's header.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Notes that a launch that reports to `slot` with the header `number` has ended without a report.
    pub fn note_right(&mut self, slot: usize, number: u32) {
        if self.number == number {
            self.unused = Some(slot);
        }
    }

    /// The header's bytes on the device, for a slot at this address.
    pub fn bytes(&self, slot: u64) -> [u8; FAULT_BYTES] {
        let is_taken = 0u32;
        let mut bytes = [0; FAULT_BYTES];
        bytes[..4].copy_from_slice(&is_taken.to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.number.to_ne_bytes());
        bytes[8..].copy_from_slice(&slot.to_ne_bytes());
        bytes
    }
}

/// The first wrong value that a launch has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wrong {
    /// Number of the kernel within the launch.
    pub kernel: usize,
    pub what: u32,
    pub number: u32,
    pub bound: u32,
}

impl Wrong {
    /// The report in a slot, if it is one of a launch with this header.
    pub fn of(slot: &[u8], header: u32) -> Option<Wrong> {
        let mut words = slot.as_chunks::<4>().0.iter().map(|word| u32::from_ne_bytes(*word));
        let [of, kernel, what, number, bound] = std::array::from_fn(|_| words.next().unwrap_or_default());
        (of == header).then_some(Wrong { kernel: kernel as usize, what, number, bound })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agreement::assert_values;
    use crate::kernels::{BATCH, KernelKey};

    #[test]
    fn the_device_has_the_same_reports() {
        let key = KernelKey::new(BATCH, "check_batch");
        let padded = ("(sizeof(Wrong) + 15) / 16 * 16", WRONG_BYTES);
        assert_values(key, &[padded, ("sizeof(Fault)", FAULT_BYTES)]);
    }

    /// A device with three slots, whose launches run in order.
    #[derive(Default)]
    struct Device {
        header: Header,
        fault: [u8; FAULT_BYTES],
        slots: [[u8; WRONG_BYTES]; 3],
    }

    impl Device {
        /// Runs a launch whose kernels find these wrong values. Returns the number of its header.
        fn run(&mut self, slot: usize, wrong: &[Wrong]) -> u32 {
            if self.header.turn_to(slot) {
                self.fault = self.header.bytes(slot as u64);
            }
            wrong.iter().for_each(|wrong| self.report(*wrong));
            self.header.number()
        }

        /// As `report` of `common.cuh`.
        fn report(&mut self, wrong: Wrong) {
            let [taken, header, slot, _] = [0, 4, 8, 12]
                .map(|at| u32::from_ne_bytes(self.fault[at..at + 4].try_into().expect("4 bytes")));
            if taken != 0 {
                return;
            }
            self.fault[..4].copy_from_slice(&1u32.to_ne_bytes());
            let words = [header, wrong.kernel as u32, wrong.what, wrong.number, wrong.bound];
            let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_ne_bytes).collect();
            self.slots[slot as usize][..bytes.len()].copy_from_slice(&bytes);
        }

        fn wait(&mut self, slot: usize, header: u32) -> Option<Wrong> {
            let wrong = Wrong::of(&self.slots[slot], header);
            if wrong.is_none() {
                self.header.note_right(slot, header);
            }
            wrong
        }
    }

    fn wrong(kernel: usize) -> Wrong {
        Wrong { kernel, what: 3, number: 40 + kernel as u32, bound: 8 }
    }

    #[test]
    fn each_launch_under_way_has_its_own_report() {
        let mut device = Device::default();
        for round in 0..3 {
            let first = device.run(1, &[wrong(4), wrong(5)]);
            let second = device.run(2, &[wrong(0)]);
            assert_eq!(device.wait(1, first), Some(wrong(4)), "round {round}: the first of two");
            let third = device.run(1, &[]);
            assert_eq!(device.wait(2, second), Some(wrong(0)), "round {round}");
            let fourth = device.run(2, &[wrong(7)]);
            assert_eq!(device.wait(2, fourth), Some(wrong(7)), "round {round}: waited for out of order");
            assert_eq!(device.wait(1, third), None, "round {round}: none the worse");
        }
    }

    #[test]
    fn a_launch_after_a_right_one_in_its_slot_needs_no_new_header() {
        let mut device = Device::default();
        let first = device.run(1, &[]);
        assert_eq!(device.wait(1, first), None);
        let second = device.run(1, &[wrong(2)]);
        assert_eq!(second, first, "nothing was posted");
        assert_eq!(device.wait(1, second), Some(wrong(2)));
        let third = device.run(1, &[]);
        assert_ne!(third, second, "the old one is taken");
        let fourth = device.run(2, &[wrong(1)]);
        assert_eq!((device.wait(1, third), device.wait(2, fourth)), (None, Some(wrong(1))));
        // An earlier launch that was right says nothing about the header that the device holds now.
        let fifth = device.run(1, &[wrong(6)]);
        device.header.note_right(2, fourth);
        let sixth = device.run(2, &[wrong(3)]);
        assert_eq!((device.wait(2, sixth), device.wait(1, fifth)), (Some(wrong(3)), Some(wrong(6))));
    }

    #[test]
    fn what_a_refused_launch_has_reported_belongs_to_no_other() {
        let mut device = Device::default();
        // Its kernels report, and it is not waited for.
        device.run(1, &[wrong(3)]);
        let next = device.run(1, &[]);
        assert_eq!(device.wait(1, next), None);
        let wrong_too = device.run(1, &[wrong(9)]);
        assert_eq!(device.wait(1, wrong_too), Some(wrong(9)));
    }

    #[test]
    fn headers_are_counted_without_zero() {
        let mut header = Header { number: u32::MAX, unused: None };
        assert!(header.turn_to(1));
        assert_eq!(header.number(), 1);
    }
}
