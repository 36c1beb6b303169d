//! Weights of linear layers in the device's layout.
//!
//! Dense weights are stored row-major, as in the file; a single one of 16 bits has room for [`padded_rows`]. Quantised
//! weights are stored in tiles of 16 rows and 64 columns (`weight_tiles.cuh`): first the codes of all tiles, then, from
//! a multiple of 256 bytes, the scales of each row and group. With `Compute::Fp8` a copy in 8-bit floats follows, which
//! the device makes of the others: from a multiple of 256 bytes, e4m3 `[rows, cols]`, then f32 scales `[rows]`.

mod blocks;
mod coding;

use blocks::{BlockFields, taken_apart};
pub(super) use coding::Coding;
use half::{bf16, f16};
use keel_array::{ArrayError, Compute, DType, RowBlock, RowData, WeightFormat, WeightSpec};

/// Alignment of the parts of a weight, in bytes.
const PART_ALIGN: usize = 256;

/// Rows and columns of a tile of a packed weight.
pub(super) const TILE_ROWS: usize = 16;
pub(super) const TILE_COLS: usize = 64;

/// Rows of a matrix rounded up to a multiple of 8, for which cuBLASLt has fast kernels.
pub(super) fn padded_rows(rows: usize) -> usize {
    rows.checked_next_multiple_of(8).unwrap_or(rows)
}

/// Where the parts of a weight lie, in bytes from its start.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    /// First byte of scales and biases.
    pub pairs: usize,
    end: usize,
    /// Bytes of a unit of rows: 16 rows of a quantised weight, one row of any other.
    code_bytes: usize,
    pair_bytes: usize,
    /// The copy in 8-bit floats.
    pub fp8: Option<Fp8Copy>,
}

/// Where a weight's copy in 8-bit floats lies, in bytes from the weight's start.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fp8Copy {
    /// e4m3 `[rows, cols]`.
    pub codes: usize,
    /// f32 `[rows]`.
    pub scales: usize,
}

/// Whether the product of a quantised weight can be in 8-bit floats: cuBLASLt multiplies whole 16 rows and columns.
pub(super) fn suits_fp8(spec: &WeightSpec) -> bool {
    let is_whole = |extent: usize| extent.is_multiple_of(16);
    !matches!(spec.format, WeightFormat::Dense(_)) && is_whole(spec.rows) && is_whole(spec.cols)
}

/// Whether a weight has a copy in 8-bit floats. Products of a stack of experts do not go through cuBLASLt.
pub(super) fn keeps_fp8(spec: &WeightSpec) -> bool {
    spec.compute == Compute::Fp8 && spec.experts == 1 && suits_fp8(spec)
}

impl Layout {
    /// The layout of a weight. Sizes saturate for a weight that cannot be addressed; no allocation grants them.
    pub fn of(spec: &WeightSpec) -> Layout {
        let (units, code_bytes, pair_bytes) = match (Coding::of(spec.format), spec.format) {
            (Some(coding), _) => {
                let tiles = spec.cols.div_ceil(TILE_COLS);
                let code_bytes = tiles.saturating_mul(coding.code_bytes());
                (spec.rows.div_ceil(TILE_ROWS), code_bytes, coding.pair_bytes(tiles))
            }
            (None, WeightFormat::Dense(dtype)) => {
                let padded = spec.experts == 1 && matches!(dtype, DType::BF16 | DType::F16);
                let rows = if padded { padded_rows(spec.rows) } else { spec.rows };
                (rows, spec.cols.saturating_mul(dtype.size()), 0)
            }
            (None, format) => unreachable!("{format:?} lies in tiles"),
        };
        let units = spec.experts.saturating_mul(units);
        let codes = units.saturating_mul(code_bytes);
        let aligned = |end: usize| end.checked_next_multiple_of(PART_ALIGN).unwrap_or(usize::MAX);
        let pairs = aligned(codes);
        let end = pairs.saturating_add(units.saturating_mul(pair_bytes));
        let whole = Layout { pairs, end, code_bytes, pair_bytes, fp8: None };
        if !keeps_fp8(spec) {
            return whole;
        }
        let codes = aligned(end);
        let scales = aligned(codes.saturating_add(spec.rows.saturating_mul(spec.cols)));
        let end = scales.saturating_add(spec.rows.saturating_mul(size_of::<f32>()));
        Layout { end, fp8: Some(Fp8Copy { codes, scales }), ..whole }
    }

    /// Bytes of the weight.
    pub fn bytes(&self) -> usize {
        self.end
    }

