//! Activations in the form that the block kernels read.
//!
//! f32 rows are read in place. For bf16 weights a row is rounded to bf16 and padded with a zero to an even length.
//!
//! For int8, each group of a row's inputs (the weights' groups) becomes `p = round(x / c)` with `c = max |x| / 127`.
//! The `M` rows of a block lie together in reading order: for each group, `[group / 32][M][32]` of `p` as i8, then
//! `[M]` of `(c, c * sum p)` as f32. Blocks of 16 rows, for AMX, have parts of up to 64 inputs instead of 32; groups of
//! 16 are parts of 16. Block codings with a zero `z` have `-z * sum p` as i32 instead of `c * sum p`.
//!
//! The sums are those of the *rounded* inputs. So rounding errors are multiplied with `s q + b`, the weights
//! themselves, not with the larger `s q`.

use super::format::{BLOCK, MAX_GROUP};
use super::lanes::{LANES, Lanes, portable::Portable};
#[cfg(target_arch = "x86_64")]
use super::lanes::{avx2::Avx2, avx512::Avx512};
use super::rows::{BlockAt, RowOrder};
use super::{Compute, PackedLayout};
use crate::amx;
use crate::isa::Isa;
use crate::pool::Worker;
use crate::shared_slice::SharedMut;

/// Bytes of one prepared row; 0 where rows are read as they are.
pub(super) fn row_bytes(layout: &PackedLayout, compute: Compute) -> usize {
    match (compute, layout.format()) {
        (Compute::Int8, _) => layout.k() + layout.k() / layout.group() * 8,
        (Compute::Bf16, _) => layout.k().next_multiple_of(2) * 2,
        _ => 0,
    }
}

/// Prepares the rows of `segments` in `scratch`; each worker prepares its share. A barrier must follow.
#[allow(clippy::too_many_arguments, reason = "what `run` has, and how rows are cut")]
pub(super) fn prepare(
    worker: &Worker<'_>,
    isa: Isa,
    layout: &PackedLayout,
    compute: Compute,
    x: &[f32],
    RowOrder { segments, map }: RowOrder<'_>,
    block_sizes: &[usize],
    scratch: SharedMut<'_, u8>,
) {
    let (k, row_bytes) = (layout.k(), row_bytes(layout, compute));
    match compute {
        Compute::Int8 => {
            let group = layout.group();
            let groups = k / group;
            let rows = segments.last().map_or(0, |last| last.end as usize);
            let share = worker.split(rows * groups, 1);
            let mut segments = segments.iter();
            let mut segment = segments.next();
            for position in share.start / groups..share.end.div_ceil(groups) {
                while segment.is_some_and(|segment| position >= segment.end as usize) {
                    segment = segments.next();
                }
                let block = segment.expect("segments cover all positions").block(position, block_sizes);
                let x = &x[map.rows(position).0 * k..][..k];
                let group_bytes = block.rows * (group + 8);
                let out = scratch.part(block.start * row_bytes..(block.start + block.rows) * row_bytes);
                let in_row = |item: usize| item.saturating_sub(position * groups).min(groups);
                for g in in_row(share.start)..in_row(share.end) {
                    let out = out.part(g * group_bytes..(g + 1) * group_bytes);
                    quantize_into(isa, &x[g * group..(g + 1) * group], layout.zero(), out, block);
                }
            }
        }
        Compute::Bf16 => {
            for row in worker.split(x.len() / k, 1) {
                // SAFETY: each row has its own bytes and one worker.
                let out = unsafe { scratch.range(row * row_bytes..(row + 1) * row_bytes) };
                round_to_bf16(&x[row * k..(row + 1) * k], out);
            }
        }
        Compute::F32 => {}
    }
}

/// Quantises one group of one row into its place in the block.
fn quantize_into(isa: Isa, x: &[f32], zero: i32, out: SharedMut<'_, u8>, block: BlockAt) {
    let (row, rows) = (block.row, block.rows);
    let mut quantized = [0u8; MAX_GROUP];
    let quantized = &mut quantized[..x.len()];
    let Quantized { scale, sum } = quantize(isa, x, quantized);
    // The sum of a row with a NaN is any number, and its scale makes the result NaN.
    let shift = (-zero).wrapping_mul(sum) as u32;
    let pair = [scale, if zero == 0 { scale * sum as f32 } else { f32::from_bits(shift) }];
    let part = x.len().min(if rows == amx::TILE { amx::PART } else { BLOCK });
    for (i, values) in quantized.as_chunks::<LANES>().0.iter().enumerate() {
        let k = i * LANES;
        let at = (k / part * rows + row) * part + k % part;
        // SAFETY: each row's group has its own bytes and one worker; an array of bytes needs no alignment.
        unsafe { *out.part(at..at + LANES).as_ptr().cast::<[u8; LANES]>() = *values }
    }
    let at = rows * x.len() + row * size_of_val(&pair);
    // SAFETY: each row's group has its own bytes and one worker.
    unsafe { out.part(at..at + size_of_val(&pair)).as_ptr().cast::<[f32; 2]>().write_unaligned(pair) }
}

/// Scale and sum of a quantised group.
struct Quantized {
    scale: f32,
    /// Sum of the quantised values.
    sum: i32,
}

