//! Block codings in the kernels' form: planes of small codes, and the scales of each group of inputs.
//!
//! A coding's value is `scale * (level - zero) + offset`, where `level` is the code or its entry in a table. Files
//! interleave codes and scales in 13 ways. Here all have one layout with different parameters, and every value is
//! exactly that of [`BlockFormat::decode`].

use super::format::BLOCK;
use half::f16;
use keel_array::BlockFormat;

/// Bits of a level from a table. The bits of levels bound the terms of the dot products.
const LEVEL_BITS: usize = 8;

/// The parameters of a coding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Coding {
    /// Bits of a code.
    pub bits: usize,
    /// Inputs that share a scale: 16 or 32.
    pub group: usize,
    /// Blocks of 32 inputs in a unit, which has one set of parameters.
    pub blocks: usize,
    pub scales: Scales,
    /// Subtracted from each level. Zero where there are offsets.
    pub zero: i32,
    /// Levels of the codes; `None`: each code is its level.
    pub table: Option<[u8; 16]>,
}

/// The parameters of a unit, `[16]` of each; `d`, `dmin` and `m` are f16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Scales {
    /// `d`
    Half,
    /// `d`, `m`: the offset.
    HalfAndOffset,
    /// A byte `e`: the scale is `2^(e - 128)`.
    Exponent,
    /// `d`, then for each group a signed byte `s`: the scale is `d * s`.
    Signed,
    /// `d`, `dmin`, then a byte `s` for each group, then a byte `m` for each: scale `d * s`, offset `-dmin * m`.
    WithMins,
    /// `d`, `dmin`, then for each group a byte of `s` (low half) and `m` (high half).
    Nibbles,
}

impl Scales {
    /// Whether values have an offset.
    pub(in super::super) const fn has_offset(self) -> bool {
        matches!(self, Scales::HalfAndOffset | Scales::WithMins | Scales::Nibbles)
    }

    /// Bytes of the floats (or of the exponent), for one row.
    pub(in super::super) const fn head_bytes(self) -> usize {
        match self {
            Scales::Exponent => 1,
            Scales::Half | Scales::Signed => 2,
            Scales::HalfAndOffset | Scales::WithMins | Scales::Nibbles => 4,
        }
    }

    /// Bytes of each group, for one row.
    const fn group_bytes(self) -> usize {
        match self {
            Scales::Half | Scales::HalfAndOffset | Scales::Exponent => 0,
            Scales::Signed | Scales::Nibbles => 1,
            Scales::WithMins => 2,
        }
    }
}

/// The levels of `IQ4_NL` and `IQ4_XS`, plus 128.
const NONLINEAR: [u8; 16] = [1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241];

/// Twice the levels of a 4-bit float, plus 16.
const FP4_DOUBLED: [u8; 16] = [16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4];

impl Coding {
    /// The parameters of `format`.
    pub(in super::super) const fn of(format: BlockFormat) -> Coding {
        const fn short(bits: usize, scales: Scales, zero: i32) -> Coding {
            Coding { bits, group: 32, blocks: 1, scales, zero, table: None }
        }
        const fn superblock(bits: usize, group: usize, scales: Scales, zero: i32) -> Coding {
            Coding { bits, group, blocks: 8, scales, zero, table: None }
        }
        match format {
            BlockFormat::Q4_0 => short(4, Scales::Half, 8),
            BlockFormat::Q4_1 => short(4, Scales::HalfAndOffset, 0),
            BlockFormat::Q5_0 => short(5, Scales::Half, 16),
            BlockFormat::Q5_1 => short(5, Scales::HalfAndOffset, 0),
            BlockFormat::Q8_0 => short(8, Scales::Half, 128),
            BlockFormat::IQ4NL => Coding { table: Some(NONLINEAR), ..short(4, Scales::Half, 128) },
            BlockFormat::MXFP4 => Coding { table: Some(FP4_DOUBLED), ..short(4, Scales::Exponent, 16) },
            BlockFormat::Q2K => superblock(2, 16, Scales::Nibbles, 0),
            BlockFormat::Q3K => superblock(3, 16, Scales::Signed, 4),
            BlockFormat::Q4K => superblock(4, 32, Scales::WithMins, 0),
            BlockFormat::Q5K => superblock(5, 32, Scales::WithMins, 0),
            BlockFormat::Q6K => superblock(6, 16, Scales::Signed, 32),
            BlockFormat::IQ4XS => Coding { table: Some(NONLINEAR), ..superblock(4, 32, Scales::Signed, 128) },
        }
    }

