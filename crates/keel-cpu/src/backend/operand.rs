//! Operands of a kernel as pointers, and the views of them that kernels take.

use super::memory::HostMemory;
use crate::kernels::generic::scalar::Plain;
use crate::kernels::generic::strided::Strided;
use crate::kernels::rows::{Rows, RowsMut};
use crate::shared_slice::SharedMut;
use keel_array::{DType, Launch, Layout, Operand, Place};
use std::marker::PhantomData;

/// An operand with its memory.
///
/// The methods lend the memory without a lock. That is sound because of the promise to [`Bound::new`]: between two
/// barriers a kernel writes its outputs and state through [`SharedMut`], and nothing else touches these.
#[derive(Clone, Copy)]
pub(super) struct Bound<'a> {
    /// First byte of the whole buffer.
    memory: *mut u8,
    /// Bytes of the whole buffer.
    bytes: usize,
    /// Position of the layout's first element in the buffer, in elements.
    first: usize,
    pub layout: &'a Layout,
    pub dtype: DType,
    _memory: PhantomData<&'a HostMemory>,
}

// SAFETY: a pointer into memory that outlives `'a`; its uses are ordered by the barriers of a launch.
unsafe impl Send for Bound<'_> {}
// SAFETY: as above.
unsafe impl Sync for Bound<'_> {}

impl<'a> Bound<'a> {
    /// Binds an operand to its memory.
    ///
    /// # Safety
    /// During `'a`, nothing outside the launch may touch the memory, and inside it only one kernel at a time. The
    /// kernel's outputs and state share no byte with any other operand of it. The exception is an element-wise kernel
    /// or a block replacement whose output lies exactly where an input does.
    ///
    /// # Panics
    /// If the operand does not lie within its memory.
    pub unsafe fn new(launch: &Launch<'a>, operand: &'a Operand) -> Bound<'a> {
        let Place { buffer, offset: start } = launch.resolve(operand.memory);
        let memory = HostMemory::of(buffer.memory());
        let size = operand.dtype.size();
        let end = start + operand.layout.end() * size;
        assert!(
            start.is_multiple_of(size) && end <= memory.bytes(),
            "an operand {} {} from byte {start} does not lie within {} bytes",
            operand.dtype,
            operand.layout.shape,
            memory.bytes()
        );
        Bound {
            memory: memory.start(),
            bytes: memory.bytes(),
            first: start / size + operand.layout.offset,
            layout: &operand.layout,
            dtype: operand.dtype,
            _memory: PhantomData,
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.layout.shape.elements()
    }

    /// Last extent; 1 for a scalar.
    pub fn width(&self) -> usize {
        self.layout.shape.last().copied().unwrap_or(1)
    }

    fn at<T: Plain>(&self, element: usize) -> *mut T {
        assert_eq!(size_of::<T>(), self.dtype.size(), "an operand of {} read as another type", self.dtype);
        // SAFETY: `new` has checked that the elements of the layout lie within the memory.
        unsafe { self.memory.cast::<T>().add(element) }
    }

    fn expect_contiguous(&self) {
        assert!(self.layout.is_contiguous(), "the program copies operands that must be contiguous");
    }

    /// The elements, row-major.
    pub fn values<T: Plain>(&self) -> &'a [T] {
        self.expect_contiguous();
        // SAFETY: readable for 'a, and not written meanwhile, by the promise to `new`.
        unsafe { std::slice::from_raw_parts(self.at(self.first), self.len()) }
    }

    /// The elements, row-major, for workers to write.
    pub fn shared<T: Plain>(&self) -> SharedMut<'a, T> {
        self.expect_contiguous();
        // SAFETY: writable for 'a, and not otherwise used meanwhile, by the promise to `new`.
        unsafe { SharedMut::from_raw(self.at(self.first), self.len()) }
    }

    /// The elements in any layout.
    pub fn strided<T: Plain>(&self) -> Strided<'a, T> {
        // SAFETY: readable for 'a. A kernel whose output may be this memory writes only elements that it has read.
        unsafe { Strided::new(self.at(self.first), self.layout) }
    }

    /// Rows whose values are the last `inner` axes; the other axes count rows.
    pub fn rows(&self, inner: usize) -> Rows<'a> {
        let (width, stride) = self.row_extent(inner);
        if self.len() == 0 || self.layout.is_contiguous() {
            return Rows::whole(self.values(), width);
        }
        // This is a column range of a wider array, and `Rows` takes whole rows of it. The range's first column is not
        // known. So rows begin as far before the first element as the gap allows, and the last one ends as early as it
        // can.
        let before = self.first.min(stride - width);
        let (start, len) = (self.first - before, self.len() / width * stride);
        assert!((start + len) * self.dtype.size() <= self.bytes, "rows of {stride} past the end of a buffer");
        // SAFETY: within the buffer. The elements of other columns may be written meanwhile, but `Rows` reads no column
        // outside the range.
        let data = unsafe { std::slice::from_raw_parts(self.at(start), len) };
        Rows::new(data, stride, before..before + width)
    }

    /// Rows to write, whose values are the last `inner` axes.
    pub fn rows_mut(&self, inner: usize) -> RowsMut<'a> {
        RowsMut::whole(self.shared(), self.row_extent(inner).0)
    }

    /// Values of a row, at least 1, and the distance between rows.
    fn row_extent(&self, inner: usize) -> (usize, usize) {
        let shape = &self.layout.shape;
        let width = shape[shape.rank().saturating_sub(inner)..].iter().product::<usize>().max(1);
        let stride = self.layout.row_stride(inner.min(shape.rank())).expect("the program copies uneven rows");
        (width, stride)
    }

    /// True if they share memory.
    pub fn overlaps(&self, other: &Bound<'_>) -> bool {
        let bytes = |bound: &Bound<'_>| {
            let start = bound.memory.addr() + bound.first * bound.dtype.size();
            start..start + (bound.layout.end() - bound.layout.offset) * bound.dtype.size()
        };
        let (a, b) = (bytes(self), bytes(other));
        a.start < b.end && b.start < a.end
    }

    /// True if both begin at the same byte.
    pub fn starts_at(&self, other: &Bound<'_>) -> bool {
        self.dtype == other.dtype && self.memory == other.memory && self.first == other.first
    }
}
