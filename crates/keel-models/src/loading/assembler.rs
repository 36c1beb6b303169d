//! Collects rows of several layers into whole blocks of a common weight.
//!
//! Devices pack a weight in tiles of rows, so a block must begin at a tile. Layers that are joined in one weight may
//! end at any row.

use keel_array::{RowBlock, RowData, Weight, WeightFormat};

use super::BLOCK_ROWS;
use crate::Result;

/// Collects rows of one expert until a block is full.
pub(super) struct RowAssembler<'w> {
    weight: &'w Weight,
    expert: usize,
    /// Rows written to the weight.
    filled: usize,
    /// Rows that wait for a full block.
    waiting: usize,
    /// Dense elements, or blocks.
    dense: Vec<u8>,
    codes: Vec<u8>,
    scales: Vec<f32>,
    biases: Vec<f32>,
}

impl<'w> RowAssembler<'w> {
    pub fn new(weight: &'w Weight, expert: usize) -> RowAssembler<'w> {
        let (dense, codes, scales, biases) = Default::default();
        RowAssembler { weight, expert, filled: 0, waiting: 0, dense, codes, scales, biases }
    }

    /// Appends rows.
    pub fn push(&mut self, rows: usize, data: RowData<'_>) -> Result<()> {
        if self.waiting == 0 && rows == BLOCK_ROWS {
            return self.hand_on(rows, data);
        }
        let mut taken = 0;
        while taken < rows {
            let count = (rows - taken).min(BLOCK_ROWS - self.waiting);
            self.keep(taken..taken + count, rows, data);
            taken += count;
            if self.waiting == BLOCK_ROWS {
                self.flush()?;
            }
        }
        Ok(())
    }

    /// Copies a range of `rows` rows.
    fn keep(&mut self, range: std::ops::Range<usize>, rows: usize, data: RowData<'_>) {
        fn part<'d, T>(all: &'d [T], range: &std::ops::Range<usize>, rows: usize) -> &'d [T] {
            let row = all.len() / rows;
            &all[range.start * row..range.end * row]
        }
        self.waiting += range.len();
        match data {
            RowData::Dense(bytes) | RowData::Blocks(bytes) => {
                self.dense.extend_from_slice(part(bytes, &range, rows))
            }
            RowData::Affine { codes, scales, biases } => {
                self.codes.extend_from_slice(part(codes, &range, rows));
                self.scales.extend_from_slice(part(scales, &range, rows));
                self.biases.extend_from_slice(part(biases, &range, rows));
            }
        }
    }

    /// Writes the waiting rows.
    pub fn flush(&mut self) -> Result<()> {
        if self.waiting == 0 {
            return Ok(());
        }
        let (dense, codes) = (std::mem::take(&mut self.dense), std::mem::take(&mut self.codes));
        let (scales, biases) = (std::mem::take(&mut self.scales), std::mem::take(&mut self.biases));
        let data = match self.weight.spec().format {
            WeightFormat::Dense(_) => RowData::Dense(&dense),
            WeightFormat::Blocks(_) => RowData::Blocks(&dense),
            WeightFormat::Affine { .. } => {
                RowData::Affine { codes: &codes, scales: &scales, biases: &biases }
            }
        };
        let rows = std::mem::take(&mut self.waiting);
        self.hand_on(rows, data)
    }

    fn hand_on(&mut self, rows: usize, data: RowData<'_>) -> Result<()> {
        self.weight.fill(&RowBlock { expert: self.expert, first_row: self.filled, rows, data })?;
        self.filled += rows;
        Ok(())
    }
}
