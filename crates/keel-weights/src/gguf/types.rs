//! The element types of GGUF tensors.

use std::fmt;

use keel_array::DType;

use super::{blocks, superblocks};

/// How a GGUF tensor's elements are stored: one by one, or in blocks that share scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names are the format's own")]
pub enum GgmlType {
    F32,
    F16,
    BF16,
    I32,
    I64,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    IQ4NL,
    IQ4XS,
    MXFP4,
}

impl GgmlType {
    /// The type of this number in a file, or `None` for one that is not read here.
    pub(super) fn from_id(id: u32) -> Option<GgmlType> {
        Some(match id {
            0 => GgmlType::F32,
            1 => GgmlType::F16,
            2 => GgmlType::Q4_0,
            3 => GgmlType::Q4_1,
            6 => GgmlType::Q5_0,
            7 => GgmlType::Q5_1,
            8 => GgmlType::Q8_0,
            10 => GgmlType::Q2K,
            11 => GgmlType::Q3K,
            12 => GgmlType::Q4K,
            13 => GgmlType::Q5K,
            14 => GgmlType::Q6K,
            20 => GgmlType::IQ4NL,
            23 => GgmlType::IQ4XS,
            26 => GgmlType::I32,
            27 => GgmlType::I64,
            30 => GgmlType::BF16,
            39 => GgmlType::MXFP4,
            _ => return None,
        })
    }

    /// The dtype of elements that are stored one by one; `None` for blocks.
    pub fn dtype(self) -> Option<DType> {
        match self {
            GgmlType::F32 => Some(DType::F32),
            GgmlType::F16 => Some(DType::F16),
            GgmlType::BF16 => Some(DType::BF16),
            GgmlType::I32 => Some(DType::I32),
            GgmlType::I64 => Some(DType::I64),
            _ => None,
        }
    }

    /// Values in a block; 1 for elements that are stored one by one.
    pub fn block_values(self) -> usize {
        match self {
            GgmlType::Q4_0 | GgmlType::Q4_1 | GgmlType::Q5_0 | GgmlType::Q5_1 | GgmlType::Q8_0 => 32,
            GgmlType::IQ4NL | GgmlType::MXFP4 => 32,
            GgmlType::Q2K | GgmlType::Q3K | GgmlType::Q4K | GgmlType::Q5K | GgmlType::Q6K => 256,
            GgmlType::IQ4XS => 256,
            _ => 1,
        }
    }

    /// Bytes of a block, or of one element.
    pub fn block_bytes(self) -> usize {
        match self {
            GgmlType::F32 | GgmlType::I32 => 4,
            GgmlType::F16 | GgmlType::BF16 => 2,
            GgmlType::I64 => 8,
            GgmlType::Q4_0 => blocks::Q4_0_BYTES,
            GgmlType::Q4_1 => blocks::Q4_1_BYTES,
            GgmlType::Q5_0 => blocks::Q5_0_BYTES,
            GgmlType::Q5_1 => blocks::Q5_1_BYTES,
            GgmlType::Q8_0 => blocks::Q8_0_BYTES,
            GgmlType::IQ4NL => blocks::IQ4_NL_BYTES,
            GgmlType::MXFP4 => blocks::MXFP4_BYTES,
            GgmlType::Q2K => superblocks::Q2_K_BYTES,
            GgmlType::Q3K => superblocks::Q3_K_BYTES,
            GgmlType::Q4K => superblocks::Q4_K_BYTES,
            GgmlType::Q5K => superblocks::Q5_K_BYTES,
            GgmlType::Q6K => superblocks::Q6_K_BYTES,
            GgmlType::IQ4XS => superblocks::IQ4_XS_BYTES,
        }
    }

    /// Bytes of a row of `cols` values, or `None` if they are not whole blocks or too many.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        let blocks = cols.is_multiple_of(self.block_values()).then(|| cols / self.block_values())?;
        blocks.checked_mul(self.block_bytes())
    }
}

impl fmt::Display for GgmlType {
    /// The name that the format has for the type.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GgmlType::Q2K => f.write_str("Q2_K"),
            GgmlType::Q3K => f.write_str("Q3_K"),
            GgmlType::Q4K => f.write_str("Q4_K"),
            GgmlType::Q5K => f.write_str("Q5_K"),
            GgmlType::Q6K => f.write_str("Q6_K"),
            GgmlType::IQ4NL => f.write_str("IQ4_NL"),
            GgmlType::IQ4XS => f.write_str("IQ4_XS"),
            other => write!(f, "{other:?}"),
        }
    }
}
