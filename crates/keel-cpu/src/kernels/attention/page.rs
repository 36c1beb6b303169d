//! Several queries against one page of keys and values: scores, softmax, weighted sum.

#![allow(clippy::needless_range_loop, reason = "registers are numbered, not iterated")]

use super::{PAGE, TILE};
use crate::simd::{Element, LANES, Simd, exp};
use std::ops::Range;

/// Distance of prefetching in a tile of keys, in rows of 64 values.
const KEY_DISTANCE: usize = 32;

/// Rows of values that are summed before the next ones, so that a page is read nearly in order. Also the distance of
/// prefetching.
const VALUE_ROWS: usize = 16;

/// `scores[i][tile * 64 ..][..64] = queries[..][i] . key` for the 64 keys of a tile `[D, 64]`.
#[inline(always)]
pub(super) fn score_tile<S: Simd, E: Element, const Q: usize>(
    s: S,
    queries: &[[f32; Q]],
    keys: &[E],
    tile: usize,
    scores: &mut [[f32; PAGE]; Q],
) {
    const VECTORS: usize = TILE / LANES;
    let mut acc = [[s.splat(0.0); VECTORS]; Q];
    for (keys, query) in keys.chunks_exact(TILE).zip(queries) {
        prefetch(s, keys.as_ptr().wrapping_add(KEY_DISTANCE * TILE), TILE);
        let mut key = [s.splat(0.0); VECTORS];
        for n in 0..VECTORS {
            // SAFETY: a chunk holds four vectors.
            key[n] = unsafe { E::load(s, keys.as_ptr().add(n * LANES)) };
        }
        for i in 0..Q {
            let q = s.splat(query[i]);
            for n in 0..VECTORS {
                acc[i][n] = s.fma(q, key[n], acc[i][n]);
            }
        }
    }
    for i in 0..Q {
        for n in 0..VECTORS {
            s.store_at(acc[i][n], &mut scores[i], tile * TILE + n * LANES);
        }
    }
}

/// Turns scores into `e^(scale * score - largest)`, zero outside `seen`, and updates the query's largest score and sum.
/// Returns the factor that rescales earlier sums to the new largest score.
#[inline(always)]
pub(super) fn softmax_page<S: Simd>(
    s: S,
    scores: &mut [f32],
    seen: Range<usize>,
    scale: f32,
    largest: &mut f32,
    total: &mut f32,
) -> f32 {
    scores[..seen.start].fill(f32::NEG_INFINITY);
    scores[seen.end..].fill(f32::NEG_INFINITY);
    let (chunks, _) = scores.as_chunks_mut::<LANES>();
    let mut high = s.splat(*largest);
    for chunk in chunks.iter_mut() {
        let scaled = s.mul(s.load(chunk), s.splat(scale));
        high = s.max(scaled, high);
        s.store(scaled, chunk);
    }
    let before = std::mem::replace(largest, s.max_lane(high));
    let mut sum = s.splat(0.0);
    for chunk in chunks {
        let weight = exp(s, s.sub(s.load(chunk), s.splat(*largest)));
        sum = s.add(sum, weight);
        s.store(weight, chunk);
    }
    let factor = s.to_array(exp(s, s.splat(before - *largest)))[0];
    *total = *total * factor + s.sum(sum);
    factor
}

/// `outputs[i] += sum_j weights[i][j] * values[j]` over the keys `seen`.
#[inline(always)]
pub(super) fn weigh_values<S: Simd, E: Element, const Q: usize>(
    s: S,
    weights: &[[f32; PAGE]; Q],
    values: &[E],
    seen: Range<usize>,
    outputs: &mut [&mut [f32]; Q],
) {
    let size = values.len() / PAGE;
    let mut start = seen.start;
    while start < seen.end {
        let keys = start..(start + VALUE_ROWS).min(seen.end);
        start = keys.end;
        let mut d = 0;
        while d < size {
            d += match (size - d) / LANES {
                0..2 => weigh_columns::<S, E, Q, 1>(s, weights, values, keys.clone(), d, outputs),
                2..4 => weigh_columns::<S, E, Q, 2>(s, weights, values, keys.clone(), d, outputs),
                _ => weigh_columns::<S, E, Q, 4>(s, weights, values, keys.clone(), d, outputs),
            };
        }
    }
}

/// Adds the values of the keys `seen` to `N` vectors of columns from `d` on; returns the number of columns.
#[inline(always)]
fn weigh_columns<S: Simd, E: Element, const Q: usize, const N: usize>(
    s: S,
    weights: &[[f32; PAGE]; Q],
    values: &[E],
    seen: Range<usize>,
    d: usize,
    outputs: &mut [&mut [f32]; Q],
) -> usize {
    let size = values.len() / PAGE;
    assert!(seen.end <= PAGE && d + N * LANES <= size);
    let mut acc = [[s.splat(0.0); N]; Q];
    for i in 0..Q {
        for n in 0..N {
            acc[i][n] = s.load_at(outputs[i], d + n * LANES);
        }
    }
    for j in seen {
        prefetch(s, values.as_ptr().wrapping_add((j + VALUE_ROWS) * size + d), N * LANES);
        let mut row = [s.splat(0.0); N];
        for n in 0..N {
            // SAFETY: row j and column d + 16 N lie within the page, as asserted.
            row[n] = unsafe { E::load(s, values.as_ptr().add(j * size + d + n * LANES)) };
        }
        for i in 0..Q {
            let weight = s.splat(weights[i][j]);
            for n in 0..N {
                acc[i][n] = s.fma(weight, row[n], acc[i][n]);
            }
        }
    }
    for i in 0..Q {
        for n in 0..N {
            s.store_at(acc[i][n], outputs[i], d + n * LANES);
        }
    }
    N * LANES
}

/// Prefetches the cache lines of `len` values at `p`.
#[inline(always)]
fn prefetch<S: Simd, E>(s: S, p: *const E, len: usize) {
    for offset in (0..len * size_of::<E>()).step_by(64) {
        s.prefetch(p.cast::<u8>().wrapping_add(offset));
    }
}
