//! The element types of GGUF tensors.

use std::fmt;

use keel_array::{BlockFormat, DType};

/// How a GGUF tensor's elements are stored: one by one, or in blocks that share scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GgmlType {
    /// One by one.
    Plain(DType),
    /// In blocks.
    Blocks(BlockFormat),
}

impl GgmlType {
    /// The type of this number in a file, or `None` for one that is not read here.
    pub(super) fn from_id(id: u32) -> Option<GgmlType> {
        let plain = |dtype| Some(GgmlType::Plain(dtype));
        let blocks = |format| Some(GgmlType::Blocks(format));
        match id {
            0 => plain(DType::F32),
            1 => plain(DType::F16),
            2 => blocks(BlockFormat::Q4_0),
            3 => blocks(BlockFormat::Q4_1),
            6 => blocks(BlockFormat::Q5_0),
            7 => blocks(BlockFormat::Q5_1),
            8 => blocks(BlockFormat::Q8_0),
            10 => blocks(BlockFormat::Q2K),
            11 => blocks(BlockFormat::Q3K),
            12 => blocks(BlockFormat::Q4K),
            13 => blocks(BlockFormat::Q5K),
            14 => blocks(BlockFormat::Q6K),
            20 => blocks(BlockFormat::IQ4NL),
            23 => blocks(BlockFormat::IQ4XS),
            26 => plain(DType::I32),
            27 => plain(DType::I64),
            30 => plain(DType::BF16),
            39 => blocks(BlockFormat::MXFP4),
            _ => None,
        }
    }

    /// The dtype of elements that are stored one by one; `None` for blocks.
    pub fn dtype(self) -> Option<DType> {
        if let GgmlType::Plain(dtype) = self { Some(dtype) } else { None }
    }

    /// Values in a block; 1 for elements that are stored one by one.
    pub fn block_values(self) -> usize {
        if let GgmlType::Blocks(format) = self { format.values() } else { 1 }
    }

    /// Bytes of a block, or of one element.
    pub fn block_bytes(self) -> usize {
        match self {
            GgmlType::Plain(dtype) => dtype.size(),
            GgmlType::Blocks(format) => format.bytes(),
        }
    }

    /// Bytes of a row of `cols` values, or `None` if they are not whole blocks or too many.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        match self {
            GgmlType::Plain(dtype) => cols.checked_mul(dtype.size()),
            GgmlType::Blocks(format) => format.row_bytes(cols),
        }
    }
}

impl fmt::Display for GgmlType {
    /// The name that the format has for the type.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GgmlType::Plain(dtype) => f.write_str(&dtype.to_string().to_uppercase()),
            GgmlType::Blocks(format) => format.fmt(f),
        }
    }
}