    /// Inputs of a unit.
    pub(in super::super) const fn inputs(&self) -> usize {
        self.blocks * BLOCK
    }

    /// Groups of a unit.
    pub(in super::super) const fn groups(&self) -> usize {
        self.inputs() / self.group
    }

    /// Bytes of a unit's codes, for one row.
    pub(in super::super) const fn code_bytes(&self) -> usize {
        self.inputs() * self.bits / 8
    }

    /// Bytes of a unit, for one row.
    pub(in super::super) const fn unit_bytes(&self) -> usize {
        self.code_bytes() + self.scales.head_bytes() + self.groups() * self.scales.group_bytes()
    }

    /// Bits of a level.
    pub(in super::super) const fn level_bits(&self) -> usize {
        if self.table.is_some() { LEVEL_BITS } else { self.bits }
    }

    /// The level of a code, minus the zero.
    pub(super) fn level(&self, code: u8) -> f32 {
        let level = self.table.map_or(code, |table| table[usize::from(code)]);
        (i32::from(level) - self.zero) as f32
    }
}

/// One block of a file, taken apart.
pub(super) struct BlockFields {
    /// One code for each input.
    pub codes: [u8; 256],
    /// The floats or the exponent, as a unit stores them.
    pub head: [u8; 4],
    /// For each group.
    pub scales: [u8; 16],
    /// For each group, with [`Scales::WithMins`].
    pub mins: [u8; 16],
}

impl BlockFields {
    /// Takes a block apart. Inlined, because with a constant format the compiler turns the loops into vectors.
    #[inline(always)]
    pub(super) fn of(format: BlockFormat, block: &[u8]) -> BlockFields {
        let block = &block[..format.bytes()];
        let mut fields = BlockFields { codes: [0; 256], head: [0; 4], scales: [0; 16], mins: [0; 16] };
        let codes = &mut fields.codes[..format.values()];
        match format {
            BlockFormat::Q4_0 | BlockFormat::IQ4NL => nibbles(&block[2..], codes),
            BlockFormat::Q4_1 => nibbles(&block[4..], codes),
            BlockFormat::MXFP4 => nibbles(&block[1..], codes),
            BlockFormat::Q5_0 => five_bits(&block[2..], codes),
            BlockFormat::Q5_1 => five_bits(&block[4..], codes),
            BlockFormat::Q8_0 => fill(codes, |i| block[2 + i] ^ 128),
            BlockFormat::Q2K => {
                two_bits(&block[16..80], codes);
                fields.scales.copy_from_slice(&block[..16]);
            }
            BlockFormat::Q3K => {
                two_bits(&block[32..96], codes);
                add_bit(&block[..32], 2, codes);
                let packed = &block[96..108];
                fill(&mut fields.scales, |i| {
                    let upper = packed[8 + i % 4] >> (i / 4 * 2) & 3;
                    (packed[i % 8] >> (i / 8 * 4) & 15 | upper << 4).wrapping_sub(32)
                });
            }
            BlockFormat::Q4K => {
                four_bits(&block[16..], codes);
                scales_and_mins(&block[4..16], &mut fields);
            }
            BlockFormat::Q5K => {
                four_bits(&block[48..], codes);
                add_bit(&block[16..48], 4, codes);
                scales_and_mins(&block[4..16], &mut fields);
            }
            BlockFormat::Q6K => {
                let (low, high) = block.split_at(128);
                two_bits(high, codes);
                for (low, codes) in low.chunks_exact(64).zip(codes.chunks_exact_mut(128)) {
                    let (first, second) = codes.split_at_mut(64);
                    for ((low, first), second) in low.iter().zip(first).zip(second) {
                        *first = low & 15 | *first << 4;
                        *second = low >> 4 | *second << 4;
                    }
                }
                fields.scales.copy_from_slice(&block[192..208]);
            }
            BlockFormat::IQ4XS => {
                for (codes, quants) in codes.chunks_exact_mut(32).zip(block[8..].chunks_exact(16)) {
                    nibbles(quants, codes);
                }
                let upper = u16::from_le_bytes([block[2], block[3]]);
                fill(&mut fields.scales[..8], |i| {
                    let low = block[4 + i / 2] >> (i % 2 * 4) & 15;
                    (low | ((upper >> (i * 2) & 3) as u8) << 4).wrapping_sub(32)
                });
            }
        }
        let head_at = match format {
            BlockFormat::Q2K => 80,
            BlockFormat::Q3K => 108,
            BlockFormat::Q6K => 208,
            _ => 0,
        };
        let head_bytes = Coding::of(format).scales.head_bytes();
        fields.head[..head_bytes].copy_from_slice(&block[head_at..head_at + head_bytes]);
        fields
    }
}

