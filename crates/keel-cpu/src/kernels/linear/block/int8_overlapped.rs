//! Affine weights against activations quantised to i8, for many rows: bound by arithmetic.
//!
//! Each sum has the operations of [`super::int8`] in the same order, but at other times: a group's integer dots are
//! converted and added one element at a time, between the dot products of the next group, see [`super::complete`].
//!
//! Floor: for each row, tile and group of 64, 16 dot products and 3 multiply-adds on the same units, so 84% of the dot
//! products' peak. The 12 dots of a group and the 12 of the group before leave registers for the weights.

use super::super::WeightFormat;
use super::super::format::{BLOCK, TILE_ROWS};
use super::super::lanes::Lanes;
use super::complete::Complete;
use super::unpack::{for_each_quad, params, quad};
use super::{Block, PAIR};

/// # Safety
/// As [`Lanes`]; `block` describes affine weights of `BITS` bits in groups of `GROUP` and `M` rows of quantised
/// activations.
#[inline(always)]
pub(super) unsafe fn int8<S: Lanes, const BITS: usize, const GROUP: usize, const M: usize>(
    block: &Block<'_>,
) {
    let WeightFormat::Affine { params: float, .. } = block.layout.format() else { unreachable!() };
    let (mut x, mut left, mut right) = (block.x[0], block.tiles[0], block.tiles[1]);
    // SAFETY: every pointer stays within the tile or the rows that the caller vouches for.
    unsafe {
        super::ask_for_results::<S, M>(block);
        let none = [[0.0; 2]; M];
        let mut sums = [[S::splat(0.0); PAIR]; M];
        let mut last = Complete::<S, M>::nothing(&none);
        let mut ahead = block.ahead;
        for _ in 0..block.layout.k() / GROUP {
            if let Some(ahead) = ahead.as_mut() {
                ahead.ask::<S>();
            }
            let mut dots = [[S::splat_i(0); PAIR]; M];
            macro_rules! part {
                ($part:literal) => {
                    if $part * BLOCK < GROUP {
                        let w = [left.add($part * 64 * BITS), right.add($part * 64 * BITS)];
                        let x = x.add($part * M * BLOCK);
                        for_each_quad!(J => {
                            let w = [quad::<S, BITS, J>(w[0]), quad::<S, BITS, J>(w[1])];
                            for (m, dots) in dots.iter_mut().enumerate() {
                                let x = S::splat_i(x.add(m * BLOCK + 4 * J).cast::<i32>().read_unaligned());
                                dots[0] = S::dot_u8_i8::<BITS>(dots[0], w[0], x);
                                dots[1] = S::dot_u8_i8::<BITS>(dots[1], w[1], x);
                            }
                            last.add_share(true, $part * 8 + J, GROUP / 4, &mut sums);
                        });
                    }
                };
            }
            part!(0);
            part!(1);
            part!(2);
            part!(3);
            let at = [left.add(GROUP * BITS * 2), right.add(GROUP * BITS * 2)];
            let biases = TILE_ROWS * float.bytes();
            last = Complete {
                dots,
                scale: [params::<S>(at[0], float), params::<S>(at[1], float)],
                offset: [params::<S>(at[0].add(biases), float), params::<S>(at[1].add(biases), float)],
                rows: x.add(M * GROUP).cast(),
            };
            x = x.add(M * (GROUP + size_of::<[f32; 2]>()));
            (left, right) = (left.wrapping_add(block.stride), right.wrapping_add(block.stride));
        }
        last.add_share(true, 0, 1, &mut sums);
        super::store::<S, M>(block, &sums);
    }
}
