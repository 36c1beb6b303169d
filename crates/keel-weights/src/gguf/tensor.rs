//! A block-quantised tensor, borrowed from its file.

use std::ops::Range;

use keel_array::BlockFormat;

use crate::{Result, view::check_rows};

/// A tensor in a block-quantised type, its bytes checked against its shape.
#[derive(Clone, Copy, Debug)]
pub struct BlockTensor<'a> {
    pub(super) name: &'a str,
    pub(super) format: BlockFormat,
    pub(super) shape: &'a [usize],
    pub(super) bytes: &'a [u8],
}

impl<'a> BlockTensor<'a> {
    /// The tensor's name in the file.
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// The coding of its blocks.
    pub fn format(&self) -> BlockFormat {
        self.format
    }

    /// The dimensions, slowest first. Blocks lie along the last.
    pub fn shape(&self) -> &'a [usize] {
        self.shape
    }

    /// The blocks, row-major.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The product of all dimensions but the last.
    pub fn rows(&self) -> usize {
        crate::rows(self.shape)
    }

    /// The last dimension.
    pub fn cols(&self) -> usize {
        crate::cols(self.shape)
    }

    /// Decodes rows `range` (all leading dimensions counted through) into `out`.
    ///
    /// # Shapes
    /// `out`: `range.len() * cols`.
    ///
    /// # Errors
    /// [`WeightsError::Rows`](crate::WeightsError::Rows) if the rows do not exist or `out` has another length.
    pub fn rows_f32(&self, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        check_rows(self.name, self.rows(), self.cols(), &range, out.len())?;
        let row_size = self.row_size();
        self.format.decode(&self.bytes[range.start * row_size..range.end * row_size], out);
        Ok(())
    }

    /// The blocks of rows `range`.
    ///
    /// # Errors
    /// [`WeightsError::Rows`](crate::WeightsError::Rows) if the rows do not exist.
    pub fn bytes_of_rows(&self, range: Range<usize>) -> Result<&'a [u8]> {
        check_rows(self.name, self.rows(), self.cols(), &range, range.len().saturating_mul(self.cols()))?;
        let row_size = self.row_size();
        Ok(&self.bytes[range.start * row_size..range.end * row_size])
    }

    /// Bytes of a row; its columns are whole blocks.
    fn row_size(&self) -> usize {
        self.cols() / self.format.values() * self.format.bytes()
    }
}
