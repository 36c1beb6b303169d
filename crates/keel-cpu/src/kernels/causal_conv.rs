//! Depthwise causal convolution with SiLU, over the rows of a batch and the window that each sequence keeps.
//!
//! `y[t, c] = silu(sum_j weight[j, c] * x[t - (W - 1) + j, c])`, `W` the width (usually 4).
//! Rows before a sequence's first one in this step come from its window.
//!
//! # The window
//! A slot's window is `[W - 1, C]`, oldest row first. A step whose rows may be taken back leaves the window unchanged
//! and writes the rows to a log, `[R, C]` for each slot. The next step reads how many of them were accepted and moves
//! the window forward by that many rows. So taking rows back changes a count and moves no bytes.
//!
//! Memory: rows are read once and written once, `2 * 4 * T * C` bytes; the window adds `W - 1` rows of each.

#![allow(clippy::needless_range_loop, reason = "registers are numbered, not iterated")]

use super::rows::{Batch, Rows, RowsMut};
use crate::pool::Worker;
use crate::shared_slice::SharedMut;
use crate::simd::{self, LANES, Simd, VectorKernel, silu};
use std::array::from_fn;

/// Channels that a worker takes at a time where rows are few.
const BLOCK: usize = 8 * LANES;
/// The same where rows are many. The W input rows of a block then lie in L1, and each row's part is long enough for the
/// hardware's prefetcher.
const WIDE_BLOCK: usize = 32 * LANES;
/// Smallest number of rows of a sequence that counts as many.
const MANY_ROWS: usize = 16;
/// Distance of prefetching, in rows.
const ROWS_AHEAD: usize = 2;

/// Rows that the last step left open.
#[derive(Clone, Copy)]
pub struct ConvLog<'a> {
    /// `[slots, capacity, C]`, by slot of the sequence.
    pub rows: SharedMut<'a, f32>,
    /// Rows of a slot.
    pub capacity: usize,
    /// Number of logged rows to commit before this step's rows, `[B]`.
    pub accepted: &'a [u32],
    /// Leave this step's rows open (at most `capacity` for each sequence) instead of committing them.
    pub keep_open: bool,
}

/// Operands of [`causal_conv`].
#[derive(Clone, Copy)]
pub struct CausalConv<'a> {
    /// `[T, C]` rows of all sequences.
    pub x: Rows<'a>,
    /// `[W, C]`: the checkpoint's `[C, 1, W]` transposed.
    pub weight: &'a [f32],
    /// Rows of each sequence. Positions are not read.
    pub batch: Batch<'a>,
    /// Slot of each sequence, `[B]`, all different.
    pub slot: &'a [u32],
    /// `[slots, W - 1, C]`, updated in place.
    pub window: SharedMut<'a, f32>,
    /// Log of rows that may be taken back; `None`: every step commits its rows.
    pub log: Option<ConvLog<'a>>,
    /// `[T, C]`
    pub y: RowsMut<'a>,
}

/// Runs the convolution and updates the windows.
///
/// # Panics
/// If the shapes disagree, a slot lies outside `window`, or more rows than the log holds are accepted or kept open.
pub fn causal_conv(conv: &CausalConv<'_>, worker: &Worker<'_>) {
    let channels = conv.x.width();
    assert!(channels > 0 && conv.weight.len().is_multiple_of(channels) && !conv.weight.is_empty());
    assert!(
        conv.y.width() == channels && conv.x.len() >= conv.batch.rows() && conv.y.len() >= conv.batch.rows()
    );
    assert_eq!(conv.slot.len(), conv.batch.sequences());
    if let Some(log) = conv.log {
        assert_eq!(log.accepted.len(), conv.slot.len());
        assert!(!log.keep_open || conv.batch.most_rows() <= log.capacity, "more rows than a slot keeps open");
        assert!(
            log.accepted.iter().all(|&n| n as usize <= log.capacity),
            "more accepted than a slot keeps open"
        );
    }
    simd::run_at(worker.isa, Task { conv, worker });
}

struct Task<'a, 'w> {
    conv: &'a CausalConv<'a>,
    worker: &'a Worker<'w>,
}

impl VectorKernel for Task<'_, '_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let few = self.conv.batch.most_rows() < MANY_ROWS;
        let width = if few { BLOCK } else { WIDE_BLOCK };
        let blocks = self.conv.x.width().div_ceil(width);
        // With few rows the time goes into reading cold memory. Neighbouring blocks are then one stream for the
        // prefetcher, and a worker may find the windows that it wrote in the last step in its own cache.
        for unit in self.worker.claim_near(self.conv.slot.len() * blocks).flatten() {
            Channels::of(self.conv, unit / blocks, unit % blocks * width, width).run(s);
        }
    }
}

/// Some channels of one sequence.
struct Channels<'a, 'c> {
    conv: &'c CausalConv<'a>,
    b: usize,
    start: usize,
    len: usize,
    /// W - 1
    before: usize,
}

impl<'a, 'c> Channels<'a, 'c> {
    #[inline(always)]
    fn of(conv: &'c CausalConv<'a>, b: usize, start: usize, most: usize) -> Channels<'a, 'c> {
        let before = conv.weight.len() / conv.x.width() - 1;
        Channels { conv, b, start, len: most.min(conv.x.width() - start), before }
    }

