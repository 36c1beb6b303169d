//! MLX's affine quantisation: a group of values of a row shares a scale and a bias,
//!
//! ```text
//! value = scale * code + bias,   0 <= code < 2^bits
//! ```
//!
//! A quantised module is three tensors. For a weight of `[.., rows, cols]`:
//!
//! | tensor | dtype | shape |
//! |---|---|---|
//! | `<module>.weight` | u32 | `[.., rows, cols * bits / 32]` |
//! | `<module>.scales`, `<module>.biases` | bf16, f16 or f32 | `[.., rows, cols / group_size]` |
//!
//! Read as bytes, a row of codes is one continuous stream of bits, lowest first, for all widths. (MLX packs 2, 4 and 8
//! bits into words, and 3, 5 and 6 bits into 3, 5 and 3 bytes. The result is the same stream.)

mod bits;
mod codec;
mod config;
mod tensor;

pub use codec::{dequantize_row, pack_row, quantize_rows, unpack_row};
pub(crate) use config::Gptq;
pub use config::{ModuleQuantization, Quantization};
pub use tensor::AffineTensor;
pub(crate) use tensor::affine_cols;

use std::fmt;

/// The widths of a code.
pub const AFFINE_BITS: [usize; 6] = [2, 3, 4, 5, 6, 8];
/// The numbers of values that share a scale and a bias.
pub const AFFINE_GROUP_SIZES: [usize; 3] = [32, 64, 128];

/// Bits per code and values per group: one of [`AFFINE_BITS`] and one of [`AFFINE_GROUP_SIZES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AffineFormat {
    bits: u8,
    group_size: u8,
}

impl AffineFormat {
    /// The format, or `None` for a width or group size that does not exist.
    pub fn new(bits: usize, group_size: usize) -> Option<AffineFormat> {
        let exists = AFFINE_BITS.contains(&bits) && AFFINE_GROUP_SIZES.contains(&group_size);
        exists.then_some(AffineFormat { bits: bits as u8, group_size: group_size as u8 })
    }

    /// Bits of a code.
    pub fn bits(self) -> usize {
        self.bits.into()
    }

    /// Values that share a scale and a bias.
    pub fn group_size(self) -> usize {
        self.group_size.into()
    }

    /// The largest code, `2^bits - 1`.
    pub fn code_max(self) -> u8 {
        (u16::MAX >> (16 - self.bits)) as u8
    }

    /// Groups in a row of `cols` values, or `None` unless they divide it.
    pub fn groups(self, cols: usize) -> Option<usize> {
        cols.is_multiple_of(self.group_size()).then(|| cols / self.group_size())
    }

    /// Bytes of the codes of `cols` values, a multiple of the group size.
    pub fn packed_bytes(self, cols: usize) -> usize {
        cols / 8 * self.bits()
    }
}

impl fmt::Display for AffineFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bits in groups of {}", self.bits, self.group_size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_formats_of_the_family_exist() {
        for bits in 0..=33 {
            for group_size in 0..=300 {
                let exists = [2, 3, 4, 5, 6, 8].contains(&bits) && [32, 64, 128].contains(&group_size);
                assert_eq!(AffineFormat::new(bits, group_size).is_some(), exists, "{bits} {group_size}");
            }
        }
        assert_eq!(AffineFormat::new(260, 64), None);
    }

    #[test]
    fn sizes_of_a_row() {
        let format = AffineFormat::new(3, 64).unwrap();
        assert_eq!((format.code_max(), format.groups(192), format.groups(96)), (7, Some(3), None));
        assert_eq!(format.packed_bytes(192), 192 * 3 / 8);
        assert_eq!(AffineFormat::new(8, 128).unwrap().code_max(), 255);
        assert_eq!(format.to_string(), "3 bits in groups of 64");
    }
}
