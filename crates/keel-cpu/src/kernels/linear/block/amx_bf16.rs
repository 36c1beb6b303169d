//! Dense bf16 weights against up to 16 rows of bf16 activations, on AMX tiles.
//!
//! The instruction takes packed tiles of weights, `[K / 2][16][2]`, as they are, so nothing is copied. Evenly spaced
//! rows of x are read in place. Other rows are gathered first, as are the last inputs if K is not a multiple of 32.
//! Sums are cut at the same inputs for every number of rows.

use super::super::format::TILE_ROWS;
use super::super::lanes::Lanes;
use super::{Block, PAIR, both_at, dense};
use crate::amx::TILE;
use crate::amx::bf16::{Bf16Tiles, STEP, Sums};

/// Inputs that are summed on tiles before the sums are added to the row's results.
const CHUNK: usize = 512;

/// Bytes of a row's share of a chunk, and of a step.
const CHUNK_BYTES: usize = CHUNK * 2;
const STEP_BYTES: usize = STEP * 2;

/// On its own cache lines.
#[repr(align(64))]
struct Aligned<T>(T);

/// # Safety
/// As [`Lanes`] and [`Bf16Tiles`]; `block` describes bf16 weights and `M` rows of bf16 activations, 1 to 16.
#[inline(always)]
pub(super) unsafe fn bf16<S: Lanes, T: Bf16Tiles, const M: usize>(block: &Block<'_>) {
    let k = block.layout.k();
    let spacing = even_spacing::<M>(block);
    let mut gathered = Aligned([[0u8; CHUNK_BYTES]; M]);
    let mut sums = Aligned([[[0.0f32; TILE * TILE]; PAIR]; 2]);
    // SAFETY: every pointer stays within the tiles, the rows, or the arrays above.
    unsafe {
        let mut totals = [[S::splat(0.0); PAIR]; M];
        let mut ahead = block.ahead;
        T::configure(M);
        for start in (0..k).step_by(CHUNK) {
            for _ in (start..k.min(start + CHUNK)).step_by(dense::CHUNK) {
                if let Some(ahead) = ahead.as_mut() {
                    ahead.ask::<S>();
                }
            }
            let inputs = CHUNK.min(k - start);
            let (steps, rest) = (inputs / STEP, inputs % STEP);
            if steps > 0 {
                let tiles = both_at(block.tiles, start * TILE_ROWS * 2);
                let (x, stride) = match spacing {
                    Some(stride) => (block.x[0].add(start * 2), stride),
                    None => {
                        gather(block, start, steps * STEP_BYTES, &mut gathered.0);
                        (gathered.0.as_ptr().cast(), CHUNK_BYTES)
                    }
                };
                T::multiply(x, stride, M, steps, tiles, &mut sums.0);
                add::<S, M>(&mut totals, &sums.0);
            }
            if rest > 0 {
                let start = start + steps * STEP;
                let bytes = rest.next_multiple_of(2) * 2;
                gathered.0.iter_mut().for_each(|row| row[..STEP_BYTES].fill(0));
                gather(block, start, bytes, &mut gathered.0);
                let mut padded = Aligned([[0u8; STEP_BYTES * TILE_ROWS]; PAIR]);
                for (padded, tile) in padded.0.iter_mut().zip(block.tiles) {
                    let tile = tile.add(start * TILE_ROWS * 2);
                    padded.as_mut_ptr().copy_from_nonoverlapping(tile, bytes * TILE_ROWS);
                }
                let tiles = [padded.0[0].as_ptr(), padded.0[1].as_ptr()];
                T::multiply(gathered.0.as_ptr().cast(), CHUNK_BYTES, M, 1, tiles, &mut sums.0);
                add::<S, M>(&mut totals, &sums.0);
            }
        }
        T::release();
        super::store::<S, M>(block, &totals);
    }
}

/// Bytes from each row to the next, if the rows are in order and evenly spaced.
#[inline(always)]
fn even_spacing<const M: usize>(block: &Block<'_>) -> Option<usize> {
    let places = &block.x[..M];
    let gap = places.get(1).map_or(0, |second| second.addr().wrapping_sub(places[0].addr()));
    let is_even = places.windows(2).all(|pair| pair[1].addr().wrapping_sub(pair[0].addr()) == gap);
    (is_even && gap <= isize::MAX as usize).then_some(gap)
}

/// Copies `bytes` of each row from input `start` on.
///
/// # Safety
/// Each of the `M` rows has this many bytes.
#[inline(always)]
unsafe fn gather<const M: usize>(
    block: &Block<'_>,
    start: usize,
    bytes: usize,
    gathered: &mut [[u8; CHUNK_BYTES]; M],
) {
    for (to, from) in gathered.iter_mut().zip(block.x) {
        // SAFETY: as the caller promises; no more than a chunk.
        unsafe { to.as_mut_ptr().copy_from_nonoverlapping(from.add(start * 2), bytes) }
    }
}

/// Adds the sums of even and of odd steps to the results.
///
/// # Safety
/// As [`Lanes`].
#[inline(always)]
unsafe fn add<S: Lanes, const M: usize>(totals: &mut [[S::F; PAIR]; M], sums: &Sums) {
    for (m, totals) in totals.iter_mut().enumerate() {
        for (t, total) in totals.iter_mut().enumerate() {
            // SAFETY: row m of 16 of the tile's sums.
            unsafe {
                let even = S::load(sums[0][t].as_ptr().add(m * TILE));
                let odd = S::load(sums[1][t].as_ptr().add(m * TILE));
                *total = S::add(*total, S::add(even, odd));
            }
        }
    }
}
