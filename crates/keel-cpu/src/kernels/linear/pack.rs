//! Packs weights into their layout, a few rows at a time, and unpacks single rows.

use super::coding::{BlockFields, Coding, Scales, scale_and_offset};
use super::format::{BLOCK, FloatType, PackedLayout, TILE_ROWS, Units, WeightFormat};
use crate::isa::Isa;
use crate::simd::{self, LANES, Simd, VectorKernel};
use half::{bf16, f16};
use keel_array::BlockFormat;

/// Rows of a weight matrix as a checkpoint holds them, unpacked: `R` rows of `K` inputs.
#[derive(Clone, Copy, Debug)]
pub enum Rows<'a> {
    /// `[R, K]`, rounded to nearest even where the format is narrower.
    Dense(&'a [f32]),
    /// `weight = scale * quant + bias`.
    Affine {
        /// `[R, K]`, each below `2^bits`.
        quants: &'a [u8],
        /// `[R, K / group]`
        scales: &'a [f32],
        /// `[R, K / group]`
        biases: &'a [f32],
    },
    /// The blocks of each row, as in the file.
    Blocks(&'a [u8]),
}

/// Packs `rows`, which start at the edge of a pair of tiles, into `out`: their bytes by [`PackedLayout::row_bytes`].
/// Rows can be packed in any order and from any thread; 32 at a time are enough.
///
/// # Panics
/// If the kind of rows is not the layout's, or lengths do not fit each other.
pub fn pack(layout: &PackedLayout, rows: Rows<'_>, out: &mut [u8]) {
    let k = layout.k();
    let count = match (rows, layout.format()) {
        (Rows::Dense(values), WeightFormat::Dense(_)) => values.len() / k,
        (Rows::Affine { quants, scales, biases }, WeightFormat::Affine { group, .. }) => {
            let params = quants.len() / group;
            assert!(scales.len() == params && biases.len() == params, "one scale and bias for each group");
            quants.len() / k
        }
        (Rows::Blocks(bytes), WeightFormat::Blocks(format)) => {
            bytes.len() / format.bytes() * format.values() / k
        }
        _ => panic!("rows {:?} packed as {:?}", std::mem::discriminant(&rows), layout.format()),
    };
    let tiles = count.div_ceil(TILE_ROWS);
    assert_eq!(out.len(), tiles * layout.tile_bytes(), "bytes for {count} rows");
    out.fill(0);
    for tile in 0..tiles {
        let tile_rows = tile * TILE_ROWS..count.min((tile + 1) * TILE_ROWS);
        let units = layout.units(tile, tiles);
        let out = &mut out[units.first..];
        match (rows, layout.format()) {
            (Rows::Dense(values), WeightFormat::Dense(float)) => {
                pack_dense(&values[tile_rows.start * k..tile_rows.end * k], k, float, out);
            }
            (Rows::Affine { quants, scales, biases }, WeightFormat::Affine { bits, group, params }) => {
                let groups = tile_rows.start * k / group..tile_rows.end * k / group;
                let quants = &quants[tile_rows.start * k..tile_rows.end * k];
                pack_quants(quants, k, bits, group, units, out);
                pack_params(&scales[groups.clone()], k / group, params, group * bits * 2, units, out);
                let biases_at = group * bits * 2 + TILE_ROWS * params.bytes();
                pack_params(&biases[groups], k / group, params, biases_at, units, out);
            }
            (Rows::Blocks(bytes), WeightFormat::Blocks(format)) => {
                let row_bytes = k / format.values() * format.bytes();
                let rows = &bytes[tile_rows.start * row_bytes..tile_rows.end * row_bytes];
                pack_blocks(format, rows, row_bytes, units.stride, layout.unit_bytes(), out);
            }
            _ => unreachable!("checked above"),
        }
    }
}

/// Packs the blocks of a tile's rows.
fn pack_blocks(
    format: BlockFormat,
    rows: &[u8],
    row_bytes: usize,
    stride: usize,
    unit_bytes: usize,
    out: &mut [u8],
) {
    // The format is a constant in each arm, so shifts and masks are constants, too: packing takes most of the load
    // time.
    macro_rules! for_each_format {
        ($($name:ident)*) => {
            match format {
                $(BlockFormat::$name => pack_blocks_of(BlockFormat::$name, rows, row_bytes, stride, unit_bytes, out),)*
            }
        };
    }
    for_each_format!(Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 IQ4NL MXFP4 Q2K Q3K Q4K Q5K Q6K IQ4XS);
}

/// Like [`pack_blocks`]. A unit is written for all rows before the next unit, because its bytes lie together.
#[inline(always)]
fn pack_blocks_of(
    format: BlockFormat,
    rows: &[u8],
    row_bytes: usize,
    stride: usize,
    unit_bytes: usize,
    out: &mut [u8],
) {
    let coding = Coding::of(format);
    for i in 0..row_bytes / format.bytes() {
        let unit = &mut out[i * stride..][..unit_bytes];
        for (row, blocks) in rows.chunks_exact(row_bytes).enumerate() {
            let block = &blocks[i * format.bytes()..(i + 1) * format.bytes()];
            pack_fields(&coding, &BlockFields::of(format, block), row, unit);
        }
    }
}

fn pack_dense(values: &[f32], k: usize, float: FloatType, out: &mut [u8]) {
    for (row, values) in values.chunks_exact(k).enumerate() {
        for (i, value) in values.iter().enumerate() {
            put_float(out, dense_at(float, row, i), float, *value);
        }
    }
}

/// Byte offset of input `i` of a row in a dense tile.
fn dense_at(float: FloatType, row: usize, i: usize) -> usize {
    match float {
        FloatType::Bf16 => (i / 2 * TILE_ROWS + row) * 4 + i % 2 * 2,
        FloatType::F32 | FloatType::F16 => (i * TILE_ROWS + row) * float.bytes(),
    }
}

/// One field of a quantised value: its `width` bits from bit `low` on. The field's plane of vectors starts `at` bytes
/// into the block.
#[derive(Clone, Copy)]
struct Plane {
    width: usize,
    low: usize,
    at: usize,
}

/// The planes of a block, widest first; together `64 * bits` bytes.
fn planes(bits: usize) -> &'static [Plane] {
    const fn one(width: usize) -> Plane {
        Plane { width, low: 0, at: 0 }
    }
    const fn above(width: usize, low: usize) -> Plane {
        Plane { width, low, at: 64 * low }
    }
    match bits {
        2 => &const { [one(2)] },
        3 => &const { [one(2), above(1, 2)] },
        4 => &const { [one(4)] },
        5 => &const { [one(4), above(1, 4)] },
        6 => &const { [one(4), above(2, 4)] },
        8 => &const { [one(8)] },
        _ => unreachable!("the layout has checked the bits"),
    }
}

