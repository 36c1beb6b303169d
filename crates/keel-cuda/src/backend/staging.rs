//! Pinned memory that the host's writes pass through: a ring.

/// Bytes of pinned memory that the device may not have read yet lie between two counts, which only grow.
#[derive(Default)]
pub(super) struct Ring {
    /// Bytes handed out since the beginning.
    head: u64,
    /// Those of them that the device has read.
    tail: u64,
}

impl Ring {
    /// Where so many bytes can be put, in a ring of `size`; `None` until the device has read more. At most all of it.
    pub fn take(&mut self, bytes: usize, size: usize) -> Option<usize> {
        let (bytes, size) = (bytes.next_multiple_of(16) as u64, size as u64);
        let at = self.head % size;
        // What does not fit behind the others goes to the front.
        let skipped = if at + bytes > size { size - at } else { 0 };
        let head = self.head + skipped + bytes;
        if head - self.tail > size {
            return None;
        }
        self.head = head;
        Some(((head - bytes) % size) as usize)
    }

    /// What has been handed out so far.
    pub fn mark(&self) -> u64 {
        self.head
    }

    /// The device has read what was handed out before [`Ring::mark`] gave this.
    pub fn pass(&mut self, mark: u64) {
        self.tail = self.tail.max(mark);
    }

    /// The device has read everything.
    pub fn pass_all(&mut self, size: usize) {
        // From the front on, where there is room for anything.
        self.head = self.head.next_multiple_of(size as u64);
        self.tail = self.head;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_handed_out_again_only_behind_the_device() {
        let mut ring = Ring::default();
        assert_eq!([ring.take(20, 96), ring.take(32, 96)], [Some(0), Some(32)]);
        let first = ring.mark();
        assert_eq!([ring.take(16, 96), ring.take(32, 96)], [Some(64), None], "16 are left");
        ring.pass(first);
        assert_eq!(ring.take(32, 96), Some(0), "in front, where they lie together");
        assert_eq!([ring.take(33, 96), ring.take(32, 96)], [None, Some(32)]);
        assert_eq!(ring.take(1, 96), None);
        ring.pass_all(96);
        ring.pass(first);
        assert_eq!([ring.take(96, 96), ring.take(1, 96)], [Some(0), None]);
    }
}
