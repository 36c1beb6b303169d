//! Superblocks of 256 values. Their sub-blocks have whole-number scales, under one common step.

use half::f16;

use super::fit::{Fit, level, offset, symmetric};

/// `Q4_K`: two steps, scales and offsets of eight sub-blocks in 6 bits each, levels of 4 bits.
pub(super) fn q4_k(values: &[f32], out: &mut [u8]) {
    let levels = offset_levels(values, 15, out);
    pack_fours(&levels, &mut out[16..]);
}

/// `Q5_K`: as `Q4_K`, with the fifth bits in 32 separate bytes.
pub(super) fn q5_k(values: &[f32], out: &mut [u8]) {
    let levels = offset_levels(values, 31, out);
    out[16..48].fill(0);
    for (i, q) in levels.iter().enumerate() {
        out[16 + i % 32] |= (q >> 4) << (i / 32);
    }
    pack_fours(&levels, &mut out[48..]);
}

/// `Q6_K`: levels of 6 bits, low and high bits apart, signed scales of 16 sub-blocks, a step.
pub(super) fn q6_k(values: &[f32], out: &mut [u8]) {
    let mut steps = [0.0f32; 16];
    for (step, values) in steps.iter_mut().zip(values.chunks_exact(16)) {
        *step = symmetric(values, -32, 31);
    }
    let d = f16::from_f32(symmetric_of_extreme(&steps));
    let scale_of = |step: f32| if d == f16::ZERO { 0.0 } else { level(step / d.to_f32(), -128, 127) };
    out[..192].fill(0);
    for (sub, values) in values.chunks_exact(16).enumerate() {
        let scale = scale_of(steps[sub]);
        out[192 + sub] = scale as i8 as u8;
        let step = d.to_f32() * scale;
        for (within, x) in values.iter().enumerate() {
            let i = sub * 16 + within;
            let q = if step == 0.0 { 32 } else { (level(x / step, -32, 31) + 32.0) as u8 };
            out[i / 128 * 64 + i % 64] |= (q & 15) << (i % 128 / 64 * 4);
            out[128 + i / 128 * 32 + i % 32] |= (q >> 4) << (i % 128 / 32 * 2);
        }
    }
    out[208..210].copy_from_slice(&d.to_le_bytes());
}

/// The common step for which the scale of the largest sub-block step is -128.
fn symmetric_of_extreme(steps: &[f32]) -> f32 {
    steps.iter().copied().fold(0.0f32, |a, b| if b.abs() > a.abs() { b } else { a }) / -128.0
}

/// Stores the steps, scales and offsets of eight sub-blocks and returns the levels of all values, `0..=high`.
fn offset_levels(values: &[f32], high: i32, out: &mut [u8]) -> [u8; 256] {
    let mut fits = [Fit::default(); 8];
    for (fit, values) in fits.iter_mut().zip(values.chunks_exact(32)) {
        *fit = offset(values, high);
    }
    let largest = |of: fn(&Fit) -> f32| fits.iter().map(of).fold(0.0f32, f32::max);
    let (d, dmin) =
        (f16::from_f32(largest(|fit| fit.step) / 63.0), f16::from_f32(largest(|fit| fit.offset) / 63.0));
    out[..2].copy_from_slice(&d.to_le_bytes());
    out[2..4].copy_from_slice(&dmin.to_le_bytes());
    let whole = |x: f32, unit: f16| if unit == f16::ZERO { 0.0 } else { level(x / unit.to_f32(), 0, 63) };
    let (mut scales, mut mins) = ([0u8; 8], [0u8; 8]);
    let mut levels = [0; 256];
    for (sub, values) in values.chunks_exact(32).enumerate() {
        let (scale, min) = (whole(fits[sub].step, d), whole(fits[sub].offset, dmin));
        (scales[sub], mins[sub]) = (scale as u8, min as u8);
        let (step, min) = (d.to_f32() * scale, dmin.to_f32() * min);
        for (q, x) in levels[sub * 32..].iter_mut().zip(values) {
            *q = if step == 0.0 { 0 } else { level((x + min) / step, 0, high) as u8 };
        }
    }
    pack_scales(&scales, &mins, &mut out[4..16]);
    levels
}

/// Eight scales and offsets of 6 bits. The first four are stored plainly. The last four have their low bits in four
/// bytes and their upper two bits on top of the first four.
fn pack_scales(scales: &[u8; 8], mins: &[u8; 8], out: &mut [u8]) {
    for i in 0..4 {
        let (late_scale, late_min) = (scales[i + 4], mins[i + 4]);
        out[i] = scales[i] | late_scale >> 4 << 6;
        out[i + 4] = mins[i] | late_min >> 4 << 6;
        out[i + 8] = late_scale & 15 | late_min << 4;
    }
}

/// The low four bits of 256 levels. Each run of 64 takes 32 bytes; its first 32 levels are the low bits of these.
fn pack_fours(levels: &[u8; 256], out: &mut [u8]) {
    for (run, out) in levels.chunks_exact(64).zip(out.chunks_exact_mut(32)) {
        for (i, out) in out.iter_mut().enumerate() {
            *out = run[i] & 15 | run[i + 32] << 4;
        }
    }
}
