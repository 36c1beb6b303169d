//! Attention for many rows per sequence: bound by arithmetic.
//!
//! A unit of work is one query head and the rows of one block of 64 positions; blocks are anchored at position 0. The
//! unit walks over the pages that its rows see: scores, softmax with a running maximum, weighted values. A row's
//! arithmetic is the same wherever the block starts or ends.
//!
//! Floor: `4 * D` operations for each query head and visible pair of positions; `n` tokens have about `n^2 / 2` pairs.

use super::page::softmax_page;
use super::{Attention, KvRead, MASKED, PAGE, TILE};
use crate::kernels::small_gemm::{Matrix, SmallGemm, Start};
use crate::pool::Worker;
use crate::shared_slice::SharedMut;
use crate::simd::{self, LANES, Simd, VectorKernel, lanes};
use std::ops::Range;

/// Positions of a block of queries.
const BLOCK: usize = TILE;

/// `f32` values of workspace for `workers` workers.
pub fn prefill_workspace_len(workers: usize, head_dim: usize) -> usize {
    workers * worker_len(head_dim)
}

/// Queries, scores, outputs; the largest score, sum and factor of each row.
fn worker_len(head_dim: usize) -> usize {
    BLOCK * (2 * head_dim + PAGE + 3)
}

/// Attention in the prefill regime. `workspace` holds [`prefill_workspace_len`] values, then each worker's scratch for
/// reading pages.
///
/// # Panics
/// If the shapes disagree, `D` is not a multiple of 16, the workspace is too small, or a page lies outside the pool.
pub fn attention_prefill<P: KvRead>(
    attention: &Attention<'_, P>,
    workspace: SharedMut<'_, f32>,
    worker: &Worker<'_>,
) {
    P::prefill(attention, workspace, worker);
}

/// [`attention_prefill`] over pages of any form.
pub(super) fn run<P: KvRead>(
    attention: &Attention<'_, P>,
    workspace: SharedMut<'_, f32>,
    worker: &Worker<'_>,
) {
    attention.check();
    let size = attention.pages.head_dim();
    assert!(size.is_multiple_of(LANES), "heads of {size} values, not a multiple of {LANES}");
    let (blocks, page_scratch) = (prefill_workspace_len(worker.count, size), attention.page_scratch());
    let needed = blocks + worker.count * page_scratch;
    assert!(
        workspace.len() >= needed,
        "attention_prefill: workspace of {} values, {needed} needed",
        workspace.len()
    );
    let (start, pages) = (worker.index * worker_len(size), blocks + worker.index * page_scratch);
    // SAFETY: each worker uses its own parts.
    let (scratch, pages) = unsafe {
        (workspace.range(start..start + worker_len(size)), workspace.range(pages..pages + page_scratch))
    };
    simd::run_at(worker.isa, Task { attention, scratch, pages, worker });
}

struct Task<'a, 'w, P> {
    attention: &'a Attention<'a, P>,
    scratch: &'a mut [f32],
    /// Scratch for reading a page.
    pages: &'a mut [f32],
    worker: &'a Worker<'w>,
}

impl<P: KvRead> VectorKernel for Task<'_, '_, P> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let attention = self.attention;
        let heads = attention.heads();
        let blocks = attention.batch.most_rows().div_ceil(BLOCK) + 1;
        for unit in self.worker.claim(attention.batch.sequences() * blocks * heads, 1).flatten() {
            let (group, head) = (unit / heads, unit % heads);
            // The last block of a prompt has the most pages to walk: it goes first.
            let (b, block) = (group / blocks, blocks - 1 - group % blocks);
            let (rows, first) = (attention.batch.rows_of(b), attention.batch.position[b] as usize);
            let start = (first / BLOCK + block) * BLOCK;
            let positions = start.max(first)..(start + BLOCK).min(first + rows.len());
            if !positions.is_empty() {
                let t = rows.start + positions.start - first;
                Block { attention, b, head, t, positions }.run(s, &mut *self.scratch, &mut *self.pages);
            }
        }
    }
}

/// Sums of a block, and the factor that rescales each row of them to its new largest score.
struct Rescaled<'a> {
    factors: &'a [f32],
    outputs: &'a mut [f32],
}

/// The rows of one block of positions, for one query head.
struct Block<'a, 'b, P> {
    attention: &'a Attention<'b, P>,
    b: usize,
    head: usize,
    /// First row.
    t: usize,
    positions: Range<usize>,
}

