//! Views of matrices whose rows are a column range of wider rows, and of the rows of a batch.

use crate::shared_slice::SharedMut;
use std::ops::Range;

/// Rows to read: columns `columns` of a row-major matrix with `stride` values a row.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    data: &'a [f32],
    stride: usize,
    start: usize,
    width: usize,
}

impl<'a> Rows<'a> {
    /// Columns `columns` of the matrix `data`.
    ///
    /// # Panics
    /// If the columns lie outside the rows, or `data` is not whole rows.
    pub fn new(data: &'a [f32], stride: usize, columns: Range<usize>) -> Rows<'a> {
        check(data.len(), stride, &columns);
        Rows { data, stride, start: columns.start, width: columns.len() }
    }

    /// All columns of the matrix `data` with `width` values a row.
    pub fn whole(data: &'a [f32], width: usize) -> Rows<'a> {
        Rows::new(data, width, 0..width)
    }

    /// Number of rows.
    pub fn len(self) -> usize {
        self.data.len() / self.stride
    }

    /// Whether there are no rows.
    pub fn is_empty(self) -> bool {
        self.data.is_empty()
    }

    /// Values of a row.
    pub fn width(self) -> usize {
        self.width
    }

    /// Row `t`.
    #[inline(always)]
    pub fn row(self, t: usize) -> &'a [f32] {
        let start = t * self.stride + self.start;
        &self.data[start..start + self.width]
    }

    /// Rows `rows` of this view.
    ///
    /// # Panics
    /// If they lie outside it.
    pub fn range(self, rows: Range<usize>) -> Rows<'a> {
        Rows { data: &self.data[rows.start * self.stride..rows.end * self.stride], ..self }
    }

    /// Columns `columns` of this view.
    ///
    /// # Panics
    /// If they lie outside it.
    pub fn columns(self, columns: Range<usize>) -> Rows<'a> {
        assert!(
            columns.start <= columns.end && columns.end <= self.width,
            "columns {columns:?} of {}",
            self.width
        );
        Rows { start: self.start + columns.start, width: columns.len(), ..self }
    }
}

/// Rows to write; workers write disjoint parts.
#[derive(Clone, Copy)]
pub struct RowsMut<'a> {
    data: SharedMut<'a, f32>,
    stride: usize,
    start: usize,
    width: usize,
}

impl<'a> RowsMut<'a> {
    /// Columns `columns` of the matrix `data` with `stride` values a row.
    ///
    /// # Panics
    /// If the columns lie outside the rows, or `data` is not whole rows.
    pub fn new(data: SharedMut<'a, f32>, stride: usize, columns: Range<usize>) -> RowsMut<'a> {
        check(data.len(), stride, &columns);
        RowsMut { data, stride, start: columns.start, width: columns.len() }
    }

    /// All columns of the matrix `data` with `width` values a row.
    pub fn whole(data: SharedMut<'a, f32>, width: usize) -> RowsMut<'a> {
        RowsMut::new(data, width, 0..width)
    }

    /// Number of rows.
    pub fn len(self) -> usize {
        self.data.len() / self.stride
    }

    /// Whether there are no rows.
    pub fn is_empty(self) -> bool {
        self.data.is_empty()
    }

    /// Values of a row.
    pub fn width(self) -> usize {
        self.width
    }

    /// Rows `rows` of this view.
    ///
    /// # Panics
    /// If they lie outside it.
    pub fn range(self, rows: Range<usize>) -> RowsMut<'a> {
        RowsMut { data: self.data.part(rows.start * self.stride..rows.end * self.stride), ..self }
    }

    /// Columns `columns` of row `t`, to write.
    ///
    /// # Safety
    /// As [`SharedMut::range`]: parts lent at the same time must not overlap.
    #[inline(always)]
    pub unsafe fn part(self, t: usize, columns: Range<usize>) -> &'a mut [f32] {
        assert!(columns.end <= self.width, "columns {columns:?} of {}", self.width);
        let row = t * self.stride + self.start;
        // SAFETY: the caller's promise.
        unsafe { self.data.range(row + columns.start..row + columns.end) }
    }

    /// Row `t`, to write.
    ///
    /// # Safety
    /// As [`RowsMut::part`].
    #[inline(always)]
    pub unsafe fn row(self, t: usize) -> &'a mut [f32] {
        // SAFETY: the caller's promise.
        unsafe { self.part(t, 0..self.width) }
    }
}

fn check(len: usize, stride: usize, columns: &Range<usize>) {
    assert!(
        columns.start <= columns.end && columns.end <= stride && stride > 0 && len.is_multiple_of(stride),
        "columns {columns:?} of rows of {stride} in {len} values"
    );
}

/// Which rows of a step belong to which sequence.
///
/// Sequence `b` owns the rows `row_start[b]..row_start[b + 1]`; its first row is at position `position[b]`.
#[derive(Clone, Copy)]
pub struct Batch<'a> {
    /// First row of each sequence, then the total number of rows: B + 1 values that never fall.
    pub row_start: &'a [u32],
    /// Position of each sequence's first row, B values.
    pub position: &'a [u32],
}

impl Batch<'_> {
    /// Number of sequences.
    pub fn sequences(&self) -> usize {
        assert_eq!(
            self.row_start.len(),
            self.position.len() + 1,
            "row_start has one value more than position"
        );
        self.position.len()
    }

    /// Number of rows of all sequences.
    pub fn rows(&self) -> usize {
        self.row_start.last().map_or(0, |&end| end as usize)
    }

    /// The rows of sequence `b`.
    pub fn rows_of(&self, b: usize) -> Range<usize> {
        self.row_start[b] as usize..self.row_start[b + 1] as usize
    }

    /// The sequence that row `t` belongs to.
    pub fn sequence_of(&self, t: usize) -> usize {
        self.row_start.partition_point(|&start| start as usize <= t) - 1
    }

    /// Largest number of rows of a sequence.
    pub fn most_rows(&self) -> usize {
        (0..self.sequences()).map(|b| self.rows_of(b).len()).max().unwrap_or(0)
    }
}