    /// Codes, then scales and biases if there are any, then the copy in 8-bit floats and its scales. The first bytes of
    /// each belong to the weight's first `rows` rows, which end with a tile or with the weight.
    pub fn sections(&self, spec: &WeightSpec, rows: usize) -> Vec<Section> {
        let unit_rows = if self.pair_bytes == 0 { 1 } else { TILE_ROWS };
        let (first, units) = (rows.div_ceil(unit_rows), spec.experts * spec.rows.div_ceil(unit_rows));
        let section = |offset, unit: usize| Section { offset, first: first * unit, bytes: units * unit };
        let pairs = (self.pair_bytes > 0).then(|| section(self.pairs, self.pair_bytes));
        let of_rows = |offset, row: usize| Section { offset, first: rows * row, bytes: spec.rows * row };
        let fp8 = self.fp8.map(|at| [of_rows(at.codes, spec.cols), of_rows(at.scales, size_of::<f32>())]);
        std::iter::once(section(0, self.code_bytes)).chain(pairs).chain(fp8.into_iter().flatten()).collect()
    }

    /// Bytes from the start of the codes and of the pairs to those of a row, which begins a tile.
    pub fn tiles_before(&self, row: usize) -> [usize; 2] {
        [self.code_bytes, self.pair_bytes].map(|unit| row / TILE_ROWS * unit)
    }
}

/// A section of a packed weight: its place, its length, and the length of its first rows.
pub(super) struct Section {
    pub offset: usize,
    pub first: usize,
    pub bytes: usize,
}

/// Packed bytes, and their place in the weight.
pub(super) struct Packed {
    pub offset: usize,
    pub bytes: Vec<u8>,
}

/// Packs a block of rows, which the runtime has checked, into the device's layout.
pub(super) fn pack(spec: &WeightSpec, block: &RowBlock<'_>) -> Result<Vec<Packed>, ArrayError> {
    match (block.data, spec.format) {
        (RowData::Dense(bytes), _) => {
            let row = block.expert * spec.rows + block.first_row;
            Ok(vec![Packed { offset: row * Layout::of(spec).code_bytes, bytes: bytes.to_vec() }])
        }
        (RowData::Affine { codes, scales, biases }, WeightFormat::Affine { scale_dtype, .. }) => {
            let mut subs = vec![0; 2 * scales.len() * scale_dtype.size()];
            let pairs = scales.iter().zip(biases.iter());
            for (sub, (&scale, &bias)) in subs.chunks_exact_mut(2 * scale_dtype.size()).zip(pairs) {
                put(scale, scale_dtype, &mut sub[..scale_dtype.size()]);
                put(bias, scale_dtype, &mut sub[scale_dtype.size()..]);
            }
            pack_tiles(spec, block, &Rows { codes, subs: &subs, supers: &[] })
        }
        (RowData::Blocks(bytes), WeightFormat::Blocks(format)) => {
            let BlockFields { codes, subs, supers } = taken_apart(format, bytes);
            pack_tiles(spec, block, &Rows { codes: &codes, subs: &subs, supers: &supers })
        }
        (_, format) => unreachable!("rows coded otherwise than the weight, {format:?}"),
    }
}

/// Rows of a quantised weight: a code for each value `[rows, cols]`; as bytes, the scales of each group
/// `[rows, groups]` and the superscale that each 256 columns share.
struct Rows<'a> {
    codes: &'a [u8],
    subs: &'a [u8],
    supers: &'a [u8],
}

fn pack_tiles(spec: &WeightSpec, block: &RowBlock<'_>, rows: &Rows<'_>) -> Result<Vec<Packed>, ArrayError> {
    let Some(coding) = Coding::of(spec.format) else { unreachable!("dense rows have no tiles") };
    let layout = Layout::of(spec);
    let end = block.first_row + block.rows;
    if !block.first_row.is_multiple_of(TILE_ROWS) || !(end.is_multiple_of(TILE_ROWS) || end == spec.rows) {
        let reason = format!(
            "rows {}..{end} of {} are not whole tiles of {TILE_ROWS} rows",
            block.first_row, spec.rows
        );
        return Err(ArrayError::Argument { op: "pack_weight", reason });
    }
    let first = block.expert * spec.rows.div_ceil(TILE_ROWS) + block.first_row / TILE_ROWS;
    let tiles = Tiles { codes: rows.codes, rows: block.rows, cols: spec.cols, bits: coding.bits };
    Ok(vec![
        Packed { offset: first * layout.code_bytes, bytes: tiles.pack(layout.code_bytes) },
        Packed {
            offset: layout.pairs + first * layout.pair_bytes,
            bytes: coding.pack_pairs(rows, block.rows, layout.pair_bytes),
        },
    ])
}

/// Codes `[rows, cols]` to be laid out in tiles.
struct Tiles<'a> {
    codes: &'a [u8],
    rows: usize,
    cols: usize,
    bits: usize,
}

