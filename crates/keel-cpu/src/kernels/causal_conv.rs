//! Depthwise causal convolution with SiLU, over the rows of a batch and the window that each sequence keeps.
//!
//! `y[t, c] = silu(bias[c] + sum_j weight[j, c] * x[t - (W - 1) + j, c])`, `W` the width (usually 4).
//! Rows before a sequence's first one in this step come from its window.
//!
//! # The window
//! A slot is `[W - 1, C]`, oldest row first. A step whose rows may be taken back leaves it as it is and writes them
//! to a log of `[R, C]` a slot. The next step is told how many of them were accepted, and moves the window on by that
//! many: taking back rows moves a count, no bytes.
//!
//! Memory: rows are read once and written once, `2 * 4 * T * C` bytes; the window adds `W - 1` rows of each.

#![allow(clippy::needless_range_loop, reason = "registers are numbered, not iterated")]

use super::rows::{Batch, Rows, RowsMut};
use crate::pool::Worker;
use crate::shared_slice::SharedMut;
use crate::simd::{self, LANES, Simd, VectorKernel, silu};
use std::ops::Range;

/// Channels that a worker takes at a time.
const BLOCK: usize = 8 * LANES;
/// Rows of a block that are done before the next: all of them lie in L1.
const TILE_ROWS: usize = 16;

/// Rows that the last step left open.
#[derive(Clone, Copy)]
pub struct ConvLog<'a> {
    /// `[slots, capacity, C]`, by slot of the sequence.
    pub rows: SharedMut<'a, f32>,
    /// Rows of a slot.
    pub capacity: usize,
    /// Rows to commit before this step's, `[B]`.
    pub accepted: &'a [u32],
    /// Leave this step's rows open (at most `capacity` for each sequence) instead of committing them.
    pub keep_open: bool,
}

/// What `causal_conv` reads and writes.
#[derive(Clone, Copy)]
pub struct CausalConv<'a> {
    /// `[T, C]` rows of all sequences.
    pub x: Rows<'a>,
    /// `[W, C]`: the checkpoint's `[C, 1, W]` transposed.
    pub weight: &'a [f32],
    /// `[C]`
    pub bias: Option<&'a [f32]>,
    /// Rows of each sequence. Positions are not read.
    pub batch: Batch<'a>,
    /// Slot of each sequence, `[B]`, all different.
    pub slot: &'a [u32],
    /// `[slots, W - 1, C]`, updated in place.
    pub window: SharedMut<'a, f32>,
    /// Where rows may be taken back; `None`: every step commits.
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
    assert!(conv.bias.is_none_or(|bias| bias.len() == channels));
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
        let blocks = self.conv.x.width().div_ceil(BLOCK);
        // Few rows are no work but cold memory: neighbouring blocks are one stream for the prefetcher.
        let grain =
            if self.conv.batch.most_rows() < TILE_ROWS { blocks.div_ceil(2 * self.worker.count) } else { 1 };
        for unit in self.worker.claim(self.conv.slot.len() * blocks, grain).flatten() {
            block(s, self.conv, unit / blocks, unit % blocks * BLOCK);
        }
    }
}

/// All rows of sequence `b` for the block of channels from `start` on.
#[inline(always)]
fn block<S: Simd>(s: S, conv: &CausalConv<'_>, b: usize, start: usize) {
    let end = (start + BLOCK).min(conv.x.width());
    let rows = conv.batch.rows_of(b).len();
    for start in (start..end).step_by(LANES) {
        Channels::of(conv, b, start, end).settle(s);
    }
    for tile in (0..rows).step_by(TILE_ROWS) {
        let tile = tile..(tile + TILE_ROWS).min(rows);
        for start in (start..end).step_by(LANES) {
            let channels = Channels::of(conv, b, start, end);
            match channels.before + 1 {
                4 => channels.convolve::<S, 4>(s, tile.clone()),
                _ => channels.convolve_any_width(s, tile.clone()),
            }
        }
    }
    for start in (start..end).step_by(LANES) {
        Channels::of(conv, b, start, end).keep(s, rows);
    }
}