impl Plane {
    /// Byte offset in the block of the four fields of `quad < 8` of a row, and the shift of each within its byte.
    fn fields(self, row: usize, quad: usize) -> (usize, usize) {
        let fields = 8 / self.width;
        (self.at + quad / fields * 64 + 4 * row, quad % fields * self.width)
    }

    /// The mask of four fields, unshifted.
    fn mask(self) -> u32 {
        ((1 << self.width) - 1) * 0x0101_0101
    }
}

/// Packs one row's codes of a block of 32 inputs. Each word of a plane is completed, then written once.
#[inline(always)]
fn pack_codes(bits: usize, codes: &[u8], row: usize, block: &mut [u8]) {
    let (quads, _) = codes.as_chunks::<4>();
    for plane in planes(bits) {
        for (i, quads) in quads.chunks_exact(8 / plane.width).enumerate() {
            let field = |quad: &[u8; 4]| (u32::from_le_bytes(*quad) >> plane.low) & plane.mask();
            let word = quads
                .iter()
                .rev()
                .fold(0, |word: u32, quad| word.wrapping_shl(plane.width as u32) | field(quad));
            let at = plane.at + i * 64 + 4 * row;
            block[at..at + 4].copy_from_slice(&word.to_le_bytes());
        }
    }
}

/// Packs one row's part of a unit.
#[inline(always)]
fn pack_fields(coding: &Coding, fields: &BlockFields, row: usize, unit: &mut [u8]) {
    let (codes, params) = unit.split_at_mut(TILE_ROWS * coding.code_bytes());
    for (block, codes) in codes.chunks_exact_mut(64 * coding.bits).zip(fields.codes.chunks_exact(BLOCK)) {
        pack_codes(coding.bits, codes, row, block);
    }
    let (head, bytes) = params.split_at_mut(TILE_ROWS * coding.scales.head_bytes());
    if coding.scales == Scales::Exponent {
        head[row] = fields.head[0];
    } else {
        let halves = fields.head.chunks_exact(2);
        for (head, half) in head.chunks_exact_mut(2 * TILE_ROWS).zip(halves) {
            head[2 * row..2 * row + 2].copy_from_slice(half);
        }
    }
    let groups = coding.groups();
    let scales = fields.scales[..groups.min(16)].iter().chain(&fields.mins[..groups.min(16)]);
    for (bytes, scale) in bytes.chunks_exact_mut(TILE_ROWS).zip(scales) {
        bytes[row] = *scale;
    }
}

