//! The layout of weights in memory: the sizes of packed matrices, as pure functions of their shapes.

use super::coding::Coding;
use super::lanes::LANES;
use crate::error::Error;
use keel_array::BlockFormat;
use std::ops::Range;

/// Rows of a weight tile: one lane each.
pub const TILE_ROWS: usize = LANES;

/// Tiles that are stored and computed together: each load of an activation serves both.
pub(super) const PAIR: usize = 2;

/// Rows of a pair of tiles.
pub const PAIR_ROWS: usize = PAIR * TILE_ROWS;

/// Inputs of a block, the unit in which quantised values are interleaved: `bits` vectors of 64 bytes hold 32 values of
/// each of 16 rows, for any number of bits.
pub(super) const BLOCK: usize = 32;

/// The largest group of affine weights.
pub(super) const MAX_GROUP: usize = 128;

/// A 16- or 32-bit float type of stored weights, scales or biases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FloatType {
    /// IEEE single precision.
    F32,
    /// The upper half of an f32.
    Bf16,
    /// IEEE half precision.
    F16,
}

impl FloatType {
    /// Bytes of one value.
    pub const fn bytes(self) -> usize {
        match self {
            FloatType::F32 => 4,
            FloatType::Bf16 | FloatType::F16 => 2,
        }
    }
}

/// The number format of a weight matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    /// One float for each weight.
    Dense(FloatType),
    /// `weight = scale * q + bias` with `q` an unsigned integer, and one scale and one bias for each group of
    /// consecutive inputs of a row.
    Affine {
        /// Bits of `q`: 2, 3, 4, 5, 6 or 8.
        bits: usize,
        /// Inputs of a group: 32, 64 or 128.
        group: usize,
        /// Type of scales and biases.
        params: FloatType,
    },
    /// A block coding of GGUF files; every value is exactly that of [`BlockFormat::decode`].
    Blocks(BlockFormat),
}

/// Layout of a packed `[E, N, K]` stack of weight matrices; `E` is 1 except for experts.
///
/// Sixteen consecutive rows of one matrix form a tile. Tiles follow each other, matrix by matrix; rows past `N` in a
/// matrix's last tile are zeros. The two quantised tiles of a pair are computed together, so their units alternate and
/// the pair is one stream. A last tile without a partner lies by itself, as do all dense tiles. Within a tile, for 16
/// rows `r`:
///
/// - affine: for each group `[group / 32][bits x 64 bytes]`, then `scale[r]`, then `bias[r]`. A block of 32 inputs is
///   bit planes of 4, 2 and 1 bits (6 bits: a 4 and a 2); 8 bits are a plane of their own. A vector of a plane has byte
///   `4 * r + i`, whose field `f` belongs to input `4 * (fields * vector + f) + i`.
/// - blocks: for each unit (a block of the file), `[inputs / 32][bits x 64 bytes]` of codes as above, then the unit's
///   parameters, `[r]` of each, see `Scales` in `coding`.
/// - dense f32, f16: `[K][r]`. Dense bf16: `[K / 2][r][2]`, the operand of the bf16 dot product; an odd `K` is padded
///   with zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PackedLayout {
    matrices: usize,
    n: usize,
    k: usize,
    format: WeightFormat,
    tile_bytes: usize,
    bytes: usize,
}

impl PackedLayout {
    /// The layout of one `[N, K]` matrix.
    ///
    /// # Errors
    /// As [`PackedLayout::stacked`].
    pub fn new(n: usize, k: usize, format: WeightFormat) -> Result<PackedLayout, Error> {
        PackedLayout::stacked(1, n, k, format)
    }

