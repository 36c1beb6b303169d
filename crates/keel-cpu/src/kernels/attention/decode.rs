//! Attention for few rows per sequence: bound by reading keys and values.
//!
//! A unit of work is one segment of pages, of one key-value head of one sequence. It serves all query heads of the
//! group and all rows of the sequence, four queries at a time, so that a page comes from memory once. For each query it
//! stores the largest score, the sum of exponentials and the weighted sum of values. A second phase joins the segments
//! of a row in order. So no result depends on which worker computed which unit.
//!
//! Floor: `2 * KV * D * len * sizeof(E)` bytes a layer and sequence, 16.8 MB at 8192 tokens of 2 f16 heads of 256.

#![allow(clippy::needless_range_loop, reason = "registers are numbered, not iterated")]

use super::page::{score_tile, softmax_page, weigh_values};
use super::segments::{pages_of, segment_of};
use super::{Attention, HEAD_DIM_MAX, KvRead, MASKED, PAGE, TILE, first_seen};
use crate::kernels::rows::{Batch, RowsMut};
use crate::pool::Worker;
use crate::shared_slice::SharedMut;
use crate::simd::{self, LANES, Simd, VectorKernel, exp};
use std::ops::Range;

/// Query rows that share one sweep over a page.
const GROUP: usize = 4;

/// `f32` values of workspace for `rows` rows of all sequences with page tables of `pages` entries.
pub fn decode_workspace_len(rows: usize, heads: usize, head_dim: usize, pages: usize) -> usize {
    rows * heads * segments(pages) * (head_dim + 2)
}

/// Number of segments of the first `pages` pages.
fn segments(pages: usize) -> usize {
    pages.checked_sub(1).map_or(0, |last| segment_of(last) + 1)
}

/// Attention in the decode regime. `workspace` holds [`decode_workspace_len`] values, then each worker's scratch for
/// reading pages.
///
/// # Panics
/// If the shapes disagree, `D` is not a multiple of 16, the workspace is too small, or a page lies outside the pool.
pub fn attention_decode<P: KvRead>(
    attention: &Attention<'_, P>,
    workspace: SharedMut<'_, f32>,
    worker: &Worker<'_>,
) {
    P::decode(attention, workspace, worker);
}

/// [`attention_decode`] over pages of any form.
pub(super) fn run<P: KvRead>(
    attention: &Attention<'_, P>,
    workspace: SharedMut<'_, f32>,
    worker: &Worker<'_>,
) {
    attention.check();
    let size = attention.pages.head_dim();
    assert!(size.is_multiple_of(LANES) && size <= HEAD_DIM_MAX, "attention_decode: heads of {size} values");
    let pages = attention.table.stride;
    let partials = decode_workspace_len(attention.batch.rows(), attention.heads(), size, pages);
    let (page_scratch, needed) =
        (attention.page_scratch(), partials + worker.count * attention.page_scratch());
    assert!(
        workspace.len() >= needed,
        "attention_decode: workspace of {} values, {needed} needed",
        workspace.len()
    );
    let start = partials + worker.index * page_scratch;
    // SAFETY: each worker uses its own part, after the partials.
    let scratch = unsafe { workspace.range(start..start + page_scratch) };
    let partials = Partials { data: workspace, heads: attention.heads(), segments: segments(pages), size };
    simd::run_at(worker.isa, Sweep { attention, partials, scratch, worker });
    worker.barrier();
    let Attention { batch, window, y, .. } = *attention;
    let heads = attention.heads();
    simd::run_at(worker.isa, Join { batch, window, heads, y, partials, worker });
}

/// One segment's contribution to one query: the weighted values, then the largest score, then the sum of weights.
#[derive(Clone, Copy)]
struct Partials<'a> {
    data: SharedMut<'a, f32>,
    heads: usize,
    segments: usize,
    size: usize,
}

impl<'a> Partials<'a> {
    /// # Safety
    /// No two workers may use the same partial at once.
    #[inline(always)]
    unsafe fn get(&self, row: usize, head: usize, segment: usize) -> &'a mut [f32] {
        let start = ((row * self.heads + head) * self.segments + segment) * (self.size + 2);
        // SAFETY: the caller's promise.
        unsafe { self.data.range(start..start + self.size + 2) }
    }
}

/// The pages that rows at `positions` see under a window.
#[inline(always)]
fn pages_seen(window: Option<usize>, positions: Range<usize>) -> Range<usize> {
    first_seen(window, positions.start) / PAGE..(positions.end - 1) / PAGE + 1
}