fn pack_quants(quants: &[u8], k: usize, bits: usize, group: usize, units: Units, out: &mut [u8]) {
    assert!(quants.iter().all(|q| usize::from(*q) < 1 << bits), "a quantised value of more than {bits} bits");
    for (row, quants) in quants.chunks_exact(k).enumerate() {
        for (block, quants) in quants.chunks_exact(BLOCK).enumerate() {
            let (unit, block) = (block / (group / BLOCK), block % (group / BLOCK));
            let at = unit * units.stride + block * bits * 64;
            pack_codes(bits, quants, row, &mut out[at..at + bits * 64]);
        }
    }
}

fn pack_params(values: &[f32], groups: usize, params: FloatType, at: usize, units: Units, out: &mut [u8]) {
    for (row, values) in values.chunks_exact(groups).enumerate() {
        for (group, value) in values.iter().enumerate() {
            put_float(out, group * units.stride + at + row * params.bytes(), params, *value);
        }
    }
}

fn put_float(out: &mut [u8], at: usize, float: FloatType, value: f32) {
    match float {
        FloatType::F32 => out[at..at + 4].copy_from_slice(&value.to_le_bytes()),
        FloatType::Bf16 => out[at..at + 2].copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
        FloatType::F16 => out[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes()),
    }
}

fn get_float(bytes: &[u8], at: usize, float: FloatType) -> f32 {
    let half = [bytes[at], bytes[at + 1]];
    match float {
        FloatType::F32 => f32::from_le_bytes([half[0], half[1], bytes[at + 2], bytes[at + 3]]),
        FloatType::Bf16 => bf16::from_le_bytes(half).to_f32(),
        FloatType::F16 => f16::from_le_bytes(half).to_f32(),
    }
}

/// Writes row `row` of matrix `matrix` as f32 to `out`, `[K]`: an embedding from a table whose weights also serve as
/// the output head. `scale * q + bias` is rounded once.
///
/// # Panics
/// If the row is not in the stack, `bytes` is not the whole stack, or `out` is not `K` long.
pub fn unpack_row(isa: Isa, layout: &PackedLayout, bytes: &[u8], matrix: usize, row: usize, out: &mut [f32]) {
    assert!(bytes.len() == layout.bytes() && out.len() == layout.k(), "lengths do not fit the layout");
    assert!(matrix < layout.matrices() && row < layout.n(), "row {row} of matrix {matrix}");
    let Units { first, stride } = layout.units(row / TILE_ROWS, layout.tiles());
    let (tile, row) = (&bytes[matrix * layout.tiles() * layout.tile_bytes() + first..], row % TILE_ROWS);
    let units = |len: usize| tile.chunks(stride).map(move |unit| &unit[..len]);
    match layout.format() {
        WeightFormat::Dense(float) => {
            for (i, out) in out.iter_mut().enumerate() {
                *out = get_float(tile, dense_at(float, row, i), float);
            }
        }
        WeightFormat::Blocks(format) => {
            let coding = Coding::of(format);
            for (unit, out) in units(layout.unit_bytes()).zip(out.chunks_exact_mut(coding.inputs())) {
                let (blocks, params) = unit.split_at(TILE_ROWS * coding.code_bytes());
                for (i, out) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                    let (scale, offset) = scale_and_offset(&coding, params, 4 * i / coding.group, row);
                    let (block, quad) = (i / (BLOCK / 4), i % (BLOCK / 4));
                    let block = &blocks[block * 64 * coding.bits..(block + 1) * 64 * coding.bits];
                    *out = quants(block, coding.bits, row, quad).map(|code| {
                        let scaled = scale * coding.level(code);
                        if coding.scales.has_offset() { scaled + offset } else { scaled }
                    });
                }
            }
        }
        WeightFormat::Affine { bits, group, params } => {
            for (unit, out) in units(layout.unit_bytes()).zip(out.chunks_exact_mut(group)) {
                let (blocks, tail) = unit.split_at(group * bits * 2);
                let scale = get_float(tail, row * params.bytes(), params);
                let bias = get_float(tail, (TILE_ROWS + row) * params.bytes(), params);
                simd::run_at(isa, UnpackGroup { blocks, bits, row, scale, bias, out });
            }
        }
    }
}

/// A group of a row of affine weights.
struct UnpackGroup<'a> {
    blocks: &'a [u8],
    bits: usize,
    row: usize,
    scale: f32,
    bias: f32,
    out: &'a mut [f32],
}

impl VectorKernel for UnpackGroup<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let UnpackGroup { blocks, bits, row, scale, bias, out } = self;
        for (i, out) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let (block, quad) = (i / (BLOCK / 4), i % (BLOCK / 4));
            let block = &blocks[block * 64 * bits..(block + 1) * 64 * bits];
            for (out, q) in out.iter_mut().zip(quants(block, bits, row, quad)) {
                *out = f32::from(q);
            }
        }
        let (scale, bias) = (s.splat(scale), s.splat(bias));
        for out in out.as_chunks_mut::<LANES>().0 {
            s.store(s.fma(scale, s.load(out), bias), out);
        }
    }
}