impl Tiles<'_> {
    /// Packs all row tiles on all cores of the machine, because most of a large model is packed this way.
    fn pack(&self, row_tile_bytes: usize) -> Vec<u8> {
        let tiles = self.rows.div_ceil(TILE_ROWS);
        let mut packed = vec![0; tiles * row_tile_bytes];
        let workers = std::thread::available_parallelism().map_or(1, usize::from).min(tiles);
        let share = tiles.div_ceil(workers);
        std::thread::scope(|scope| {
            for (worker, out) in packed.chunks_mut(share * row_tile_bytes).enumerate() {
                scope.spawn(move || {
                    for (i, out) in out.chunks_mut(row_tile_bytes).enumerate() {
                        self.pack_row_tile(worker * share + i, out);
                    }
                });
            }
        });
        packed
    }

    fn pack_row_tile(&self, row_tile: usize, out: &mut [u8]) {
        for (col_tile, out) in out.chunks_exact_mut(TILE_ROWS * TILE_COLS / 8 * self.bits).enumerate() {
            let mut tile = [[0u8; TILE_COLS]; TILE_ROWS];
            let (first_row, first_col) = (row_tile * TILE_ROWS, col_tile * TILE_COLS);
            let cols = TILE_COLS.min(self.cols - first_col);
            for (row, tile) in tile.iter_mut().enumerate().take(self.rows - first_row) {
                let from = (first_row + row) * self.cols + first_col;
                tile[..cols].copy_from_slice(&self.codes[from..from + cols]);
            }
            pack_tile(&tile, self.bits, out);
        }
    }
}

/// Packs one tile; `out` is zeros. `weight_tiles.cuh` defines the layout.
fn pack_tile(tile: &[[u8; TILE_COLS]; TILE_ROWS], bits: usize, out: &mut [u8]) {
    for lane in 0..32 {
        let (g, t) = (lane / 4, lane % 4);
        for half in 0..2 {
            for slot in 0..16 {
                let code = tile[g + 8 * half][32 * (slot / 8) + 8 * t + slot % 8];
                let (r, b) = (slot / 4, slot % 4);
                if bits == 8 {
                    out[512 * half + 16 * lane + 4 * r + b] = code;
                    continue;
                }
                let (mut plane, mut low) = (0, 0);
                if bits & 4 != 0 {
                    out[16 * lane + 4 * (2 * half + r / 2) + b] |= (code & 15) << (4 * (r % 2));
                    (plane, low) = (512, 4);
                }
                if bits & 2 != 0 {
                    out[plane + 8 * lane + 4 * half + b] |= (code >> low & 3) << (2 * r);
                    (plane, low) = (plane + 256, low + 2);
                }
                if bits & 1 != 0 {
                    out[plane + 4 * lane + b] |= (code >> low & 1) << (4 * half + r);
                }
            }
        }
    }
}

