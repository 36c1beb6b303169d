//! Affine weights against 16 rows of activations quantised to i8, on AMX tiles.
//!
//! The dot products of a group are exact, like those of [`super::int8`], and all operations after them are the same. So
//! a row has the same bits in a block of 16 rows and in a smaller one.

use super::super::WeightFormat;
use super::super::format::{BLOCK, MAX_GROUP, TILE_ROWS};
use super::super::lanes::Lanes;
use super::unpack::{for_each_quad, params, quad};
use super::{Block, PAIR};
use crate::amx::{PART, TILE, Tiles};

/// A group of unpacked weights, or the dots of a tile, on its own cache lines.
#[repr(align(64))]
struct Aligned<T>(T);

/// # Safety
/// As [`Lanes`] and [`Tiles`]; `block` describes affine weights of `BITS` bits and 16 rows of quantised activations.
#[inline(always)]
pub(super) unsafe fn int8<S: Lanes, T: Tiles, const BITS: usize>(block: &Block<'_>) {
    let WeightFormat::Affine { group, params: float, .. } = block.layout.format() else { unreachable!() };
    let part = group.min(PART);
    let mut panels = Aligned([[0u8; TILE * MAX_GROUP]; PAIR]);
    let mut dots = Aligned([[0i32; TILE * TILE]; PAIR]);
    // SAFETY: every pointer stays within the tile, the rows, or the arrays above.
    unsafe {
        let mut sums = [[S::splat(0.0); PAIR]; TILE];
        let (mut tiles, mut x, mut ahead) = (block.tiles, block.x[0], block.ahead);
        T::configure(part);
        for _ in 0..block.layout.k() / group {
            if let Some(ahead) = ahead.as_mut() {
                ahead.ask::<S>();
            }
            for (panel, tile) in panels.0.iter_mut().zip(tiles) {
                let mut panel = panel.as_mut_ptr();
                for i in 0..group / BLOCK {
                    let w = tile.add(i * 64 * BITS);
                    for_each_quad!(J => {
                        S::store_i(quad::<S, BITS, J>(w), panel.add(64 * J));
                    });
                    panel = panel.add(BLOCK * TILE);
                }
            }
            let [left, right] = &mut dots.0;
            let targets = [left.as_mut_ptr(), right.as_mut_ptr()];
            T::multiply(x, part, group / part, [panels.0[0].as_ptr(), panels.0[1].as_ptr()], targets);
            let scales = x.add(TILE * group).cast::<[f32; 2]>();
            for t in 0..PAIR {
                let at = tiles[t].add(group * BITS * 2);
                let scale = params::<S>(at, float);
                let bias = params::<S>(at.add(TILE_ROWS * float.bytes()), float);
                for (m, sums) in sums.iter_mut().enumerate() {
                    let [row_scale, row_sum] = *scales.add(m);
                    let dots = S::load_i(dots.0[t].as_ptr().add(m * TILE).cast());
                    let scaled = S::mul(S::to_f32(dots), scale);
                    let sum = S::fma(scaled, S::splat(row_scale), sums[t]);
                    sums[t] = S::fma(bias, S::splat(row_sum), sum);
                }
                tiles[t] = tiles[t].wrapping_add(block.stride);
            }
            x = scales.add(TILE).cast();
        }
        T::release();
        super::store::<S, TILE>(block, &sums);
    }
}
