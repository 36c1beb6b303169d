//! Positions: the order in which a call computes its rows, and how that order is cut into blocks.

use std::ops::Range;

/// Rows that go through one matrix, as positions in the sorted order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Segment {
    pub matrix: u32,
    pub start: u32,
    pub end: u32,
}

/// Where a position lies among the rows that are computed together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RowBlock {
    /// First position of the block.
    pub start: usize,
    /// Its rows: a power of two.
    pub rows: usize,
    /// The position asked for, counted from the first.
    pub row: usize,
}

impl Segment {
    /// The blocks of `positions`, which start and end where blocks do.
    pub(super) fn blocks(&self, positions: Range<usize>, largest: usize) -> impl Iterator<Item = RowBlock> {
        let mut next = positions.start;
        std::iter::from_fn(move || {
            let block = (next < positions.end).then(|| self.block(next, largest))?;
            next = block.start + block.rows;
            Some(block)
        })
    }

    /// The block of a position: blocks of `largest` rows from the segment's start on, then of half as many and so
    /// on, one each as needed.
    pub(super) fn block(&self, position: usize, largest: usize) -> RowBlock {
        let (from, end) = (self.start as usize, self.end as usize);
        assert!((from..end).contains(&position), "position {position} of {self:?}");
        let mut start = from + (position - from) / largest * largest;
        let mut rows = largest;
        loop {
            if start + rows <= end {
                if position < start + rows {
                    return RowBlock { start, rows, row: position - start };
                }
                start += rows;
            }
            rows /= 2;
        }
    }
}

/// Where a row of a segment comes from and goes to.
#[derive(Clone, Copy)]
pub(super) enum RowMap<'a> {
    /// Row `i` of x makes row `i` of y.
    Same,
    /// Position `i` of the sorted order makes row `r = order[i]` of y from row `r / fanout` of x.
    Gathered { order: &'a [u32], fanout: usize },
}

impl RowMap<'_> {
    /// Rows of x and y of position `i`.
    pub(super) fn rows(self, i: usize) -> (usize, usize) {
        match self {
            RowMap::Same => (i, i),
            RowMap::Gathered { order, fanout } => (order[i] as usize / fanout, order[i] as usize),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_a_segment_follow_each_other() {
        for (len, largest) in (1..=33).map(|len| (len, 8)).chain((1..=33).map(|len| (len, 16))) {
            let segment = Segment { matrix: 0, start: 5, end: 5 + len };
            let mut sizes = Vec::new();
            let mut position = 5;
            for block in segment.blocks(5..segment.end as usize, largest) {
                assert_eq!((block.start, block.row), (position, 0));
                for row in 0..block.rows {
                    assert_eq!(segment.block(position + row, largest), RowBlock { row, ..block });
                }
                sizes.push(block.rows);
                position += block.rows;
            }
            assert_eq!(sizes.iter().sum::<usize>(), len as usize);
            assert!(sizes.is_sorted_by(|a, b| a > b || *a == largest), "{sizes:?}");
        }
    }
}