fn put(value: f32, dtype: DType, out: &mut [u8]) {
    match dtype {
        DType::F16 => out.copy_from_slice(&f16::from_f32(value).to_le_bytes()),
        DType::BF16 => out.copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
        _ => out.copy_from_slice(&value.to_le_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keel_array::Compute;

    /// Reads a code back as `four_codes` of `weight_tiles.cuh` does.
    fn read(packed: &[u8], bits: usize, row: usize, col: usize) -> u8 {
        let (g, half, t) = (row % 8, row / 8, col % 32 / 8);
        let (lane, slot) = (4 * g + t, 8 * (col / 32) + col % 8);
        let word = |i: usize| u32::from_le_bytes(packed[4 * i..4 * i + 4].try_into().expect("four bytes"));
        let (r, byte) = (slot / 4, 8 * (slot % 4));
        if bits == 8 {
            return (word(128 * half + 4 * lane + r) >> byte) as u8;
        }
        let (mut code, mut plane, mut low) = (0, 0, 0);
        if bits & 4 != 0 {
            code = word(4 * lane + 2 * half + r / 2) >> (byte + 4 * (r % 2)) & 15;
            (plane, low) = (128, 4);
        }
        if bits & 2 != 0 {
            code |= (word(plane + 2 * lane + half) >> (byte + 2 * r) & 3) << low;
            (plane, low) = (plane + 64, low + 2);
        }
        if bits & 1 != 0 {
            code |= (word(plane + lane) >> (byte + 4 * half + r) & 1) << low;
        }
        code as u8
    }

    #[test]
    fn every_code_of_a_tile_is_found_again() {
        for bits in [2, 3, 4, 5, 6, 8] {
            let tile: [[u8; TILE_COLS]; TILE_ROWS] = std::array::from_fn(|row| {
                std::array::from_fn(|col| ((row * 131 + col * 37 + col / 9) % (1 << bits)) as u8)
            });
            let mut packed = vec![0; TILE_ROWS * TILE_COLS / 8 * bits];
            pack_tile(&tile, bits, &mut packed);
            for (row, codes) in tile.iter().enumerate() {
                for (col, &code) in codes.iter().enumerate() {
                    assert_eq!(read(&packed, bits, row, col), code, "{bits} bits, row {row}, column {col}");
                }
            }
        }
    }

    #[test]
    fn a_dense_weight_has_room_for_rows_that_are_multiplied_and_not_used() {
        let bytes = |experts, rows, dtype| {
            let format = WeightFormat::Dense(dtype);
            Layout::of(&WeightSpec { experts, rows, cols: 128, format, compute: Compute::Auto }).bytes()
        };
        for dtype in [DType::BF16, DType::F16] {
            assert_eq!([256, 257, 264, 265].map(|rows| bytes(1, rows, dtype) / 256), [256, 264, 264, 272]);
        }
        assert_eq!(bytes(3, 257, DType::BF16), 3 * 257 * 256, "experts lie one after the other");
        assert_eq!(bytes(1, 257, DType::F32), 257 * 512, "f32 never goes through the library");
    }

    #[test]
    fn a_copy_in_8_bits_follows_the_scales() {
        let format = WeightFormat::Affine { bits: 4, group_size: 64, scale_dtype: DType::BF16 };
        let spec = WeightSpec { experts: 1, rows: 48, cols: 192, format, compute: Compute::Fp8 };
        let layout = Layout::of(&spec);
        let copy = layout.fp8.expect("a copy");
        // Three row tiles of three column tiles: 512 bytes of codes and 64 of scales each.
        assert_eq!((layout.pairs, copy.codes), (9 * 512, (9 * 512 + 9 * 64usize).next_multiple_of(256)));
        assert_eq!(copy.scales, (copy.codes + 48 * 192).next_multiple_of(256));
        assert_eq!(layout.bytes(), copy.scales + 48 * 4);
        let sections = layout.sections(&spec, 16);
        let of_copy = sections[2..].iter().map(|section| (section.offset, section.first, section.bytes));
        assert!(of_copy.eq([(copy.codes, 16 * 192, 48 * 192), (copy.scales, 16 * 4, 48 * 4)]));
        assert_eq!(layout.tiles_before(32), [2 * 3 * 512, 2 * layout.pair_bytes]);

        let without = |spec: WeightSpec| Layout::of(&spec).fp8.is_none();
        assert!(without(WeightSpec { compute: Compute::PrefillFp8, ..spec }));
        assert!(without(WeightSpec { experts: 2, ..spec }), "cuBLASLt does not multiply experts");
        assert!(without(WeightSpec { rows: 40, ..spec }), "not whole 16 rows");
        assert!(without(WeightSpec { format: WeightFormat::Dense(DType::BF16), ..spec }));
    }

    #[test]
    fn a_block_of_rows_goes_to_the_tiles_of_its_expert() {
        let format = WeightFormat::Affine { bits: 5, group_size: 32, scale_dtype: DType::BF16 };
        let spec = WeightSpec { experts: 3, rows: 35, cols: 96, format, compute: Compute::Auto };
        let layout = Layout::of(&spec);
        let (codes, pairs) = (vec![1; 19 * 96], vec![0.5; 19 * 3]);
        let data = RowData::Affine { codes: &codes, scales: &pairs, biases: &pairs };
        let all = pack(&spec, &RowBlock { expert: 2, first_row: 16, rows: 19, data }).expect("whole tiles");
        // The weight has 2 column tiles of 5 bits and 3 experts of 3 row tiles. The block has the last 2 of the 9.
        assert_eq!((all[0].offset, all[0].bytes.len()), (7 * 2 * 640, 2 * 2 * 640));
        assert_eq!((all[1].offset, all[1].bytes.len()), (layout.pairs + 7 * 256, 2 * 256));
        assert_eq!(layout.bytes(), layout.pairs + 9 * 256);
        let [codes, pairs] = &layout.sections(&spec, 32)[..] else { panic!("codes and pairs") };
        assert_eq!((codes.offset, codes.first, codes.bytes), (0, 2 * 2 * 640, 9 * 2 * 640));
        assert_eq!((pairs.offset, pairs.first, pairs.bytes), (layout.pairs, 2 * 256, 9 * 256));
        let uneven = RowBlock { expert: 0, first_row: 8, rows: 19, data };
        assert!(pack(&spec, &uneven).is_err());
    }
}