/// Quantises one group, to `out` as i8.
fn quantize(isa: Isa, x: &[f32], out: &mut [u8]) -> Quantized {
    assert!(x.len().is_multiple_of(LANES) && x.len() == out.len());
    // SAFETY: a kernel is only run at a level that the CPU has; the lengths are as asserted.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx512Vnni | Isa::Amx => quantize_avx512(x, out),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => quantize_avx2(x, out),
            _ => quantize_in::<Portable>(x, out),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2")]
fn quantize_avx512(x: &[f32], out: &mut [u8]) -> Quantized {
    // SAFETY: compiled for the instructions; `quantize` has checked the lengths.
    unsafe { quantize_in::<Avx512<false>>(x, out) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn quantize_avx2(x: &[f32], out: &mut [u8]) -> Quantized {
    // SAFETY: compiled for the instructions; `quantize` has checked the lengths.
    unsafe { quantize_in::<Avx2>(x, out) }
}

/// Gives the same bits at every level: each operation is exact, or rounds the same way at all levels.
///
/// # Safety
/// As [`Lanes`]; `x` and `out` are equally long, a multiple of 16.
#[inline(always)]
unsafe fn quantize_in<S: Lanes>(x: &[f32], out: &mut [u8]) -> Quantized {
    // Adding 1.5 * 2^23 leaves the nearest integer in the low bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    // SAFETY: as the caller promises; each vector lies within the slices.
    unsafe {
        // As integers, the bits of magnitudes have the order of the floats, with infinity and then NaN above all
        // numbers. So infinity and NaN reach the scale, and with it every output.
        let magnitude = S::splat_i(0x7fff_ffff);
        let mut tops = S::splat_i(0);
        for i in (0..x.len()).step_by(LANES) {
            tops = S::max_u(tops, S::and(S::load_i(x.as_ptr().add(i).cast()), magnitude));
        }
        let top = f32::from_bits(S::reduce_max_u(tops));
        // Far below this the reciprocal overflows. Such a group is negligible and becomes zero.
        if top < 1e-36 {
            out.fill(0);
            return Quantized { scale: 0.0, sum: 0 };
        }
        let reciprocal = S::splat(127.0 / top);
        let (round, unround) = (S::splat(ROUND), S::splat_i((ROUND.to_bits() as i32).wrapping_neg()));
        let mut sums = S::splat_i(0);
        for i in (0..x.len()).step_by(LANES) {
            let rounded = S::add(S::mul(S::load(x.as_ptr().add(i)), reciprocal), round);
            let p = S::add_i(S::as_i(rounded), unround);
            sums = S::add_i(sums, p);
            S::store_i8(p, out.as_mut_ptr().add(i));
        }
        Quantized { scale: top / 127.0, sum: S::reduce_add_i(sums) }
    }
}

/// Rounds to nearest even; zeros fill the rest of `out`.
fn round_to_bf16(x: &[f32], out: &mut [u8]) {
    out[x.len() * 2..].fill(0);
    let (pairs, _) = out.as_chunks_mut::<2>();
    for (x, out) in x.iter().zip(pairs) {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
        // Rounding could turn the payload of a NaN into an infinity.
        let top = if x.is_nan() { 0x7fc0 } else { rounded >> 16 };
        *out = (top as u16).to_ne_bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantized_groups_are_within_half_a_step_and_carry_their_sum() {
        let x: Vec<f32> = (0..64).map(|i| (i as f32 * 0.71).sin() * 3.0).collect();
        for isa in Isa::available() {
            let mut out = [0u8; 64];
            let Quantized { scale, sum } = quantize(isa, &x, &mut out);
            let mut total = 0.0;
            for (x, p) in x.iter().zip(out) {
                let back = f32::from(p as i8) * scale;
                assert!((x - back).abs() <= 0.5001 * scale, "{x} became {back} at {isa}");
                assert_ne!(p as i8, -128);
                total += back;
            }
            assert!((scale * sum as f32 - total).abs() < 1e-3);
        }
    }

    #[test]
    fn a_group_that_is_not_finite_says_so_and_a_zero_group_is_zero() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = [1.0f32; 32];
            x[17] = bad;
            assert!(!quantize(Isa::best(), &x, &mut [0; 32]).scale.is_finite());
        }
        let mut out = [1u8; 32];
        let Quantized { scale, sum } = quantize(Isa::best(), &[-0.0; 32], &mut out);
        assert_eq!((scale, sum), (0.0, 0));
        assert_eq!(out, [0; 32]);
    }

    #[test]
    fn bf16_rounding_is_the_standard_one() {
        let values = [1.0, 1.0039062, 1.0117188, -2.7182817, f32::NAN, f32::INFINITY, 3.4e38, 1e-40];
        let mut out = [0xffu8; 18];
        round_to_bf16(&values, &mut out);
        for (x, bytes) in values.iter().zip(out.as_chunks::<2>().0) {
            let expected = half::bf16::from_f32(*x);
            assert_eq!(u16::from_ne_bytes(*bytes), expected.to_bits(), "{x}");
        }
        assert_eq!(out[16..], [0, 0]);
    }
}