/// Up to sixteen channels of one sequence.
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
    fn of(conv: &'c CausalConv<'a>, b: usize, start: usize, end: usize) -> Channels<'a, 'c> {
        let before = conv.weight.len() / conv.x.width() - 1;
        Channels { conv, b, start, len: LANES.min(end - start), before }
    }

    /// Row `i` of the slot's window.
    #[inline(always)]
    fn window(&self, i: usize) -> &'a mut [f32] {
        let slot = self.conv.slot[self.b] as usize * self.before;
        let start = (slot + i) * self.conv.x.width() + self.start;
        // SAFETY: only one worker has these channels of this slot, and it uses one row at a time.
        unsafe { self.conv.window.range(start..start + self.len) }
    }

    /// Row `i` of the slot's log.
    #[inline(always)]
    fn open(&self, log: &ConvLog<'a>, i: usize) -> &'a mut [f32] {
        let slot = self.conv.slot[self.b] as usize * log.capacity;
        let start = (slot + i) * self.conv.x.width() + self.start;
        // SAFETY: only one worker has these channels of this slot, and it uses one row at a time.
        unsafe { log.rows.range(start..start + self.len) }
    }

    /// Row `i` of this step; the committed window comes first.
    #[inline(always)]
    fn input(&self, i: usize) -> &[f32] {
        if i < self.before {
            return self.window(i);
        }
        let t = self.conv.batch.rows_of(self.b).start + i - self.before;
        &self.conv.x.row(t)[self.start..self.start + self.len]
    }

    /// Moves the window on by the rows of the last step that were accepted.
    #[inline(always)]
    fn settle<S: Simd>(&self, s: S) {
        let Some(log) = &self.conv.log else { return };
        let accepted = log.accepted[self.b] as usize;
        for i in 0..if accepted > 0 { self.before } else { 0 } {
            let row = match (accepted + i).checked_sub(self.before) {
                None => load(s, self.window(accepted + i)),
                Some(open) => load(s, self.open(log, open)),
            };
            store(s, row, self.window(i));
        }
    }

    /// Writes the step's `rows` rows to the log, or makes the last ones the window.
    #[inline(always)]
    fn keep<S: Simd>(&self, s: S, rows: usize) {
        if let Some(log) = self.conv.log.filter(|log| log.keep_open) {
            for i in 0..rows {
                store(s, load(s, self.input(self.before + i)), self.open(&log, i));
            }
        } else {
            for i in 0..self.before {
                let row = load(s, self.input(rows + i));
                store(s, row, self.window(i));
            }
        }
    }

    /// Rows `tile` of the step, the last `W` inputs held in registers.
    #[inline(always)]
    fn convolve<S: Simd, const W: usize>(&self, s: S, tile: Range<usize>) {
        let bias = bias(s, self.conv, self.start, self.len);
        let (mut weight, mut recent) = ([bias; W], [bias; W]);
        for j in 0..W {
            weight[j] = self.weight(s, j);
        }
        for j in 0..W - 1 {
            recent[j + 1] = load(s, self.input(tile.start + j));
        }
        for i in tile {
            self.prefetch(s, i + TILE_ROWS);
            recent.copy_within(1.., 0);
            recent[W - 1] = load(s, self.input(i + W - 1));
            let mut sum = bias;
            for j in 0..W {
                sum = s.fma(weight[j], recent[j], sum);
            }
            store(s, silu(s, sum), self.output(i));
        }
    }

    /// As [`Channels::convolve`], for a width that has no code of its own: inputs are read again for each tap.
    #[inline(always)]
    fn convolve_any_width<S: Simd>(&self, s: S, tile: Range<usize>) {
        for i in tile {
            let mut sum = bias(s, self.conv, self.start, self.len);
            for j in 0..=self.before {
                sum = s.fma(self.weight(s, j), load(s, self.input(i + j)), sum);
            }
            store(s, silu(s, sum), self.output(i));
        }
    }

    #[inline(always)]
    fn weight<S: Simd>(&self, s: S, j: usize) -> S::V {
        load(s, &self.conv.weight[j * self.conv.x.width() + self.start..][..self.len])
    }

    /// Asks for row `i`: the next row is too far away for the hardware to foresee it.
    #[inline(always)]
    fn prefetch<S: Simd>(&self, s: S, i: usize) {
        let rows = self.conv.batch.rows_of(self.b);
        if i < rows.len() {
            s.prefetch(self.conv.x.row(rows.start + i)[self.start..].as_ptr().cast());
        }
    }

    #[inline(always)]
    fn output(&self, i: usize) -> &'a mut [f32] {
        let t = self.conv.batch.rows_of(self.b).start + i;
        // SAFETY: only one worker has these channels of this row.
        unsafe { self.conv.y.part(t, self.start..self.start + self.len) }
    }
}

/// The bias of some channels, or zero.
#[inline(always)]
fn bias<S: Simd>(s: S, conv: &CausalConv<'_>, start: usize, len: usize) -> S::V {
    match conv.bias {
        Some(bias) => load(s, &bias[start..start + len]),
        None => s.splat(0.0),
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