    /// The layout of `matrices` matrices `[N, K]`, such as the experts of a layer.
    ///
    /// # Errors
    /// [`Error::WeightFormat`] if a size is zero, the bits or the group are not supported, `K` is not a multiple of the
    /// group, or the bytes exceed the address space.
    pub fn stacked(matrices: usize, n: usize, k: usize, format: WeightFormat) -> Result<PackedLayout, Error> {
        let fail = |reason| Error::WeightFormat { matrices, n, k, format, reason };
        if matrices == 0 || n == 0 || k == 0 {
            return Err(fail("every size must be at least 1"));
        }
        let tile_bytes = match format {
            WeightFormat::Dense(FloatType::Bf16) => k.checked_next_multiple_of(2),
            WeightFormat::Dense(_) => Some(k),
            WeightFormat::Affine { bits, .. } if !matches!(bits, 2..=6 | 8) => {
                return Err(fail("bits must be 2, 3, 4, 5, 6 or 8"));
            }
            WeightFormat::Affine { group, .. } if !matches!(group, 32 | 64 | 128) => {
                return Err(fail("the group must be 32, 64 or 128"));
            }
            WeightFormat::Affine { group, .. } if !k.is_multiple_of(group) => {
                return Err(fail("K must be a multiple of the group"));
            }
            WeightFormat::Affine { group, .. } => Some(k / group),
            WeightFormat::Blocks(format) if !k.is_multiple_of(format.values()) => {
                return Err(fail("K must be whole blocks"));
            }
            WeightFormat::Blocks(format) => Some(k / format.values()),
        }
        .and_then(|units| units.checked_mul(unit_bytes(format)));
        let bytes = tile_bytes
            .and_then(|bytes| bytes.checked_mul(n.div_ceil(TILE_ROWS)))
            .and_then(|bytes| bytes.checked_mul(matrices))
            .filter(|bytes| isize::try_from(*bytes).is_ok());
        match (tile_bytes, bytes) {
            (Some(tile_bytes), Some(bytes)) => Ok(PackedLayout { matrices, n, k, format, tile_bytes, bytes }),
            _ => Err(fail("the packed bytes exceed the address space")),
        }
    }

    /// Bytes of the whole stack.
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Matrices of the stack: 1, or the number of experts.
    pub const fn matrices(&self) -> usize {
        self.matrices
    }

    /// Outputs of a matrix.
    pub const fn n(&self) -> usize {
        self.n
    }

    /// Inputs of a matrix.
    pub const fn k(&self) -> usize {
        self.k
    }

    /// The number format of the weights.
    pub const fn format(&self) -> WeightFormat {
        self.format
    }

    /// Tiles of one matrix.
    pub(super) const fn tiles(&self) -> usize {
        self.n.div_ceil(TILE_ROWS)
    }

    /// Bytes of one tile; a multiple of 32.
    pub(super) const fn tile_bytes(&self) -> usize {
        self.tile_bytes
    }

    /// Inputs that share a scale; 1 if dense.
    pub(super) const fn group(&self) -> usize {
        match self.format {
            WeightFormat::Dense(_) => 1,
            WeightFormat::Affine { group, .. } => group,
            WeightFormat::Blocks(format) => Coding::of(format).group,
        }
    }

    /// The zero that is subtracted from levels of block codings before they are scaled; 0 for other formats.
    pub(super) const fn zero(&self) -> i32 {
        match self.format {
            WeightFormat::Blocks(format) => Coding::of(format).zero,
            _ => 0,
        }
    }

    /// Bytes of one unit of a tile: quants, scales and biases of one affine group, one block, or one input if dense.
    pub(super) const fn unit_bytes(&self) -> usize {
        unit_bytes(self.format)
    }

    /// Place of the units of tile `tile`, counted from the first of `tiles` tiles of one matrix. These start at a
    /// pair's first tile and end at a pair's last tile or the matrix's last.
    pub(super) const fn units(&self, tile: usize, tiles: usize) -> Units {
        let alone = tile / PAIR * PAIR + PAIR > tiles;
        if alone || matches!(self.format, WeightFormat::Dense(_)) {
            return Units { first: tile * self.tile_bytes, stride: self.unit_bytes() };
        }
        let first = tile / PAIR * PAIR * self.tile_bytes + tile % PAIR * self.unit_bytes();
        Units { first, stride: PAIR * self.unit_bytes() }
    }

    /// The bytes of `rows` of one matrix. The rows start at the edge of a pair of tiles and end at one or at `N`.
    ///
    /// # Panics
    /// If the rows start or end elsewhere, or lie outside the stack.
    pub fn row_bytes(&self, matrix: usize, rows: Range<usize>) -> Range<usize> {
        assert!(
            matrix < self.matrices
                && rows.start <= rows.end
                && rows.end <= self.n
                && rows.start.is_multiple_of(PAIR_ROWS)
                && (rows.end.is_multiple_of(PAIR_ROWS) || rows.end == self.n),
            "rows {rows:?} of matrix {matrix} are not whole pairs of tiles of a stack of {} matrices of {} rows",
            self.matrices,
            self.n
        );
        let first = matrix * self.tiles();
        let tiles = first + rows.start / TILE_ROWS..first + rows.end.div_ceil(TILE_ROWS);
        tiles.start * self.tile_bytes..tiles.end * self.tile_bytes
    }
}

