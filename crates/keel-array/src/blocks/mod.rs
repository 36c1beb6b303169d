//! Block codings of weights, as GGUF files have them: a few values share scales, and rows are whole blocks.
//!
//! The decoders here define each coding. They are written to be read; kernels have their own decoders, tested against
//! these.

mod short;
mod superblocks;

use std::fmt;

use serde::{Deserialize, Serialize};

/// How the values of a block are coded; the names are the format's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the decoders document them")]
pub enum BlockFormat {
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

impl BlockFormat {
    /// All codings.
    pub const ALL: [BlockFormat; 13] = [
        BlockFormat::Q4_0,
        BlockFormat::Q4_1,
        BlockFormat::Q5_0,
        BlockFormat::Q5_1,
        BlockFormat::Q8_0,
        BlockFormat::Q2K,
        BlockFormat::Q3K,
        BlockFormat::Q4K,
        BlockFormat::Q5K,
        BlockFormat::Q6K,
        BlockFormat::IQ4NL,
        BlockFormat::IQ4XS,
        BlockFormat::MXFP4,
    ];

    /// Values in a block.
    pub const fn values(self) -> usize {
        match self {
            BlockFormat::Q4_0 | BlockFormat::Q4_1 | BlockFormat::Q5_0 | BlockFormat::Q5_1 => 32,
            BlockFormat::Q8_0 | BlockFormat::IQ4NL | BlockFormat::MXFP4 => 32,
            BlockFormat::Q2K | BlockFormat::Q3K | BlockFormat::Q4K | BlockFormat::Q5K => 256,
            BlockFormat::Q6K | BlockFormat::IQ4XS => 256,
        }
    }

    /// Bytes of a block.
    pub const fn bytes(self) -> usize {
        match self {
            BlockFormat::Q4_0 => short::Q4_0_BYTES,
            BlockFormat::Q4_1 => short::Q4_1_BYTES,
            BlockFormat::Q5_0 => short::Q5_0_BYTES,
            BlockFormat::Q5_1 => short::Q5_1_BYTES,
            BlockFormat::Q8_0 => short::Q8_0_BYTES,
            BlockFormat::IQ4NL => short::IQ4_NL_BYTES,
            BlockFormat::MXFP4 => short::MXFP4_BYTES,
            BlockFormat::Q2K => superblocks::Q2_K_BYTES,
            BlockFormat::Q3K => superblocks::Q3_K_BYTES,
            BlockFormat::Q4K => superblocks::Q4_K_BYTES,
            BlockFormat::Q5K => superblocks::Q5_K_BYTES,
            BlockFormat::Q6K => superblocks::Q6_K_BYTES,
            BlockFormat::IQ4XS => superblocks::IQ4_XS_BYTES,
        }
    }

    /// Byte offsets of the f16 scales within a block, used to make up blocks with reasonable values.
    pub const fn scale_offsets(self) -> &'static [usize] {
        match self {
            BlockFormat::Q4_0 | BlockFormat::Q5_0 | BlockFormat::Q8_0 => &[0],
            BlockFormat::IQ4NL | BlockFormat::IQ4XS => &[0],
            BlockFormat::Q4_1 | BlockFormat::Q5_1 | BlockFormat::Q4K | BlockFormat::Q5K => &[0, 2],
            BlockFormat::Q2K => &[80, 82],
            BlockFormat::Q3K => &[108],
            BlockFormat::Q6K => &[208],
            BlockFormat::MXFP4 => &[],
        }
    }

    /// Bytes of a row of `cols` values. `None` if the row is not whole blocks, or too large.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        let blocks = cols.is_multiple_of(self.values()).then(|| cols / self.values())?;
        blocks.checked_mul(self.bytes())
    }

    /// Decodes whole blocks, as many as both `bytes` and `out` have room for.
    pub fn decode(self, bytes: &[u8], out: &mut [f32]) {
        let block = match self {
            BlockFormat::Q4_0 => short::q4_0,
            BlockFormat::Q4_1 => short::q4_1,
            BlockFormat::Q5_0 => short::q5_0,
            BlockFormat::Q5_1 => short::q5_1,
            BlockFormat::Q8_0 => short::q8_0,
            BlockFormat::IQ4NL => short::iq4_nl,
            BlockFormat::MXFP4 => short::mxfp4,
            BlockFormat::Q2K => superblocks::q2_k,
            BlockFormat::Q3K => superblocks::q3_k,
            BlockFormat::Q4K => superblocks::q4_k,
            BlockFormat::Q5K => superblocks::q5_k,
            BlockFormat::Q6K => superblocks::q6_k,
            BlockFormat::IQ4XS => superblocks::iq4_xs,
        };
        let blocks = bytes.chunks_exact(self.bytes());
        for (out, bytes) in out.chunks_exact_mut(self.values()).zip(blocks) {
            block(bytes, out);
        }
    }
}

impl fmt::Display for BlockFormat {
    /// The coding's name in files.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BlockFormat::Q2K => f.write_str("Q2_K"),
            BlockFormat::Q3K => f.write_str("Q3_K"),
            BlockFormat::Q4K => f.write_str("Q4_K"),
            BlockFormat::Q5K => f.write_str("Q5_K"),
            BlockFormat::Q6K => f.write_str("Q6_K"),
            BlockFormat::IQ4NL => f.write_str("IQ4_NL"),
            BlockFormat::IQ4XS => f.write_str("IQ4_XS"),
            other => write!(f, "{other:?}"),
        }
    }
}
