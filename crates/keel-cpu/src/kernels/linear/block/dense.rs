//! Dense weights: widened to f32, or as bf16 pairs for the bf16 dot product.

use super::super::format::TILE_ROWS;
use super::super::lanes::Lanes;
use super::{Block, MAX_ROWS, PAIR, both_at};
use std::ops::Range;

/// Inputs that are summed before the sum is added to the row's result.
pub(super) const CHUNK: usize = 256;

/// A type of dense weights and the activations it is multiplied with.
pub(super) trait Weights {
    /// Adds the products of `inputs`, which start at an even input, to `dots`.
    ///
    /// # Safety
    /// As [`Lanes`]; `tiles` and the first `M` of `x` hold these inputs.
    unsafe fn multiply<S: Lanes, const M: usize>(
        dots: &mut [[S::F; PAIR]; M],
        tiles: [*const u8; PAIR],
        x: &[*const u8; MAX_ROWS],
        inputs: Range<usize>,
    );
}

/// f32 weights, f32 activations.
pub(super) struct F32;
/// f16 weights, f32 activations.
pub(super) struct F16;
/// bf16 weights, f32 activations.
pub(super) struct Bf16;
/// bf16 weights, bf16 activations.
pub(super) struct Bf16Dots;

impl Weights for F32 {
    #[inline(always)]
    unsafe fn multiply<S: Lanes, const M: usize>(
        dots: &mut [[S::F; PAIR]; M],
        tiles: [*const u8; PAIR],
        x: &[*const u8; MAX_ROWS],
        inputs: Range<usize>,
    ) {
        for k in inputs {
            // SAFETY: as the caller promises.
            unsafe {
                let [left, right] = both_at(tiles, k * TILE_ROWS * size_of::<f32>());
                input::<S, M>(dots, [S::load(left.cast()), S::load(right.cast())], x, k);
            }
        }
    }
}

impl Weights for F16 {
    #[inline(always)]
    unsafe fn multiply<S: Lanes, const M: usize>(
        dots: &mut [[S::F; PAIR]; M],
        tiles: [*const u8; PAIR],
        x: &[*const u8; MAX_ROWS],
        inputs: Range<usize>,
    ) {
        for k in inputs {
            // SAFETY: as the caller promises.
            unsafe {
                let [left, right] = both_at(tiles, k * TILE_ROWS * size_of::<u16>());
                input::<S, M>(dots, [S::load_f16(left.cast()), S::load_f16(right.cast())], x, k);
            }
        }
    }
}

impl Weights for Bf16 {
    #[inline(always)]
    unsafe fn multiply<S: Lanes, const M: usize>(
        dots: &mut [[S::F; PAIR]; M],
        tiles: [*const u8; PAIR],
        x: &[*const u8; MAX_ROWS],
        inputs: Range<usize>,
    ) {
        // SAFETY: as the caller promises.
        unsafe {
            let high = S::splat_i(-65536);
            let mut k = inputs.start;
            while k < inputs.end {
                let [left, right] = both_at(tiles, k * TILE_ROWS * 2);
                let w = [S::load_i(left), S::load_i(right)];
                let even = [S::as_f32(S::shl::<16>(w[0])), S::as_f32(S::shl::<16>(w[1]))];
                input::<S, M>(dots, even, x, k);
                // The padding of an odd K has no activation.
                if k + 1 < inputs.end {
                    let odd = [S::as_f32(S::and(w[0], high)), S::as_f32(S::and(w[1], high))];
                    input::<S, M>(dots, odd, x, k + 1);
                }
                k += 2;
            }
        }
    }
}

impl Weights for Bf16Dots {
    #[inline(always)]
    unsafe fn multiply<S: Lanes, const M: usize>(
        dots: &mut [[S::F; PAIR]; M],
        tiles: [*const u8; PAIR],
        x: &[*const u8; MAX_ROWS],
        inputs: Range<usize>,
    ) {
        // SAFETY: as the caller promises.
        unsafe {
            let mut k = inputs.start;
            while k < inputs.end {
                let [left, right] = both_at(tiles, k * TILE_ROWS * 2);
                let w = [S::load_i(left), S::load_i(right)];
                for m in 0..M {
                    let x = S::splat_i(x[m].add(2 * k).cast::<i32>().read_unaligned());
                    for t in 0..PAIR {
                        dots[m][t] = S::dot_bf16(dots[m][t], w[t], x);
                    }
                }
                k += 2;
            }
        }
    }
}

/// Adds the products of input `k`, whose weights are `w`.
///
/// # Safety
/// As [`Lanes`]; `k` is an input of each of the `M` rows.
#[inline(always)]
unsafe fn input<S: Lanes, const M: usize>(
    dots: &mut [[S::F; PAIR]; M],
    w: [S::F; PAIR],
    x: &[*const u8; MAX_ROWS],
    k: usize,
) {
    // SAFETY: as the caller promises.
    unsafe {
        for m in 0..M {
            let x = S::splat(*x[m].cast::<f32>().add(k));
            for t in 0..PAIR {
                dots[m][t] = S::fma(w[t], x, dots[m][t]);
            }
        }
    }
}

/// # Safety
/// As [`Lanes`]; `block` describes weights of type `D` and `M` rows of its activations.
#[inline(always)]
pub(super) unsafe fn dense<S: Lanes, D: Weights, const M: usize>(block: &Block<'_>) {
    let k = block.layout.k();
    let x = block.x;
    // SAFETY: every pointer stays within the tile or the rows that the caller vouches for.
    unsafe {
        let mut sums = [[S::splat(0.0); PAIR]; M];
        let mut ahead = block.ahead;
        for start in (0..k).step_by(CHUNK) {
            if let Some(ahead) = ahead.as_mut() {
                ahead.ask::<S>();
            }
            let mut dots = [[S::splat(0.0); PAIR]; M];
            D::multiply::<S, M>(&mut dots, block.tiles, &x, start..k.min(start + CHUNK));
            for m in 0..M {
                for t in 0..PAIR {
                    sums[m][t] = S::add(sums[m][t], dots[m][t]);
                }
            }
        }
        super::store::<S, M>(block, &sums);
    }
}
