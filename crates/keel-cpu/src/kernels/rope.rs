//! Rotary position embedding: its table, and the fused norm and rotation of queries and keys.
//!
//! Half-split pairs over the first `n` values of a head, the rest unchanged; `i < n / 2`:
//!
//! ```text
//! angle[t, i]  = position[axis[i], t] * inverse_frequency[i]
//! y[i]         = x[i] * cos(angle[i])         - x[i + n/2] * sin(angle[i])
//! y[i + n/2]   = x[i + n/2] * cos(angle[i])   + x[i] * sin(angle[i])
//! ```
//!
//! The table is made once a step and shared by all layers. Angles are formed in `f64`: in `f32` an angle near
//! position 8192 would be off by 2e-4.
//!
//! Memory: `qk_norm_rope` reads each query, key and value once and writes it once, `(H + 2 KV) * D` values a row.

use super::attention::{HEAD_SIZE_MAX, KvElement, KvPagesMut, PAGE, PageTable, TILE};
use super::rms_norm::{inverse_rms, scale_by_weight};
use super::rows::{Batch, Rows, RowsMut};
use crate::pool::Worker;
use crate::simd::{self, LANES, Simd, VectorKernel};

/// Query heads that a worker takes at a time.
const QUERY_GRAIN: usize = 8;

/// Which row of positions turns each frequency, for multi-axis rope.
///
/// `sections` counts the frequencies of each axis (time, height, width). Side by side they stand in that
/// order; interleaved, frequency `i` belongs to axis `i % 3` while that axis has any left, then to time.
pub fn mrope_axes(sections: [usize; 3], interleaved: bool) -> Vec<u8> {
    let frequencies = sections.iter().sum();
    (0..frequencies)
        .map(|i| {
            let axis = if interleaved {
                let axis = i % 3;
                if i < 3 * sections[axis] { axis } else { 0 }
            } else {
                usize::from(i >= sections[0]) + usize::from(i >= sections[0] + sections[1])
            };
            axis as u8
        })
        .collect()
}

/// Fills `cos` and `sin`, both `[T, n / 2]`.
///
/// `positions` is `[axes, T]`; `axis[i]` says which of its rows turns frequency `i` (empty: always the first).
///
/// # Panics
/// If the shapes disagree.
pub fn rope_table(
    positions: &[u32],
    inverse_frequency: &[f64],
    axis: &[u8],
    cos: RowsMut<'_>,
    sin: RowsMut<'_>,
    worker: &Worker<'_>,
) {
    let (rows, frequencies) = (cos.len(), inverse_frequency.len());
    assert!(cos.width() == frequencies && sin.width() == frequencies && sin.len() == rows);
    assert!(axis.is_empty() || axis.len() == frequencies, "one axis for each frequency, or none at all");
    let axes = axis.iter().max().map_or(1, |&last| usize::from(last) + 1);
    assert!(positions.len() >= axes * rows, "{} positions for {rows} rows on {axes} axes", positions.len());
    for t in worker.claim(rows, 8).flatten() {
        // SAFETY: each row is claimed once.
        let (cos, sin) = unsafe { (cos.row(t), sin.row(t)) };
        for (i, frequency) in inverse_frequency.iter().enumerate() {
            let row = axis.get(i).map_or(0, |&axis| usize::from(axis));
            let (s, c) = (f64::from(positions[row * rows + t]) * frequency).sin_cos();
            (cos[i], sin[i]) = (c as f32, s as f32);
        }
    }
}

/// What `qk_norm_rope` reads and writes.
#[derive(Clone, Copy)]
pub struct QkNormRope<'a, E> {
    /// `[T, H * query_stride]`: head `h` starts at `h * query_stride` (2 D where an output gate follows each query).
    pub q: Rows<'a>,
    /// `[T, KV * D]`
    pub k: Rows<'a>,
    /// `[T, KV * D]`, copied to the pages as it is.
    pub v: Rows<'a>,
    /// Values from one query head to the next in a row of `q`.
    pub query_stride: usize,
    /// Effective weights of the query and key norm, `[D]` each; `None`: no norm.
    pub norm: Option<(&'a [f32], &'a [f32])>,
    /// Epsilon of the norms.
    pub eps: f32,
    /// `(cos, sin)` of [`rope_table`], `[T, n / 2]` each; width 0 for no rotation.
    pub rope: (Rows<'a>, Rows<'a>),
    /// Rows and positions of each sequence.
    pub batch: Batch<'a>,
    /// Where each sequence's tokens live.
    pub table: PageTable<'a>,
    /// Receives keys and values.
    pub pages: KvPagesMut<'a, E>,
    /// `[T, H * D]`
    pub y: RowsMut<'a>,
}

/// Norms and rotates queries into `y`, and keys into their pages; copies values into theirs.
///
/// # Panics
/// If the shapes disagree or a page lies outside the pool.
pub fn qk_norm_rope<E: KvElement>(task: &QkNormRope<'_, E>, worker: &Worker<'_>) {
    let (size, rows) = (task.pages.head_size, task.batch.rows());
    assert!(size <= HEAD_SIZE_MAX, "heads of {size} values, at most {HEAD_SIZE_MAX}");
    assert!(task.query_stride >= size && task.q.width().is_multiple_of(task.query_stride));
    assert_eq!(task.y.width(), task.q.width() / task.query_stride * size);
    assert!(task.k.width() == task.pages.kv_heads * size && task.v.width() == task.k.width());
    assert!(task.q.len() >= rows && task.k.len() >= rows && task.v.len() >= rows && task.y.len() >= rows);
    let (cos, sin) = task.rope;
    assert!(cos.width() == sin.width() && 2 * cos.width() <= size && cos.len() >= rows && sin.len() >= rows);
    assert!(task.norm.is_none_or(|(q, k)| q.len() == size && k.len() == size));
    simd::run_at(worker.isa, Fused { task, worker });
}