#[inline(always)]
fn fill(out: &mut [u8], value: impl Fn(usize) -> u8) {
    for (i, out) in out.iter_mut().enumerate() {
        *out = value(i);
    }
}

/// 32 values in 16 bytes: low halves, then high halves.
#[inline(always)]
fn nibbles(quants: &[u8], codes: &mut [u8]) {
    halves(&quants[..16], codes);
}

/// Nibbles with a fifth bit: value `i` has bit `i` of the four bytes before them.
#[inline(always)]
fn five_bits(quants: &[u8], codes: &mut [u8]) {
    halves(&quants[4..20], codes);
    for (i, code) in codes.iter_mut().enumerate() {
        *code |= (quants[i / 8] >> (i % 8) & 1) << 4;
    }
}

/// The low halves of all bytes, then the high halves.
#[inline(always)]
fn halves(quants: &[u8], codes: &mut [u8]) {
    let (low, high) = codes.split_at_mut(quants.len());
    for ((quant, low), high) in quants.iter().zip(low).zip(high) {
        (*low, *high) = (quant & 15, quant >> 4);
    }
}

/// 256 values in 64 bytes: each half of them in 32 bytes, in four layers of 2 bits.
#[inline(always)]
fn two_bits(quants: &[u8], codes: &mut [u8]) {
    for (quants, codes) in quants.chunks_exact(32).zip(codes.chunks_exact_mut(128)) {
        for (layer, codes) in codes.chunks_exact_mut(32).enumerate() {
            for (quant, code) in quants.iter().zip(codes) {
                *code = quant >> (2 * layer) & 3;
            }
        }
    }
}

/// 256 values in 128 bytes: each 64 of them in 32 bytes, low halves first.
#[inline(always)]
fn four_bits(quants: &[u8], codes: &mut [u8]) {
    for (quants, codes) in quants.chunks_exact(32).zip(codes.chunks_exact_mut(64)) {
        halves(quants, codes);
    }
}

/// Adds a bit above the others. Bit `i` of each of the 32 bytes belongs to the `i`-th run of 32 values.
#[inline(always)]
fn add_bit(bits: &[u8], at: usize, codes: &mut [u8]) {
    for (layer, codes) in codes.chunks_exact_mut(32).enumerate() {
        for (byte, code) in bits.iter().zip(codes) {
            *code |= (byte >> layer & 1) << at;
        }
    }
}

/// Eight scales and eight mins of 6 bits in 12 bytes.
#[inline(always)]
fn scales_and_mins(packed: &[u8], fields: &mut BlockFields) {
    for i in 0..4 {
        (fields.scales[i], fields.mins[i]) = (packed[i] & 63, packed[i + 4] & 63);
        fields.scales[i + 4] = packed[i + 8] & 15 | packed[i] >> 6 << 4;
        fields.mins[i + 4] = packed[i + 8] >> 4 | packed[i + 4] >> 6 << 4;
    }
}

/// Scale and offset of a group for row `row` of the tile, from a packed unit's parameters (`[16]` of each).
pub(super) fn scale_and_offset(coding: &Coding, params: &[u8], group: usize, row: usize) -> (f32, f32) {
    use super::format::TILE_ROWS;
    let half = |i: usize| {
        let at = (i * TILE_ROWS + row) * 2;
        f16::from_le_bytes([params[at], params[at + 1]]).to_f32()
    };
    let byte = |i: usize| params[TILE_ROWS * (coding.scales.head_bytes() + i) + row];
    match coding.scales {
        Scales::Half => (half(0), 0.0),
        Scales::HalfAndOffset => (half(0), half(1)),
        Scales::Exponent => {
            let e = u32::from(params[row]);
            (f32::from_bits(((e >> 1) + 63) << 23) * f32::from_bits((e.div_ceil(2) + 63) << 23), 0.0)
        }
        Scales::Signed => (half(0) * f32::from(byte(group) as i8), 0.0),
        Scales::WithMins => {
            (half(0) * f32::from(byte(group)), -(half(1) * f32::from(byte(coding.groups() + group))))
        }
        Scales::Nibbles => (half(0) * f32::from(byte(group) & 15), -(half(1) * f32::from(byte(group) >> 4))),
    }
}