/// Place of the units of a tile, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Units {
    pub first: usize,
    /// Distance from one unit of the tile to the next.
    pub stride: usize,
}

const fn unit_bytes(format: WeightFormat) -> usize {
    match format {
        WeightFormat::Dense(float) => TILE_ROWS * float.bytes(),
        WeightFormat::Affine { bits, group, params } => TILE_ROWS * (group * bits / 8 + 2 * params.bytes()),
        WeightFormat::Blocks(format) => TILE_ROWS * Coding::of(format).unit_bytes(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const Q4: WeightFormat = WeightFormat::Affine { bits: 4, group: 64, params: FloatType::Bf16 };

    fn bytes(n: usize, k: usize, format: WeightFormat) -> usize {
        PackedLayout::new(n, k, format).unwrap().bytes()
    }

    #[test]
    fn packed_matrices_take_no_more_than_their_checkpoint_and_the_padding_of_the_last_tile() {
        for bits in [2, 3, 4, 5, 6, 8] {
            for group in [32, 64, 128] {
                let format = WeightFormat::Affine { bits, group, params: FloatType::F16 };
                let canonical = |n: usize, k: usize| n * k * bits / 8 + n * k / group * 4;
                assert_eq!(bytes(48, 384, format), canonical(48, 384));
                assert_eq!(bytes(33, 384, format), canonical(48, 384));
            }
        }
        assert_eq!(bytes(16, 7, WeightFormat::Dense(FloatType::F32)), 16 * 7 * 4);
        assert_eq!(bytes(17, 7, WeightFormat::Dense(FloatType::F16)), 32 * 7 * 2);
        assert_eq!(bytes(17, 7, WeightFormat::Dense(FloatType::Bf16)), 32 * 8 * 2);
    }

    #[test]
    fn blocks_take_little_more_than_in_their_file() {
        for format in BlockFormat::ALL {
            let packed = bytes(32, 512, WeightFormat::Blocks(format));
            let file = 32 * format.row_bytes(512).unwrap();
            assert!((file..=file * 105 / 100).contains(&packed), "{format}: {packed} of {file} bytes");
        }
    }

    #[test]
    fn rows_of_a_stack_tile_it() {
        let layout = PackedLayout::stacked(3, 40, 128, Q4).unwrap();
        assert_eq!(layout.row_bytes(0, 0..32).start, 0);
        assert_eq!(layout.row_bytes(0, 32..40).end, layout.row_bytes(1, 0..32).start);
        assert_eq!(layout.row_bytes(2, 32..40).end, layout.bytes());
    }

    #[test]
    fn units_of_a_pair_take_turns_and_a_tile_without_another_lies_alone() {
        for format in [Q4, WeightFormat::Blocks(BlockFormat::Q6K), WeightFormat::Dense(FloatType::F32)] {
            let layout = PackedLayout::new(40, 512, format).unwrap();
            let (unit, tiles) = (layout.unit_bytes(), layout.tiles());
            let mut places: Vec<usize> = (0..tiles)
                .flat_map(|tile| {
                    let Units { first, stride } = layout.units(tile, tiles);
                    (0..layout.tile_bytes() / unit).map(move |u| first + u * stride)
                })
                .collect();
            assert_eq!(layout.units(2, tiles), Units { first: 2 * layout.tile_bytes(), stride: unit });
            let dense = matches!(format, WeightFormat::Dense(_));
            assert_eq!(places[1], if dense { unit } else { 2 * unit });
            places.sort_unstable();
            assert!(places.iter().enumerate().all(|(i, place)| *place == i * unit), "{format:?}");
        }
    }

    #[test]
    fn impossible_formats_are_refused_with_their_numbers() {
        let affine = |bits, group| WeightFormat::Affine { bits, group, params: FloatType::Bf16 };
        for (n, k, format, reason) in [
            (0, 64, Q4, "every size must be at least 1"),
            (5, 64, affine(7, 64), "bits must be 2, 3, 4, 5, 6 or 8"),
            (5, 64, affine(4, 16), "the group must be 32, 64 or 128"),
            (5, 96, Q4, "K must be a multiple of the group"),
            (usize::MAX / 4, 64, Q4, "the packed bytes exceed the address space"),
        ] {
            let message = PackedLayout::new(n, k, format).unwrap_err().to_string();
            assert!(message.contains(reason) && message.contains(&format!("[1, {n}, {k}]")), "{message}");
        }
    }
}