/// The positions of the rows of sequence `b`.
#[inline(always)]
fn positions_of<P: KvRead>(attention: &Attention<'_, P>, b: usize) -> Range<usize> {
    let first = attention.batch.position[b] as usize;
    first..first + attention.batch.rows_of(b).len()
}

struct Sweep<'a, 'w, P> {
    attention: &'a Attention<'a, P>,
    partials: Partials<'a>,
    scratch: &'a mut [f32],
    worker: &'a Worker<'w>,
}

impl<P: KvRead> VectorKernel for Sweep<'_, '_, P> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let attention = self.attention;
        let kv_heads = attention.pages.kv_heads();
        // Only the pages in use: the page table also has room for longer contexts than the sequences have.
        let ends = (0..attention.batch.sequences()).map(|b| positions_of(attention, b).end.div_ceil(PAGE));
        let segments = segments(ends.max().unwrap_or(0));
        for unit in self.worker.claim(attention.batch.sequences() * segments * kv_heads, 1).flatten() {
            let unit = Unit {
                b: unit / kv_heads / segments,
                segment: unit / kv_heads % segments,
                kv: unit % kv_heads,
            };
            let positions = positions_of(attention, unit.b);
            if positions.is_empty() {
                continue;
            }
            let (seen, held) = (pages_seen(attention.window, positions), pages_of(unit.segment));
            let pages = seen.start.max(held.start)..seen.end.min(held.end);
            if !pages.is_empty() {
                sweep_segment(s, attention, &self.partials, unit, pages, &mut *self.scratch);
            }
        }
    }
}

/// A sequence, a segment of its pages, and a key-value head.
#[derive(Clone, Copy)]
struct Unit {
    b: usize,
    segment: usize,
    kv: usize,
}

/// Runs all queries of a unit's sequence that read its key-value head against the `pages` of its segment, in order.
#[inline(always)]
fn sweep_segment<S: Simd, P: KvRead>(
    s: S,
    attention: &Attention<'_, P>,
    partials: &Partials<'_>,
    Unit { b, segment, kv }: Unit,
    pages: Range<usize>,
    scratch: &mut [f32],
) {
    let ratio = attention.heads() / attention.pages.kv_heads();
    let positions = positions_of(attention, b);
    let (key_scratch, value_scratch) = scratch.split_at_mut(scratch.len() / 2);
    let rows = attention.batch.rows_of(b);
    let queries = rows.len() * ratio;
    for i in 0..queries {
        // SAFETY: only this unit has these queries on this segment.
        let partial = unsafe { partials.get(rows.start + i / ratio, kv * ratio + i % ratio, segment) };
        partial.fill(0.0);
        partial[partials.size] = MASKED;
    }
    for page in pages {
        let within = |position: usize| position.saturating_sub(page * PAGE).min(PAGE);
        let seen = within(attention.first_seen(positions.start))..within(positions.end);
        let (stored, tiles) = (attention.table.page(b, page), seen.start / TILE..seen.end.div_ceil(TILE));
        let keys = attention.pages.keys(stored, kv, tiles, key_scratch);
        let values = attention.pages.values(stored, kv, seen, value_scratch);
        for start in (0..queries).step_by(GROUP) {
            let sweep = PageSweep { attention, partials, keys, values, b, segment, page, kv, ratio, start };
            match queries - start {
                1 => sweep.group::<S, 1>(s),
                2 => sweep.group::<S, 2>(s),
                3 => sweep.group::<S, 3>(s),
                _ => sweep.group::<S, GROUP>(s),
            }
        }
    }
}

struct PageSweep<'a, 'b, P: KvRead> {
    attention: &'a Attention<'b, P>,
    partials: &'a Partials<'b>,
    keys: &'a [P::Element],
    values: &'a [P::Element],
    b: usize,
    segment: usize,
    page: usize,
    kv: usize,
    ratio: usize,
    /// First query of the group; query `i` is row `i / ratio` and head `i % ratio` of the key-value head.
    start: usize,
}

