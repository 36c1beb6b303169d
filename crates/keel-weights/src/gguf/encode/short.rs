//! Blocks of 32 values.

use std::ops::RangeInclusive;

use half::f16;

use super::fit::{level, symmetric};

/// `Q4_0`: a step, then 16 bytes of levels; byte `i` holds values `i` and `i + 16`.
pub(super) fn q4_0(values: &[f32], out: &mut [u8]) {
    let levels = levels(values, symmetric(values, -8, 7), -8..=7, out);
    pack_halves(&levels, &mut out[2..]);
}

/// `Q5_0`: a step, 4 bytes of high bits, then low bits as in `Q4_0`.
pub(super) fn q5_0(values: &[f32], out: &mut [u8]) {
    let levels = levels(values, symmetric(values, -16, 15), -16..=15, out);
    let high = levels.iter().enumerate().fold(0u32, |high, (i, q)| high | u32::from(q >> 4) << i);
    out[2..6].copy_from_slice(&high.to_le_bytes());
    pack_halves(&levels, &mut out[6..]);
}

/// `Q8_0`: a step, signed bytes.
pub(super) fn q8_0(values: &[f32], out: &mut [u8]) {
    let largest = values.iter().fold(0.0f32, |a, b| a.max(b.abs()));
    let levels = levels(values, largest / 127.0, -127..=127, out);
    for (out, q) in out[2..].iter_mut().zip(levels) {
        *out = q.wrapping_sub(127);
    }
}

/// Stores a step. Returns the values' levels, counted from the lowest of `range`, for the step as stored.
fn levels(values: &[f32], step: f32, range: RangeInclusive<i32>, out: &mut [u8]) -> [u8; 32] {
    let (low, high) = range.into_inner();
    let step = f16::from_f32(step);
    out[..2].copy_from_slice(&step.to_le_bytes());
    let mut levels = [0; 32];
    for (q, x) in levels.iter_mut().zip(values) {
        let near = if step == f16::ZERO { 0.0 } else { level(x / step.to_f32(), low, high) };
        *q = (near as i32 - low) as u8;
    }
    levels
}

/// The low four bits of 32 levels.
fn pack_halves(levels: &[u8; 32], out: &mut [u8]) {
    for (i, out) in out.iter_mut().enumerate().take(16) {
        *out = levels[i] & 15 | levels[i + 16] << 4;
    }
}
