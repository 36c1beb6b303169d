//! A block-quantised tensor, borrowed from its file.

use std::ops::Range;

use super::{GgmlType, blocks, superblocks};
use crate::{Result, view::check_rows};

/// A tensor in a block-quantised type, its bytes checked against its shape.
#[derive(Clone, Copy, Debug)]
pub struct BlockTensor<'a> {
    pub(super) name: &'a str,
    pub(super) kind: GgmlType,
    pub(super) shape: &'a [usize],
    pub(super) bytes: &'a [u8],
}

impl<'a> BlockTensor<'a> {
    /// The tensor's name in the file.
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// The type of its blocks.
    pub fn kind(&self) -> GgmlType {
        self.kind
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
        self.shape.split_last().map_or(1, |(_, leading)| leading.iter().product())
    }

    /// The last dimension.
    pub fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Decodes rows `range` (the leading dimensions multiplied) into `out`.
    ///
    /// # Shapes
    /// `out`: `range.len() * cols`.
    ///
    /// # Errors
    /// [`WeightsError::Rows`](crate::WeightsError::Rows) if the rows do not exist or `out` has another length.
    pub fn rows_f32(&self, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        check_rows(self.name, self.rows(), self.cols(), &range, out.len())?;
        // Rows are whole blocks, so the first block of a row lies at a whole number of them.
        let first = range.start * self.cols() / self.kind.block_values();
        decode(self.kind, &self.bytes[first * self.kind.block_bytes()..], out);
        Ok(())
    }
}

/// Decodes as many whole blocks as `out` has room for.
pub(super) fn decode(kind: GgmlType, bytes: &[u8], out: &mut [f32]) {
    let block = match kind {
        GgmlType::Q4_0 => blocks::q4_0,
        GgmlType::Q4_1 => blocks::q4_1,
        GgmlType::Q5_0 => blocks::q5_0,
        GgmlType::Q5_1 => blocks::q5_1,
        GgmlType::Q8_0 => blocks::q8_0,
        GgmlType::IQ4NL => blocks::iq4_nl,
        GgmlType::MXFP4 => blocks::mxfp4,
        GgmlType::Q2K => superblocks::q2_k,
        GgmlType::Q3K => superblocks::q3_k,
        GgmlType::Q4K => superblocks::q4_k,
        GgmlType::Q5K => superblocks::q5_k,
        GgmlType::Q6K => superblocks::q6_k,
        GgmlType::IQ4XS => superblocks::iq4_xs,
        GgmlType::F32 | GgmlType::F16 | GgmlType::BF16 | GgmlType::I32 | GgmlType::I64 => {
            unreachable!("{kind} has no blocks")
        }
    };
    let bytes = bytes.chunks_exact(kind.block_bytes());
    for (out, bytes) in out.chunks_exact_mut(kind.block_values()).zip(bytes) {
        block(bytes, out);
    }
}