struct Fused<'a, 'w, E> {
    task: &'a QkNormRope<'a, E>,
    worker: &'a Worker<'w>,
}

impl<E: KvElement> VectorKernel for Fused<'_, '_, E> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let task = self.task;
        let heads = task.q.width() / task.query_stride;
        let query_units = (task.batch.rows() * heads).div_ceil(QUERY_GRAIN);
        // Tokens of one tile of keys share cache lines, so one worker writes all of them.
        let tiles = task.batch.most_rows().div_ceil(TILE) + 1;
        let key_units = task.batch.sequences() * tiles * task.pages.kv_heads;
        for unit in self.worker.claim(query_units + key_units, 1).flatten() {
            if unit < query_units {
                let end = ((unit + 1) * QUERY_GRAIN).min(task.batch.rows() * heads);
                for i in unit * QUERY_GRAIN..end {
                    query(s, task, i / heads, i % heads);
                }
            } else {
                let unit = unit - query_units;
                let (group, head) = (unit / task.pages.kv_heads, unit % task.pages.kv_heads);
                keys_and_values_of_tile(s, task, group / tiles, group % tiles, head);
            }
        }
    }
}

#[inline(always)]
fn query<S: Simd, E: KvElement>(s: S, task: &QkNormRope<'_, E>, t: usize, head: usize) {
    let size = task.pages.head_size;
    let x = &task.q.row(t)[head * task.query_stride..][..size];
    // SAFETY: each head of each row belongs to one unit.
    let y = unsafe { task.y.part(t, head * size..(head + 1) * size) };
    norm_and_rotate(s, x, task.norm.map(|(weight, _)| weight), task.eps, task.rope, t, y);
}

/// The rows of sequence `b` that lie in its `tile`-th tile of keys, counted from that of its first row.
#[inline(always)]
fn keys_and_values_of_tile<S: Simd, E: KvElement>(
    s: S,
    task: &QkNormRope<'_, E>,
    b: usize,
    tile: usize,
    head: usize,
) {
    let (rows, first) = (task.batch.rows_of(b), task.batch.position[b] as usize);
    let tile_start = (first / TILE + tile) * TILE;
    let size = task.pages.head_size;
    let mut key = [0.0; HEAD_SIZE_MAX];
    for position in tile_start.max(first)..(tile_start + TILE).min(first + rows.len()) {
        let t = rows.start + position - first;
        let columns = head * size..(head + 1) * size;
        let x = &task.k.row(t)[columns.clone()];
        norm_and_rotate(s, x, task.norm.map(|(_, weight)| weight), task.eps, task.rope, t, &mut key[..size]);
        let page = task.table.page(b, position / PAGE);
        // SAFETY: each tile of each head belongs to one unit.
        unsafe { task.pages.write(page, head, position % PAGE, &key[..size], &task.v.row(t)[columns]) };
    }
}

/// `y = rope(rms_norm(x))` of one head.
#[inline(always)]
fn norm_and_rotate<S: Simd>(
    s: S,
    x: &[f32],
    weight: Option<&[f32]>,
    eps: f32,
    (cos, sin): (Rows<'_>, Rows<'_>),
    t: usize,
    y: &mut [f32],
) {
    match weight {
        Some(weight) => scale_by_weight(s, x, inverse_rms(s, x, eps), weight, y),
        None => y.copy_from_slice(x),
    }
    if cos.width() > 0 {
        rotate(s, y, cos.row(t), sin.row(t));
    }
}

/// Rotates the first `2 * cos.len()` values of a head in place.
#[inline(always)]
fn rotate<S: Simd>(s: S, x: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (low, high) = x[..2 * cos.len()].split_at_mut(cos.len());
    let ((lows, low_tail), (highs, high_tail)) =
        (low.as_chunks_mut::<LANES>(), high.as_chunks_mut::<LANES>());
    let ((coss, cos_tail), (sins, sin_tail)) = (cos.as_chunks::<LANES>(), sin.as_chunks::<LANES>());
    for (((low, high), cos), sin) in lows.iter_mut().zip(highs).zip(coss).zip(sins) {
        let (a, b) = turn(s, s.load(low), s.load(high), s.load(cos), s.load(sin));
        s.store(a, low);
        s.store(b, high);
    }
    if !low_tail.is_empty() {
        let (a, b) = (s.load_partial(low_tail), s.load_partial(high_tail));
        let (a, b) = turn(s, a, b, s.load_partial(cos_tail), s.load_partial(sin_tail));
        s.store_partial(a, low_tail);
        s.store_partial(b, high_tail);
    }
}

#[inline(always)]
fn turn<S: Simd>(s: S, a: S::V, b: S::V, cos: S::V, sin: S::V) -> (S::V, S::V) {
    (s.fnma(b, sin, s.mul(a, cos)), s.fma(a, sin, s.mul(b, cos)))
}