/// Inputs `4 * quad .. 4 * quad + 4` of a row of a block.
#[inline(always)]
fn quants(block: &[u8], bits: usize, row: usize, quad: usize) -> [u8; 4] {
    let merged = planes(bits).iter().fold(0, |quants, plane| {
        let (at, shift) = plane.fields(row, quad);
        let word = u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
        quants | (((word >> shift) & plane.mask()) << plane.low)
    });
    merged.to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_comes_back_from_every_format() {
        let (n, k) = (37, 384);
        for bits in [2usize, 3, 4, 5, 6, 8] {
            for (group, params) in [(32, FloatType::F32), (64, FloatType::Bf16), (128, FloatType::F16)] {
                let layout =
                    PackedLayout::stacked(2, n, k, WeightFormat::Affine { bits, group, params }).unwrap();
                let quants: Vec<u8> =
                    (0..n * k).map(|i| ((i * 2654435761) >> 7) as u8 & ((1 << bits) - 1) as u8).collect();
                // Exact in every parameter type.
                let scales: Vec<f32> = (0..n * k / group).map(|i| (i % 29) as f32 / 16.0).collect();
                let biases: Vec<f32> = (0..n * k / group).map(|i| (i % 31) as f32 - 15.0).collect();
                let mut bytes = vec![0xa5; layout.bytes()];
                for (rows, matrix) in [(32..n, 1), (0..32, 1)] {
                    let (a, b) = (rows.start * k, rows.end * k);
                    let source = Rows::Affine {
                        quants: &quants[a..b],
                        scales: &scales[a / group..b / group],
                        biases: &biases[a / group..b / group],
                    };
                    pack(&layout, source, &mut bytes[layout.row_bytes(matrix, rows)]);
                }
                let mut row = vec![0.0; k];
                for r in 0..n {
                    unpack_row(Isa::best(), &layout, &bytes, 1, r, &mut row);
                    for (i, value) in row.iter().enumerate() {
                        let g = (r * k + i) / group;
                        let expected = scales[g] * f32::from(quants[r * k + i]) + biases[g];
                        assert_eq!(*value, expected, "{bits} bits, group {group}, row {r}, input {i}");
                    }
                }
            }
        }
    }

    #[test]
    fn blocks_come_back_as_the_reference_decodes_them() {
        let (n, k) = (37, 512);
        for (seed, format) in BlockFormat::ALL.into_iter().enumerate() {
            // Random bytes: some scales are NaN, infinite or subnormal.
            let row_bytes = format.row_bytes(k).unwrap();
            let mut state = seed as u64;
            let mut next = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 56) as u8
            };
            let bytes: Vec<u8> = (0..n * row_bytes).map(|_| next()).collect();
            let layout = PackedLayout::stacked(2, n, k, WeightFormat::Blocks(format)).unwrap();
            let mut packed = vec![0xa5; layout.bytes()];
            for rows in [32..n, 0..32] {
                let source = Rows::Blocks(&bytes[rows.start * row_bytes..rows.end * row_bytes]);
                pack(&layout, source, &mut packed[layout.row_bytes(1, rows)]);
            }
            let (mut got, mut want) = (vec![0.0f32; k], vec![0.0f32; k]);
            for row in 0..n {
                unpack_row(Isa::best(), &layout, &packed, 1, row, &mut got);
                format.decode(&bytes[row * row_bytes..], &mut want);
                for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                    let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
                    assert!(same, "{format}, row {row}, input {i}: {got} and {want}");
                }
            }
        }
    }

    #[test]
    fn dense_rows_are_rounded_to_the_type_and_come_back() {
        let (n, k) = (19, 7);
        let values: Vec<f32> = (0..n * k).map(|i| (i as f32 * 0.37).sin()).collect();
        for (float, round) in [
            (FloatType::F32, (|x| x) as fn(f32) -> f32),
            (FloatType::Bf16, |x| bf16::from_f32(x).to_f32()),
            (FloatType::F16, |x| f16::from_f32(x).to_f32()),
        ] {
            let layout = PackedLayout::new(n, k, WeightFormat::Dense(float)).unwrap();
            let mut bytes = vec![0xa5; layout.bytes()];
            pack(&layout, Rows::Dense(&values), &mut bytes);
            let mut row = vec![0.0; k];
            for r in 0..n {
                unpack_row(Isa::best(), &layout, &bytes, 0, r, &mut row);
                let expected: Vec<f32> = values[r * k..(r + 1) * k].iter().map(|x| round(*x)).collect();
                assert_eq!(row, expected);
            }
        }
    }
}
