//! A slice that several workers of a pool write at once, each its own part.

use std::marker::PhantomData;
use std::ops::Range;

/// A copyable handle over a mutable slice, through which the workers of a pool write disjoint ranges.
///
/// ```
/// use keel_cpu::{pool::ThreadPool, shared_slice::SharedMut};
/// let mut out = vec![0; 100];
/// let shared = SharedMut::new(&mut out);
/// ThreadPool::new(2).run(|worker| {
///     for piece in worker.claim(shared.len(), 8) {
///         // SAFETY: `claim` hands out each piece once.
///         unsafe { shared.range(piece) }.fill(7);
///     }
/// });
/// assert!(out.iter().all(|&x| x == 7));
/// ```
pub struct SharedMut<'a, T> {
    ptr: *mut T,
    len: usize,
    _borrow: PhantomData<&'a mut [T]>,
}

impl<T> Clone for SharedMut<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for SharedMut<'_, T> {}

// SAFETY: the handle is a mutable borrow of a slice of T in parts. Sending parts of it to other threads is sound where
// sending the slice is.
unsafe impl<T: Send> Send for SharedMut<'_, T> {}
// SAFETY: a shared handle gives access only through `range`, whose callers promise that no two ranges overlap.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    /// A handle over the whole of `slice`, which stays borrowed while any copy of the handle lives.
    pub fn new(slice: &'a mut [T]) -> SharedMut<'a, T> {
        SharedMut { ptr: slice.as_mut_ptr(), len: slice.len(), _borrow: PhantomData }
    }

    /// A handle over `len` values at `ptr`.
    ///
    /// # Safety
    /// The same as for [`std::slice::from_raw_parts_mut`], for the whole of `'a`, except that parts may be lent to
    /// several threads at once.
    pub unsafe fn from_raw(ptr: *mut T, len: usize) -> SharedMut<'a, T> {
        SharedMut { ptr, len, _borrow: PhantomData }
    }

    /// Number of values.
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether there are no values.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Where the values begin.
    pub fn as_ptr(self) -> *mut T {
        self.ptr
    }

    /// A handle over only the values at `range`.
    ///
    /// # Panics
    /// If `range` does not lie within the slice.
    pub fn part(self, range: Range<usize>) -> SharedMut<'a, T> {
        self.check(&range);
        SharedMut { ptr: self.ptr.wrapping_add(range.start), len: range.len(), _borrow: PhantomData }
    }

    #[inline(always)]
    fn check(self, range: &Range<usize>) {
        if range.start > range.end || range.end > self.len {
            outside(range.start, range.end, self.len);
        }
    }

    /// The values at `range`, to write.
    ///
    /// # Safety
    /// While the result lives, no other reference to any of these values may be used: ranges lent at the same time must
    /// not overlap.
    ///
    /// # Panics
    /// If `range` does not lie within the slice.
    #[inline(always)]
    pub unsafe fn range(self, range: Range<usize>) -> &'a mut [T] {
        self.check(&range);
        // SAFETY: in bounds as asserted; the caller promises that no other worker uses these values.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(range.start), range.end - range.start) }
    }
}

/// Out of line, with numbers as arguments: a message formatted in place needs its values in memory, which would cost a
/// hot loop several stores a round.
#[cold]
#[inline(never)]
fn outside(start: usize, end: usize, len: usize) -> ! {
    panic!("range {start}..{end} of a shared slice of {len} values")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disjoint_ranges_are_written_through_copies_of_one_handle() {
        let mut values = [0u32; 5];
        let shared = SharedMut::new(&mut values);
        let copy = shared;
        // SAFETY: 0..2 and 2..5 do not overlap.
        let (low, high) = unsafe { (shared.range(0..2), copy.range(2..5)) };
        low.fill(1);
        high.fill(2);
        assert_eq!(values, [1, 1, 2, 2, 2]);
    }

    #[test]
    #[should_panic(expected = "range 3..6 of a shared slice of 5 values")]
    fn a_range_past_the_end_panics() {
        let mut values = [0u32; 5];
        // SAFETY: no other range is lent.
        unsafe { SharedMut::new(&mut values).range(3..6) };
    }
}
