//! Affine weights against activations quantised to i8.
//!
//! For a group of inputs, with `w = s q + b` and `x = c p` (`p` an i8, `c` the row's scale for the group):
//! `sum w x = s c sum(q p) + b c sum(p)`. The first sum is exact in i32. The second, times `c`, was computed when the
//! row was quantised.

use super::super::WeightFormat;
use super::super::format::{BLOCK, TILE_ROWS};
use super::super::lanes::Lanes;
use super::unpack::{for_each_quad, params, quad};
use super::{Block, PAIR, both_at};

/// # Safety
/// As [`Lanes`]; `block` describes affine weights of `BITS` bits and `M` rows of quantised activations.
#[inline(always)]
pub(super) unsafe fn int8<S: Lanes, const BITS: usize, const M: usize>(block: &Block<'_>) {
    let WeightFormat::Affine { group, params: float, .. } = block.layout.format() else { unreachable!() };
    let mut x = block.x[0];
    // SAFETY: every pointer stays within the tile or the rows that the caller vouches for.
    unsafe {
        let mut sums = [[S::splat(0.0); PAIR]; M];
        let mut tiles = block.tiles;
        let mut ahead = block.ahead;
        for _ in 0..block.layout.k() / group {
            if let Some(ahead) = ahead.as_mut() {
                ahead.ask::<S>();
            }
            let mut dots = [[S::splat_i(0); PAIR]; M];
            for part in 0..group / BLOCK {
                let w = both_at(tiles, part * 64 * BITS);
                for_each_quad!(J => {
                    let w = [quad::<S, BITS, J>(w[0]), quad::<S, BITS, J>(w[1])];
                    for (m, dots) in dots.iter_mut().enumerate() {
                        let x = S::splat_i(x.add(m * BLOCK + 4 * J).cast::<i32>().read_unaligned());
                        for t in 0..PAIR {
                            dots[t] = S::dot_u8_i8::<BITS>(dots[t], w[t], x);
                        }
                    }
                });
                x = x.add(M * BLOCK);
            }
            for t in 0..PAIR {
                let at = tiles[t].add(group * BITS * 2);
                let scale = params::<S>(at, float);
                let bias = params::<S>(at.add(TILE_ROWS * float.bytes()), float);
                for m in 0..M {
                    let [row_scale, row_sum] = *x.cast::<[f32; 2]>().add(m);
                    let scaled = S::mul(S::to_f32(dots[m][t]), scale);
                    let sum = S::fma(scaled, S::splat(row_scale), sums[m][t]);
                    sums[m][t] = S::fma(bias, S::splat(row_sum), sum);
                }
                tiles[t] = tiles[t].wrapping_add(block.stride);
            }
            x = x.add(M * size_of::<[f32; 2]>());
        }
        super::store::<S, M>(block, &sums);
    }
}
