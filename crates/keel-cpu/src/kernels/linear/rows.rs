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

/// A block of rows that are computed together, and a position within it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockAt {
    /// First position of the block.
    pub start: usize,
    /// Number of rows: one of the sizes.
    pub rows: usize,
    /// The requested position, counted from `start`.
    pub row: usize,
}

impl Segment {
    /// The blocks of `positions`, a range that starts and ends at edges of blocks.
    pub(super) fn blocks(&self, positions: Range<usize>, sizes: &[usize]) -> impl Iterator<Item = BlockAt> {
        let mut next = positions.start;
        std::iter::from_fn(move || {
            let block = (next < positions.end).then(|| self.block(next, sizes))?;
            next = block.start + block.rows;
            Some(block)
        })
    }

    /// The block of a position. A segment begins with as many blocks of the largest size as fit, then has as many of
    /// the next size, and so on. `sizes` fall to 1.
    pub(super) fn block(&self, position: usize, sizes: &[usize]) -> BlockAt {
        let (mut start, end) = (self.start as usize, self.end as usize);
        assert!((start..end).contains(&position), "position {position} of {self:?}");
        for &rows in sizes {
            let blocks_end = start + (end - start) / rows * rows;
            if position < blocks_end {
                let row = (position - start) % rows;
                return BlockAt { start: position - row, rows, row };
            }
            start = blocks_end;
        }
        unreachable!("{sizes:?} end with 1")
    }
}

/// The rows of a call: how they are cut, and where they lie.
#[derive(Clone, Copy)]
pub(super) struct RowOrder<'a> {
    pub segments: &'a [Segment],
    pub map: RowMap<'a>,
}

/// The rows of x and y that belong to a position.
#[derive(Clone, Copy)]
pub(super) enum RowMap<'a> {
    /// Row `i` of x gives row `i` of y.
    Same,
    /// Position `i` of the sorted order gives row `r = order[i]` of y, from row `r / fanout` of x.
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
        for sizes in [&[1][..], &[4, 2, 1], &[6, 4, 2, 1], &[16, 6, 4, 2, 1]] {
            for len in 1..=33 {
                let segment = Segment { matrix: 0, start: 5, end: 5 + len };
                let mut rows = Vec::new();
                let mut position = 5;
                for block in segment.blocks(5..segment.end as usize, sizes) {
                    assert_eq!((block.start, block.row), (position, 0));
                    for row in 0..block.rows {
                        assert_eq!(segment.block(position + row, sizes), BlockAt { row, ..block });
                    }
                    rows.push(block.rows);
                    position += block.rows;
                }
                assert_eq!(rows.iter().sum::<usize>(), len as usize);
                assert!(rows.is_sorted_by(|a, b| a >= b) && rows.iter().all(|rows| sizes.contains(rows)));
            }
        }
    }
}
