//! Results that come to the host with their launch.
//!
//! The first small read of the host after a launch is expected after every launch of the program: a step's tokens. From
//! then on these bytes are copied after the kernels, and the wait for the launch is the only one.

use std::ops::Range;

/// Bytes of such a read at most.
const BYTES_MAX: u64 = 4096;

/// The bytes of the device's memory that the host holds after the last launch.
#[derive(Default)]
pub(super) struct ReadAhead {
    /// Addresses whose bytes came with the launch and have not been written since.
    arrived: Range<u64>,
    /// Whether none of them has been read since.
    is_unread: bool,
}

impl ReadAhead {
    /// Memory was written or allocated.
    pub fn forget(&mut self) {
        *self = ReadAhead::default();
    }

    /// Notes that a launch of a prepared program is done, and that these bytes came with it.
    pub fn launched(&mut self, arrived: Range<u64>) {
        *self = ReadAhead { arrived, is_unread: true };
    }

    /// Where the bytes to read lie among those that came.
    pub fn find(&mut self, read: &Range<u64>) -> Option<usize> {
        let came = self.arrived.start <= read.start && read.end <= self.arrived.end;
        self.is_unread &= !came;
        came.then(|| (read.start - self.arrived.start) as usize)
    }

    /// Whether these bytes should come with the next launch of the program.
    pub fn is_worth_it(&self, read: &Range<u64>, outputs: &[Range<u64>]) -> bool {
        let is_output = outputs.iter().any(|output| output.start <= read.start && read.end <= output.end);
        self.is_unread && is_output && (1..=BYTES_MAX).contains(&(read.end - read.start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_first_comes_with_the_next_launch() {
        let outputs = [1000..1016, 2000..9000];
        let mut ahead = ReadAhead::default();
        assert!(!ahead.is_worth_it(&(1000..1004), &outputs), "nothing was launched");
        ahead.launched(0..0);
        assert_eq!(ahead.find(&(1004..1008)), None);
        assert!(ahead.is_worth_it(&(1004..1008), &outputs));
        assert!(!ahead.is_worth_it(&(1014..1018), &outputs), "not within an output");
        assert!(!ahead.is_worth_it(&(2000..6097), &outputs), "too large");
        ahead.launched(1004..1012);
        assert_eq!((ahead.find(&(1008..1012)), ahead.find(&(1004..1012))), (Some(4), Some(0)));
        assert_eq!((ahead.find(&(1000..1008)), ahead.find(&(1008..1016))), (None, None));
        assert!(!ahead.is_worth_it(&(1000..1004), &outputs), "it is not the first read");
        ahead.forget();
        assert_eq!(ahead.find(&(1008..1012)), None);
    }
}