impl<P: KvRead> PageSweep<'_, '_, P> {
    #[inline(always)]
    fn group<S: Simd, const Q: usize>(&self, s: S) {
        let attention = self.attention;
        let size = attention.pages.head_dim();
        let first_row = attention.batch.row_start[self.b] as usize;
        let row = |i: usize| first_row + (self.start + i) / self.ratio;
        let head = |i: usize| self.kv * self.ratio + (self.start + i) % self.ratio;
        let seen: [Range<usize>; Q] = std::array::from_fn(|i| {
            let position = attention.batch.position[self.b] as usize + (self.start + i) / self.ratio;
            let page_start = self.page * PAGE;
            let from = attention.first_seen(position).saturating_sub(page_start);
            let to = (position + 1).saturating_sub(page_start).min(PAGE);
            from.min(to)..to
        });
        let (from, to) = seen
            .iter()
            .filter(|seen| !seen.is_empty())
            .fold((PAGE, 0), |(from, to), seen| (from.min(seen.start), to.max(seen.end)));
        if from >= to {
            return;
        }
        let mut queries = [[0.0; Q]; HEAD_DIM_MAX];
        for i in 0..Q {
            let query = &attention.q.row(row(i))[head(i) * size..][..size];
            for (queries, &x) in queries.iter_mut().zip(query) {
                queries[i] = x;
            }
        }

        let mut weights = [[0.0; PAGE]; Q];
        let tiles = from / TILE..to.div_ceil(TILE);
        for tile in tiles.clone() {
            score_tile(
                s,
                &queries[..size],
                &self.keys[tile * TILE * size..][..TILE * size],
                tile,
                &mut weights,
            );
        }
        let start = tiles.start * TILE;
        for i in 0..Q {
            let weights = &mut weights[i][start..tiles.end * TILE];
            let within = |slot: usize| slot.saturating_sub(start).min(weights.len());
            let seen = within(seen[i].start)..within(seen[i].end);
            // SAFETY: only this unit has these queries on this segment.
            let partial = unsafe { self.partials.get(row(i), head(i), self.segment) };
            let (output, state) = partial.split_at_mut(size);
            let [largest, sum] = state else { unreachable!("two values after the output") };
            let factor = softmax_page(s, weights, seen, attention.scale, largest, sum);
            for output in output.as_chunks_mut::<LANES>().0 {
                s.store(s.mul(s.load(output), s.splat(factor)), output);
            }
        }
        // SAFETY: as above, and the borrows of the loop have ended.
        let mut outputs: [&mut [f32]; Q] =
            std::array::from_fn(|i| unsafe { self.partials.get(row(i), head(i), self.segment) });
        weigh_values(s, &weights, self.values, from..to, &mut outputs);
    }
}

/// The second phase. It reads no pages, so it is the same for pages of all forms.
struct Join<'a, 'w> {
    batch: Batch<'a>,
    window: Option<usize>,
    heads: usize,
    y: RowsMut<'a>,
    partials: Partials<'a>,
    worker: &'a Worker<'w>,
}

impl VectorKernel for Join<'_, '_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (batch, heads) = (self.batch, self.heads);
        for unit in self.worker.claim(batch.rows() * heads, 1).flatten() {
            let (t, head) = (unit / heads, unit % heads);
            let b = batch.sequence_of(t);
            let position = batch.position[b] as usize + t - batch.rows_of(b).start;
            let pages = pages_seen(self.window, position..position + 1);
            self.join_segments(s, t, head, segment_of(pages.start)..segment_of(pages.end - 1) + 1);
        }
    }
}

impl Join<'_, '_> {
    /// `y = sum_p e^(m_p - m) o_p / sum_p e^(m_p - m) l_p`, segments `p` in order.
    #[inline(always)]
    fn join_segments<S: Simd>(&self, s: S, t: usize, head: usize, segments: Range<usize>) {
        let size = self.partials.size;
        // SAFETY: the sweep is over, so partials are only read. Each row and head of `y` is claimed once.
        let (partial, y) = unsafe {
            let partial = |segment| &*self.partials.get(t, head, segment);
            (partial, self.y.part(t, head * size..(head + 1) * size))
        };
        let largest = segments.clone().map(|segment| partial(segment)[size]).fold(MASKED, f32::max);
        let mut sum = 0.0;
        y.fill(0.0);
        let (ys, _) = y.as_chunks_mut::<LANES>();
        for segment in segments {
            let partial = partial(segment);
            let factor = s.to_array(exp(s, s.splat(partial[size] - largest)))[0];
            sum += factor * partial[size + 1];
            let (outputs, _) = partial[..size].as_chunks::<LANES>();
            for (y, output) in ys.iter_mut().zip(outputs) {
                let joined = s.fma(s.splat(factor), s.load(output), s.load(y));
                s.store(joined, y);
            }
        }
        for y in ys {
            let mean = s.div(s.load(y), s.splat(sum));
            // Adding 0 turns -0, which an underflow may have left, into 0.
            s.store(s.add(mean, s.splat(0.0)), y);
        }
    }
}
