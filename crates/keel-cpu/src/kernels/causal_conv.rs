//! Depthwise causal convolution with SiLU, over the rows of a batch and the window that each sequence keeps.
//!
//! `y[t, c] = silu(bias[c] + sum_j weight[j, c] * x[t - (W - 1) + j, c])`, `W` the width (usually 4).
//! Rows before a sequence's first one in this step come from its window.
//!
//! # The window
//! A slot is `[W - 1 + R, C]`, oldest row first, where `R` is the most rows of a step that may be taken back
//! (0 without speculation). Rows `0..W - 1` are the committed window; a step that keeps its rows open appends
//! them. The next step is told how many of them were accepted, and moves the window on by that many:
//! taking back rows moves a count, no bytes.
//!
//! Memory: rows are read once and written once, `2 * 4 * T * C` bytes; the window adds `W - 1` rows of each.

use super::rows::{Batch, Rows, RowsMut};
use crate::pool::Worker;
use crate::shared_slice::SharedMut;
use crate::simd::{self, LANES, Simd, VectorKernel, silu};

/// Channels that a worker takes at a time.
const BLOCK: usize = 8 * LANES;

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
    /// `[slots, W - 1 + R, C]`, updated in place.
    pub window: SharedMut<'a, f32>,
    /// R: rows of a step that a slot can keep open.
    pub open_rows_max: usize,
    /// Open rows of the last step that were accepted, `[B]`; `None` where no step was left open.
    pub accepted: Option<&'a [u32]>,
    /// Leave this step's rows open (at most R for each sequence) instead of committing them.
    pub keep_open: bool,
    /// `[T, C]`
    pub y: RowsMut<'a>,
}

/// Runs the convolution and updates the windows.
///
/// # Panics
/// If the shapes disagree, a slot lies outside `window`, or a step with more than `open_rows_max` rows is kept open.
pub fn causal_conv(conv: &CausalConv<'_>, worker: &Worker<'_>) {
    let channels = conv.x.width();
    assert!(channels > 0 && conv.weight.len().is_multiple_of(channels) && !conv.weight.is_empty());
    assert!(conv.bias.is_none_or(|bias| bias.len() == channels));
    assert!(
        conv.y.width() == channels && conv.x.len() >= conv.batch.rows() && conv.y.len() >= conv.batch.rows()
    );
    assert_eq!(conv.slot.len(), conv.batch.sequences());
    assert!(conv.accepted.is_none_or(|accepted| accepted.len() == conv.slot.len()));
    assert!(
        !conv.keep_open || conv.batch.most_rows() <= conv.open_rows_max,
        "more rows than a slot keeps open"
    );
    simd::run(Task { conv, worker });
}

struct Task<'a, 'w> {
    conv: &'a CausalConv<'a>,
    worker: &'a Worker<'w>,
}

impl VectorKernel for Task<'_, '_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let channels = self.conv.x.width();
        let blocks = channels.div_ceil(BLOCK);
        for unit in self.worker.claim(self.conv.slot.len() * blocks, 1).flatten() {
            let (b, block) = (unit / blocks, unit % blocks);
            let mut start = block * BLOCK;
            let end = (start + BLOCK).min(channels);
            while start < end {
                let len = LANES.min(end - start);
                match self.conv.weight.len() / channels {
                    4 => lane_block::<S, 4>(s, self.conv, b, start, len),
                    _ => lane_block_of_any_width(s, self.conv, b, start, len),
                }
                start += len;
            }
        }
    }
}

/// The window of one sequence: its part of a slot for the channels `start..start + len`.
struct Window<'a> {
    data: SharedMut<'a, f32>,
    base: usize,
    channels: usize,
    len: usize,
}

impl<'a> Window<'a> {
    #[inline(always)]
    fn of(conv: &CausalConv<'a>, b: usize, start: usize, len: usize) -> Window<'a> {
        let channels = conv.x.width();
        let rows = conv.weight.len() / channels - 1 + conv.open_rows_max;
        Window { data: conv.window, base: conv.slot[b] as usize * rows * channels + start, channels, len }
    }

    #[inline(always)]
    fn row(&self, i: usize) -> &'a mut [f32] {
        let start = self.base + i * self.channels;
        // SAFETY: only one worker has these channels of this slot, and it uses one row at a time.
        unsafe { self.data.range(start..start + self.len) }
    }
}

/// All rows of sequence `b` for up to sixteen channels, the last `W` inputs held in registers.
#[inline(always)]
fn lane_block<S: Simd, const W: usize>(s: S, conv: &CausalConv<'_>, b: usize, start: usize, len: usize) {
    let channels = conv.x.width();
    let window = Window::of(conv, b, start, len);
    let accepted = conv.accepted.map_or(0, |accepted| accepted[b] as usize);
    let bias = bias(s, conv, start, len);
    let mut weight = [s.splat(0.0); W];
    for (j, weight) in weight.iter_mut().enumerate() {
        *weight = load(s, &conv.weight[j * channels + start..][..len]);
    }
    // The oldest first; the last one is the current row.
    let mut recent = [s.splat(0.0); W];
    for (i, recent) in recent[..W - 1].iter_mut().enumerate() {
        *recent = load(s, window.row(accepted + i));
    }
    let committed = recent;
    let mut newest = W - 1;
    for t in conv.batch.rows_of(b) {
        let x = load(s, &conv.x.row(t)[start..start + len]);
        recent[W - 1] = x;
        let mut sum = bias;
        for j in 0..W {
            sum = s.fma(weight[j], recent[j], sum);
        }
        // SAFETY: only one worker has these channels of this row.
        let y = unsafe { conv.y.part(t, start..start + len) };
        store(s, silu(s, sum), y);
        recent.copy_within(1.., 0);
        if conv.keep_open {
            store(s, x, window.row(newest));
            newest += 1;
        }
    }
    let kept = if conv.keep_open { committed } else { recent };
    for (i, row) in kept[..W - 1].iter().enumerate() {
        store(s, *row, window.row(i));
    }
}

/// As [`lane_block`], for a width that has no code of its own: inputs are read again for each tap.
#[inline(always)]
fn lane_block_of_any_width<S: Simd>(s: S, conv: &CausalConv<'_>, b: usize, start: usize, len: usize) {
    let channels = conv.x.width();
    let before = conv.weight.len() / channels - 1;
    let window = Window::of(conv, b, start, len);
    let accepted = conv.accepted.map_or(0, |accepted| accepted[b] as usize);
    for i in 0..if accepted > 0 { before } else { 0 } {
        let row = load(s, window.row(accepted + i));
        store(s, row, window.row(i));
    }
    let bias = bias(s, conv, start, len);
    let rows = conv.batch.rows_of(b);
    // Row `i` of the window followed by this step's rows.
    let input = |i: usize| {
        if i < before { &*window.row(i) } else { &conv.x.row(rows.start + i - before)[start..start + len] }
    };
    for i in 0..rows.len() {
        let mut sum = bias;
        for j in 0..=before {
            sum = s.fma(load(s, &conv.weight[j * channels + start..][..len]), load(s, input(i + j)), sum);
        }
        // SAFETY: only one worker has these channels of this row.
        let y = unsafe { conv.y.part(rows.start + i, start..start + len) };
        store(s, silu(s, sum), y);
    }
    if conv.keep_open {
        for i in 0..rows.len() {
            store(s, load(s, input(before + i)), window.row(before + i));
        }
    } else {
        for i in 0..before {
            let row = load(s, input(rows.len() + i));
            store(s, row, window.row(i));
        }
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
