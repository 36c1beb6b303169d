//! Superblocks of 256 values. Their sub-blocks have small integer scales, under one common f16 scale.

use super::short::{NONLINEAR, half};

pub(super) const Q2_K_BYTES: usize = 16 + 64 + 4;
pub(super) const Q3_K_BYTES: usize = 32 + 64 + 12 + 2;
pub(super) const Q4_K_BYTES: usize = 4 + 12 + 128;
pub(super) const Q5_K_BYTES: usize = 4 + 12 + 32 + 128;
pub(super) const Q6_K_BYTES: usize = 128 + 64 + 16 + 2;
pub(super) const IQ4_XS_BYTES: usize = 2 + 2 + 4 + 128;

/// Two-bit value `i` of 256. Each half of the values takes 32 bytes, in four layers of two bits.
fn two_bits(quants: &[u8], i: usize) -> u8 {
    quants[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3
}

/// Four-bit value `i` of 256. Each run of 64 takes 32 bytes; its first 32 values are the low four bits.
fn four_bits(quants: &[u8], i: usize) -> u8 {
    quants[i / 64 * 32 + i % 32] >> (i % 64 / 32 * 4) & 15
}

/// `value = d * scale * q - dmin * min`, `q` of 2 bits, scale and min of 4 bits for each 16 values:
/// 16 bytes of scale (low) and min (high), 64 bytes of `q`, `d`, `dmin` f16.
pub(super) fn q2_k(block: &[u8], out: &mut [f32]) {
    let (scales, quants) = block.split_at(16);
    let (d, dmin) = (half(block, 80), half(block, 82));
    for (i, out) in out.iter_mut().enumerate() {
        let scale = scales[i / 16];
        *out = d * f32::from(scale & 15) * f32::from(two_bits(quants, i)) - dmin * f32::from(scale >> 4);
    }
}

/// `value = d * (scale - 32) * (q - 4)`, `q` of 3 bits, scale of 6 bits for each 16 values: 32 bytes of high bits,
/// 64 bytes of low bits, 12 bytes of scales, `d` f16.
pub(super) fn q3_k(block: &[u8], out: &mut [f32]) {
    let (high, quants, scales, d) = (&block[..32], &block[32..96], &block[96..108], half(block, 108));
    // Sixteen scales: low halves in 8 bytes, the 2 upper bits in the other 4.
    let scale = |i: usize| {
        let low = scales[i % 8] >> (i / 8 * 4) & 15;
        let upper = scales[8 + i % 4] >> (i / 4 * 2) & 3;
        f32::from(low | upper << 4) - 32.0
    };
    for (i, out) in out.iter_mut().enumerate() {
        let high = high[i % 32] >> (i / 32) & 1;
        *out = d * scale(i / 16) * (f32::from(two_bits(quants, i) | high << 2) - 4.0);
    }
}

/// Scale and min `i` of eight, 6 bits each, in 12 bytes. The first four scales are bytes 0..4, the first four mins are
/// bytes 4..8. The last four have their low bits in bytes 8..12, and their 2 upper bits on top of the first four.
fn scale_and_min(packed: &[u8], i: usize) -> (f32, f32) {
    let (scale, min) = if i < 4 {
        (packed[i] & 63, packed[i + 4] & 63)
    } else {
        let low = packed[i + 4];
        (low & 15 | packed[i - 4] >> 6 << 4, low >> 4 | packed[i] >> 6 << 4)
    };
    (scale.into(), min.into())
}

/// `value = d * scale * q - dmin * min`, `q` of 4 bits, scale and min for each 32 values: `d`, `dmin` f16, 12 bytes of
/// scales and mins, 128 bytes of `q`.
pub(super) fn q4_k(block: &[u8], out: &mut [f32]) {
    let (d, dmin, scales, quants) = (half(block, 0), half(block, 2), &block[4..16], &block[16..]);
    for (i, out) in out.iter_mut().enumerate() {
        let (scale, min) = scale_and_min(scales, i / 32);
        *out = d * scale * f32::from(four_bits(quants, i)) - dmin * min;
    }
}

/// As [`q4_k`] with a fifth bit: `d`, `dmin` f16, 12 bytes of scales and mins, 32 bytes of high bits (bit `i / 32` of
/// byte `i % 32`), 128 bytes of low bits.
pub(super) fn q5_k(block: &[u8], out: &mut [f32]) {
    let (d, dmin, scales) = (half(block, 0), half(block, 2), &block[4..16]);
    let (high, quants) = (&block[16..48], &block[48..]);
    for (i, out) in out.iter_mut().enumerate() {
        let (scale, min) = scale_and_min(scales, i / 32);
        let high = high[i % 32] >> (i / 32) & 1;
        *out = d * scale * f32::from(four_bits(quants, i) | high << 4) - dmin * min;
    }
}

/// `value = d * scale * (q - 32)`, `q` of 6 bits, signed scale of 8 bits for each 16 values: 128 bytes of low bits, 64
/// of the 2 high bits, 16 of scales, `d` f16. Each half of the values takes 64 bytes of low bits, low halves first.
pub(super) fn q6_k(block: &[u8], out: &mut [f32]) {
    let (low, high, scales, d) = (&block[..128], &block[128..192], &block[192..208], half(block, 208));
    for (i, out) in out.iter_mut().enumerate() {
        let low = low[i / 128 * 64 + i % 64] >> (i % 128 / 64 * 4) & 15;
        let high = two_bits(high, i);
        *out = d * f32::from(scales[i / 16] as i8) * (f32::from(low | high << 4) - 32.0);
    }
}

/// `value = d * (scale - 32) * level[q]`, `q` of 4 bits, scale of 6 bits for each 32 values: `d` f16, 2 bytes of the
/// scales' upper bits, 4 of their lower, 16 bytes of `q` for each 32 values.
pub(super) fn iq4_xs(block: &[u8], out: &mut [f32]) {
    let (d, upper) = (half(block, 0), u16::from_le_bytes([block[2], block[3]]));
    let (lower, quants) = (&block[4..8], &block[8..]);
    for (i, out) in out.iter_mut().enumerate() {
        let sub = i / 32;
        let scale = lower[sub / 2] >> (sub % 2 * 4) & 15 | ((upper >> (sub * 2) & 3) as u8) << 4;
        let q = quants[sub * 16 + i % 16] >> (i % 32 / 16 * 4) & 15;
        *out = d * (f32::from(scale) - 32.0) * f32::from(NONLINEAR[usize::from(q)]);
    }
}
