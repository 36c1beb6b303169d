//! Affine weights dequantised to f32, f32 activations.

use super::super::WeightFormat;
use super::super::format::{BLOCK, TILE_ROWS};
use super::super::lanes::Lanes;
use super::unpack::{for_each_quad, params, quad};
use super::{Block, PAIR, both_at};

/// # Safety
/// As [`Lanes`]; `block` describes affine weights of `BITS` bits and `M` rows of f32 activations.
#[inline(always)]
pub(super) unsafe fn affine_f32<S: Lanes, const BITS: usize, const M: usize>(block: &Block<'_>) {
    let WeightFormat::Affine { group, params: float, .. } = block.layout.format() else { unreachable!() };
    let x = block.x;
    // SAFETY: every pointer stays within the tile or the rows that the caller vouches for.
    unsafe {
        let mut sums = [[S::splat(0.0); PAIR]; M];
        let mut tiles = block.tiles;
        let mut ahead = block.ahead;
        for g in 0..block.layout.k() / group {
            if let Some(ahead) = ahead.as_mut() {
                ahead.ask::<S>();
            }
            let scales = both_at(tiles, group * BITS * 2);
            let scale = [params::<S>(scales[0], float), params::<S>(scales[1], float)];
            let biases = both_at(scales, TILE_ROWS * float.bytes());
            let bias = [params::<S>(biases[0], float), params::<S>(biases[1], float)];
            let mut dots = [[S::splat(0.0); PAIR]; M];
            for part in 0..group / BLOCK {
                let w = both_at(tiles, part * 64 * BITS);
                // Through memory, so that the multiply-adds are a loop instead of 32 copies of the same code.
                let mut quads = [[S::splat_i(0); PAIR]; BLOCK / 4];
                for_each_quad!(J => {
                    quads[J] = [quad::<S, BITS, J>(w[0]), quad::<S, BITS, J>(w[1])];
                });
                for (j, quads) in quads.into_iter().enumerate() {
                    let k = g * group + part * BLOCK + 4 * j;
                    input::<S, 0, M>(&mut dots, quads, scale, bias, &x, k);
                    input::<S, 8, M>(&mut dots, quads, scale, bias, &x, k + 1);
                    input::<S, 16, M>(&mut dots, quads, scale, bias, &x, k + 2);
                    input::<S, 24, M>(&mut dots, quads, scale, bias, &x, k + 3);
                }
            }
            for t in 0..PAIR {
                for m in 0..M {
                    sums[m][t] = S::add(sums[m][t], dots[m][t]);
                }
                tiles[t] = tiles[t].wrapping_add(block.stride);
            }
        }
        super::store::<S, M>(block, &sums);
    }
}

/// Adds the products of input `k`, whose weight is the byte at bit `SHIFT` of each lane of `quads`.
///
/// # Safety
/// As [`Lanes`]; `k` is an input of each of the `M` rows.
#[inline(always)]
unsafe fn input<S: Lanes, const SHIFT: u32, const M: usize>(
    dots: &mut [[S::F; PAIR]; M],
    quads: [S::I; PAIR],
    scale: [S::F; PAIR],
    bias: [S::F; PAIR],
    x: &[*const u8; super::MAX_ROWS],
    k: usize,
) {
    // SAFETY: as the caller promises.
    unsafe {
        let byte = S::splat_i(255);
        let mut w = bias;
        for t in 0..PAIR {
            w[t] = S::fma(S::to_f32(S::and(S::shr::<SHIFT>(quads[t]), byte)), scale[t], bias[t]);
        }
        for m in 0..M {
            let x = S::splat(*x[m].cast::<f32>().add(k));
            for t in 0..PAIR {
                dots[m][t] = S::fma(w[t], x, dots[m][t]);
            }
        }
    }
}
