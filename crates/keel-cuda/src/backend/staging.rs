//! A ring of pinned memory that the host's writes pass through.

/// The pinned bytes between `tail` and `head` may be unread by the device. All counts only grow.
///
/// ```text
/// tail ──── on their way ──── put ──── waiting for a delivery ──── head
/// ```
#[derive(Default)]
pub(super) struct Ring {
    /// Bytes handed out since the beginning.
    head: u64,
    /// How many of them have their readers on the stream.
    put: u64,
    /// How many of them the device has read.
    tail: u64,
}

impl Ring {
    /// Where `bytes` bytes, at most `size`, can be put in a ring of `size`; `None` until the device has read more.
    pub fn take(&mut self, bytes: usize, size: usize) -> Option<usize> {
        let (bytes, size) = (bytes.next_multiple_of(16) as u64, size as u64);
        let at = self.head % size;
        // Bytes that do not fit after the others go to the front.
        let skipped = if at + bytes > size { size - at } else { 0 };
        let head = self.head + skipped + bytes;
        if head - self.tail > size {
            return None;
        }
        self.head = head;
        Some(((head - bytes) % size) as usize)
    }

    /// The bytes handed out so far.
    pub fn mark(&self) -> u64 {
        self.head
    }

    /// Notes that the readers of everything handed out so far are on the stream.
    pub fn put_all(&mut self) {
        self.put = self.head;
    }

    /// Notes that the device has read everything that was handed out before [`Ring::mark`] returned `mark`.
    pub fn pass(&mut self, mark: u64) {
        self.tail = self.tail.max(mark);
    }

    /// Notes that the stream is empty: the device has read everything except bytes that wait for a delivery.
    pub fn pass_put(&mut self, size: usize) {
        if self.put == self.head {
            // Continues at the front, where there is room for anything.
            self.head = self.head.next_multiple_of(size as u64);
            self.put = self.head;
        }
        self.tail = self.tail.max(self.put);
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
        ring.put_all();
        ring.pass_put(96);
        ring.pass(first);
        assert_eq!([ring.take(96, 96), ring.take(1, 96)], [Some(0), None]);
    }

    /// A device may end its exchanges, which empties its stream, between a write of the host and its delivery.
    #[test]
    fn bytes_that_wait_for_a_delivery_stay_when_the_stream_is_empty() {
        let mut ring = Ring::default();
        assert_eq!(ring.take(32, 96), Some(0));
        ring.put_all();
        assert_eq!(ring.take(32, 96), Some(32), "a write that waits");
        ring.pass_put(96);
        ring.pass_put(96);
        assert_eq!([ring.take(32, 96), ring.take(32, 96), ring.take(1, 96)], [Some(64), Some(0), None]);
        ring.put_all();
        ring.pass_put(96);
        assert_eq!(ring.take(96, 96), Some(0), "they are delivered");
    }
}