impl<P: KvRead> Block<'_, '_, P> {
    #[inline(always)]
    fn run<S: Simd>(&self, s: S, scratch: &mut [f32], pages: &mut [f32]) {
        let size = self.attention.pages.head_dim();
        let (queries, scratch) = scratch.split_at_mut(BLOCK * size);
        let (outputs, scratch) = scratch.split_at_mut(BLOCK * size);
        let (scores, scratch) = scratch.split_at_mut(BLOCK * PAGE);
        let (largest, scratch) = scratch.split_at_mut(BLOCK);
        let (sums, factors) = scratch.split_at_mut(BLOCK);
        let scale = s.splat(self.attention.scale);
        for (i, query) in queries.chunks_exact_mut(size).enumerate().take(self.positions.len()) {
            let x = &self.attention.q.row(self.t + i)[self.head * size..][..size];
            lanes!(s, query, [x = x] => s.mul(x, scale));
        }
        outputs.fill(0.0);
        largest.fill(MASKED);
        sums.fill(0.0);

        let first = self.attention.first_seen(self.positions.start);
        let end = (0..self.positions.len()).map(|i| self.end_seen(i)).max().unwrap_or(0);
        for page in first / PAGE..(end - 1) / PAGE + 1 {
            let seen = first.saturating_sub(page * PAGE)..(end - page * PAGE).min(PAGE);
            let tiles = seen.start / TILE * TILE..seen.end.next_multiple_of(TILE);
            self.score(s, queries, page, tiles.clone(), scores, pages);
            for i in 0..self.positions.len() {
                let row = &mut scores[i * PAGE..][tiles.clone()];
                let seen = self.seen(i, page * PAGE + tiles.start, row.len());
                // The queries are scaled. A scale of 1 changes no bit and leaves no instruction.
                factors[i] = softmax_page(s, row, seen, 1.0, &mut largest[i], &mut sums[i]);
            }
            self.weigh(s, scores, page, seen, Rescaled { factors, outputs }, pages);
        }
        self.finish(s, outputs, sums);
    }

    /// The keys that row `i` sees, of `len` keys from position `start` on.
    #[inline(always)]
    fn seen(&self, i: usize, start: usize, len: usize) -> Range<usize> {
        let position = self.positions.start + i;
        let to = self.end_seen(i).saturating_sub(start).min(len);
        self.attention.first_seen(position).saturating_sub(start).min(to)..to
    }

    /// One past the last position that row `i` sees.
    #[inline(always)]
    fn end_seen(&self, i: usize) -> usize {
        self.attention.end_seen(self.b, self.t + i, self.positions.start + i)
    }

    /// Scores of all rows against the keys `tiles` of a page.
    #[inline(always)]
    fn score<S: Simd>(
        &self,
        s: S,
        queries: &[f32],
        page: usize,
        tiles: Range<usize>,
        scores: &mut [f32],
        scratch: &mut [f32],
    ) {
        let (attention, size) = (self.attention, self.attention.pages.head_dim());
        let stored = attention.table.page(self.b, page);
        let keys =
            attention.pages.keys(stored, self.kv_head(), tiles.start / TILE..tiles.end / TILE, scratch);
        for start in tiles.step_by(TILE) {
            let tile = &keys[start * size..][..TILE * size];
            let gemm = SmallGemm {
                m: self.positions.len(),
                n: TILE,
                k: size,
                a: Matrix::new(queries, size),
                b: Matrix::new(tile, TILE),
                start: Start::Zero,
            };
            gemm.run(s, &mut scores[start..], PAGE);
        }
    }

    /// `outputs = factors * outputs + weights * values`
    #[inline(always)]
    fn weigh<S: Simd>(
        &self,
        s: S,
        weights: &[f32],
        page: usize,
        seen: Range<usize>,
        Rescaled { factors, outputs }: Rescaled<'_>,
        scratch: &mut [f32],
    ) {
        let (attention, size) = (self.attention, self.attention.pages.head_dim());
        let stored = attention.table.page(self.b, page);
        let values = attention.pages.values(stored, self.kv_head(), seen.clone(), scratch);
        let gemm = SmallGemm {
            m: self.positions.len(),
            n: size,
            k: seen.len(),
            a: Matrix::new(&weights[seen.start..], PAGE),
            b: Matrix::new(&values[seen.start * size..], size),
            start: Start::Rows(factors),
        };
        gemm.run(s, outputs, size);
    }

    /// `y = outputs / sums`
    #[inline(always)]
    fn finish<S: Simd>(&self, s: S, outputs: &[f32], sums: &[f32]) {
        let size = self.attention.pages.head_dim();
        for i in 0..self.positions.len() {
            // SAFETY: only this unit has this head of these rows.
            let y = unsafe { self.attention.y.part(self.t + i, self.head * size..(self.head + 1) * size) };
            let sum = s.splat(sums[i]);
            // Adding 0 turns -0, which an underflow may have left, into 0.
            lanes!(s, y, [x = &outputs[i * size..(i + 1) * size]] => s.add(s.div(x, sum), s.splat(0.0)));
        }
    }

    #[inline(always)]
    fn kv_head(&self) -> usize {
        self.head / (self.attention.heads() / self.attention.pages.kv_heads())
    }
}