    /// Runs all rows, one after another. Each is finished before the next: rows far apart may compete for one set of
    /// L1.
    #[inline(always)]
    fn run<S: Simd>(&self, s: S) {
        let rows = self.conv.batch.rows_of(self.b).len();
        if rows == 0 && self.conv.log.is_none_or(|log| log.accepted[self.b] == 0) {
            return;
        }
        self.settle();
        for i in 0..rows {
            match self.before + 1 {
                4 => self.convolve::<S, 4>(s, i),
                _ => self.convolve_any_width(s, i),
            }
        }
        self.keep(rows);
    }

    /// Row `i` of the slot's window.
    #[inline(always)]
    fn window(&self, i: usize) -> &'a mut [f32] {
        let slot = self.conv.slot[self.b] as usize * self.before;
        let start = (slot + i) * self.conv.x.width() + self.start;
        // SAFETY: only one worker uses these channels of this slot. Of the rows in use at once at most one is written,
        // and that row is not read meanwhile.
        unsafe { self.conv.window.range(start..start + self.len) }
    }

    /// Row `i` of the slot's log.
    #[inline(always)]
    fn open(&self, log: &ConvLog<'a>, i: usize) -> &'a mut [f32] {
        let slot = self.conv.slot[self.b] as usize * log.capacity;
        let start = (slot + i) * self.conv.x.width() + self.start;
        // SAFETY: only one worker uses these channels of this slot, and it uses one row at a time.
        unsafe { log.rows.range(start..start + self.len) }
    }

    /// Input row `i`: first the `W - 1` rows of the committed window, then the rows of this step.
    #[inline(always)]
    fn input(&self, i: usize) -> &[f32] {
        if i < self.before {
            return self.window(i);
        }
        let t = self.conv.batch.rows_of(self.b).start + i - self.before;
        &self.conv.x.row(t)[self.start..self.start + self.len]
    }

    /// Moves the window forward by the accepted rows of the last step.
    #[inline(always)]
    fn settle(&self) {
        let Some(log) = &self.conv.log else { return };
        let accepted = log.accepted[self.b] as usize;
        for i in 0..if accepted > 0 { self.before } else { 0 } {
            let row = match (accepted + i).checked_sub(self.before) {
                None => self.window(accepted + i),
                Some(open) => self.open(log, open),
            };
            self.window(i).copy_from_slice(row);
        }
    }

    /// Writes the step's `rows` rows to the log, or makes the last input rows the new window.
    #[inline(always)]
    fn keep(&self, rows: usize) {
        if let Some(log) = self.conv.log.filter(|log| log.keep_open) {
            for i in 0..rows {
                self.open(&log, i).copy_from_slice(self.input(self.before + i));
            }
        } else if rows > 0 {
            for i in 0..self.before {
                self.window(i).copy_from_slice(self.input(rows + i));
            }
        }
    }

    /// Computes output row `i` of the step.
    #[inline(always)]
    fn convolve<S: Simd, const W: usize>(&self, s: S, i: usize) {
        let (weights, inputs): ([_; W], [_; W]) =
            (from_fn(|j| self.weight(j)), from_fn(|j| self.input(i + j)));
        let (y, next) = (self.output(i), self.row_ahead(i));
        for c in (0..self.len).step_by(LANES) {
            let lanes = c..(c + LANES).min(self.len);
            s.prefetch(next.wrapping_add(c).cast());
            let mut sum = s.splat(0.0);
            for j in 0..W {
                sum = s.fma(load(s, &weights[j][lanes.clone()]), load(s, &inputs[j][lanes.clone()]), sum);
            }
            store(s, silu(s, sum), &mut y[lanes]);
        }
    }

    /// Like [`Channels::convolve`], for a width that has no code of its own.
    #[inline(always)]
    fn convolve_any_width<S: Simd>(&self, s: S, i: usize) {
        let y = self.output(i);
        for c in (0..self.len).step_by(LANES) {
            let lanes = c..(c + LANES).min(self.len);
            let mut sum = s.splat(0.0);
            for j in 0..=self.before {
                let input = load(s, &self.input(i + j)[lanes.clone()]);
                sum = s.fma(load(s, &self.weight(j)[lanes.clone()]), input, sum);
            }
            store(s, silu(s, sum), &mut y[lanes]);
        }
    }

    #[inline(always)]
    fn weight(&self, j: usize) -> &'a [f32] {
        &self.conv.weight[j * self.conv.x.width() + self.start..][..self.len]
    }

    /// Start of the row to prefetch. The hardware does not foresee the next rows, because they are too far away.
    #[inline(always)]
    fn row_ahead(&self, i: usize) -> *const f32 {
        let rows = self.conv.batch.rows_of(self.b);
        let t = (rows.start + i + ROWS_AHEAD).min(rows.end - 1);
        self.conv.x.row(t)[self.start..].as_ptr()
    }

    #[inline(always)]
    fn output(&self, i: usize) -> &'a mut [f32] {
        let t = self.conv.batch.rows_of(self.b).start + i;
        // SAFETY: only one worker uses these channels of this row.
        unsafe { self.conv.y.part(t, self.start..self.start + self.len) }
    }
}

#[inline(always)]
fn load<S: Simd>(s: S, x: &[f32]) -> S::V {
    match x.first_chunk() {
        Some(whole) => s.load(whole),
        None => s.load_partial(x),
    }
}

#[inline(always)]
fn store<S: Simd>(s: S, v: S::V, x: &mut [f32]) {
    match x.first_chunk_mut() {
        Some(whole) => s.store(v, whole),
        None => s.store_partial(v, x),
    }
}
