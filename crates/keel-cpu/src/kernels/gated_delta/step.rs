//! One step on a block of columns of one head's state.

use std::ops::Range;

use super::{DeltaLog, GatedDelta};
use crate::pool::Worker;
use crate::shared_slice::SharedMut;
use crate::simd::{LANES, Simd, VectorKernel, exp};

/// Most columns of a unit: eight vectors of sums for k S' and as many for q S'.
pub(super) const BLOCK: usize = 8 * LANES;
/// Columns of a unit where heads are too few to balance the workers.
const NARROW_BLOCK: usize = 2 * LANES;

/// A block of columns of a matrix `[Dk, columns]`.
#[derive(Clone, Copy)]
struct Block<'a> {
    data: SharedMut<'a, f32>,
    start: usize,
    stride: usize,
    columns: usize,
}

impl<'a> Block<'a> {
    /// Row `i`.
    ///
    /// # Safety
    /// The caller must be the only one to use this block.
    #[inline(always)]
    unsafe fn row(&self, i: usize) -> &'a mut [f32] {
        let start = self.start + i * self.stride;
        // SAFETY: the caller's promise.
        unsafe { self.data.range(start..start + self.columns) }
    }
}

/// The rows of all sequences.
pub(super) struct Step<'a, 'w> {
    pub(super) task: &'a GatedDelta<'a>,
    pub(super) workspace: SharedMut<'a, f32>,
    /// Where this worker's part of the workspace starts.
    pub(super) start: usize,
    pub(super) worker: &'a Worker<'w>,
    /// Keys and decays of open rows may be written while other units read those of accepted ones.
    pub(super) writes_keys: bool,
}

impl VectorKernel for Step<'_, '_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let shape = self.task.inputs.shape;
        let heads = self.task.slot.len() * shape.value_heads;
        let width = if heads < 4 * self.worker.count { NARROW_BLOCK } else { BLOCK };
        let blocks = shape.value_size.div_ceil(width);
        for unit in self.worker.claim(heads * blocks, 1).flatten() {
            let (group, block) = (unit / blocks, unit % blocks);
            let (b, head) = (group / shape.value_heads, group % shape.value_heads);
            let end = ((block + 1) * width).min(shape.value_size);
            let mut start = block * width;
            while start < end {
                let unit = Unit { step: &self, b, head, start };
                start += match (end - start) / LANES {
                    0 => unit.run::<S, 1>(s, end - start),
                    1 => unit.run::<S, 1>(s, LANES),
                    2..4 => unit.run::<S, 2>(s, 2 * LANES),
                    4..8 => unit.run::<S, 4>(s, 4 * LANES),
                    _ => unit.run::<S, 8>(s, 8 * LANES),
                };
            }
        }
    }
}

/// Columns from `start` on of one head of sequence `b`.
struct Unit<'a, 'w> {
    step: &'a Step<'a, 'w>,
    b: usize,
    head: usize,
    start: usize,
}

/// A token as one head sees it.
struct Token<'a> {
    q: &'a [f32],
    k: &'a [f32],
    /// q . k
    qk: f32,
    decay: f32,
    beta: f32,
}

impl Unit<'_, '_> {
    /// All rows of the sequence on `columns` columns, `N` vectors or (with N = 1) less. Returns `columns`.
    #[inline(always)]
    fn run<S: Simd, const N: usize>(&self, s: S, columns: usize) -> usize {
        let task = self.step.task;
        let shape = &task.inputs.shape;
        let (slot, key_head) = (task.slot[self.b] as usize, task.inputs.key_head(self.head));
        let committed = Block {
            data: task.state,
            start: (slot * shape.value_heads + self.head) * shape.key_size * shape.value_size + self.start,
            stride: shape.value_size,
            columns,
        };
        let keys = self.step.start;
        let ahead =
            Block { data: self.step.workspace, start: keys + 2 * shape.key_size, stride: columns, columns };
        let (rows, position) = (task.batch.rows_of(self.b), task.batch.position[self.b]);
        let accepted = task.log.map_or(0, |log| log.accepted[self.b] as usize);
        // The update of the last record shares a sweep with the first row, if there is one.
        let shared = task.log.as_ref().filter(|_| accepted > 0 && !rows.is_empty());
        if let Some(log) = &task.log {
            for i in 0..accepted - usize::from(shared.is_some()) {
                let Record { k, decay, u } = self.accepted::<S, N>(s, log, i, columns);
                update::<S, N>(s, &committed, &committed, k, decay, u);
            }
        }
        // SAFETY: this part of the workspace is this worker's alone.
        let (q, k) = unsafe { self.step.workspace.range(keys..keys + 2 * shape.key_size) }
            .split_at_mut(shape.key_size);
        let open = task.log.filter(|log| log.keep_open);
        let mut from = committed;
        for (i, t) in rows.clone().enumerate() {
            task.inputs.query(s, t, key_head, q);
            task.inputs.key(s, t, key_head, k);
            let log_decay = task.inputs.log_decay(t, self.head);
            let token = Token {
                qk: s.dot(q, k),
                q,
                k,
                decay: decay(s, log_decay),
                beta: task.inputs.beta(s, t, self.head),
            };
            let v = &task.inputs.value(t, self.head)[self.start..self.start + columns];
            let column = self.head * shape.value_size + self.start;
            // SAFETY: this unit alone has these columns of the row.
            let y = unsafe { task.y.part(t, column..column + columns) };
            // A closure here would not be compiled for the instructions of `S`.
            let last = match shared {
                Some(log) if i == 0 => Some(self.accepted(s, log, accepted - 1, columns)),
                _ => None,
            };
            let u = attend::<S, N>(s, &from, last, &token, v, y);
            match &open {
                None => update::<S, N>(s, &from, &committed, token.k, token.decay, u),
                Some(log) => {
                    let record = log.record_at(shape, slot, position, i);
                    store_row::<S, N>(s, u, self.record_u(log, record, columns));
                    if self.step.writes_keys && self.start == 0 {
                        self.write_key(log, record, token.k, log_decay);
                    }
                    if t + 1 < rows.end {
                        update::<S, N>(s, &from, &ahead, token.k, token.decay, u);
                        from = ahead;
                    }
                }
            }
        }
        columns
    }

    /// Record `i` of those that were accepted, as this unit sees it.
    #[inline(always)]
    fn accepted<'l, S: Simd, const N: usize>(
        &self,
        s: S,
        log: &DeltaLog<'l>,
        i: usize,
        columns: usize,
    ) -> Record<'l, S, N> {
        let task = self.step.task;
        let first = (task.batch.position[self.b], log.accepted[self.b]);
        let start = log.accepted_at(&task.inputs.shape, task.slot[self.b] as usize, first, i);
        self.record(s, log, start, columns)
    }

    /// The record that begins at `start`, as this unit sees it.
    #[inline(always)]
    fn record<'l, S: Simd, const N: usize>(
        &self,
        s: S,
        log: &DeltaLog<'l>,
        start: usize,
        columns: usize,
    ) -> Record<'l, S, N> {
        let key = self.key_of(start);
        let gate = self.gate_of(start);
        // SAFETY: keys and decays of accepted records are only read, by other units too, until the barrier, if there is one.
        let (k, log_decay) = unsafe { (&*log.records.range(key), log.records.range(gate..gate + 1)[0]) };
        let u = load_row::<S, N>(s, self.record_u(log, start, columns));
        Record { k, decay: decay(s, log_decay), u }
    }

    /// The place of this head's key in the record that begins at `start`.
    #[inline(always)]
    fn key_of(&self, start: usize) -> Range<usize> {
        let inputs = &self.step.task.inputs;
        let key = start + inputs.key_head(self.head) * inputs.shape.key_size;
        key..key + inputs.shape.key_size
    }

    /// The place of this head's decay in the record that begins at `start`.
    #[inline(always)]
    fn gate_of(&self, start: usize) -> usize {
        let shape = &self.step.task.inputs.shape;
        start + shape.key_heads * shape.key_size + shape.value_heads * shape.value_size + self.head
    }

    /// Writes this head's decay of a record that nobody reads in this step, and the key that it is the first to read.
    #[inline(always)]
    fn write_key(&self, log: &DeltaLog<'_>, start: usize, key: &[f32], log_decay: f32) {
        let (inputs, gate) = (&self.step.task.inputs, self.gate_of(start));
        // SAFETY: one unit of each head comes here.
        let gate = unsafe { log.records.range(gate..gate + 1) };
        gate[0] = log_decay;
        if self.head == 0 || inputs.key_head(self.head - 1) != inputs.key_head(self.head) {
            // SAFETY: the same, of one head.
            unsafe { log.records.range(self.key_of(start)) }.copy_from_slice(key);
        }
    }

    /// This unit's columns of u in the record that begins at `start`.
    #[inline(always)]
    fn record_u<'l>(&self, log: &DeltaLog<'l>, start: usize, columns: usize) -> &'l mut [f32] {
        let shape = &self.step.task.inputs.shape;
        let start = start + shape.key_heads * shape.key_size + self.head * shape.value_size + self.start;
        // SAFETY: this unit alone has these columns of this head, and holds one record at a time.
        unsafe { log.records.range(start..start + columns) }
    }
}

/// What it takes to repeat a row's update of some columns.
struct Record<'a, S: Simd, const N: usize> {
    k: &'a [f32],
    decay: f32,
    u: [S::V; N],
}

/// `y = q S' + (q . k) u`; returns `u = beta * (v - k S')`. The state first takes the update of the record `before`, with
/// the operations of [`update`].
#[inline(always)]
fn attend<S: Simd, const N: usize>(
    s: S,
    state: &Block<'_>,
    before: Option<Record<'_, S, N>>,
    token: &Token<'_>,
    v: &[f32],
    y: &mut [f32],
) -> [S::V; N] {
    let (mut ks, mut qs) = ([s.splat(0.0); N], [s.splat(0.0); N]);
    let decay = s.splat(token.decay);
    for (i, (&k, &q)) in token.k.iter().zip(token.q).enumerate() {
        let (k, q) = (s.splat(k), s.splat(q));
        // SAFETY: the block is this unit's alone.
        let mut row = load_row::<S, N>(s, unsafe { state.row(i) });
        if let Some(before) = &before {
            let (k, decay) = (s.splat(before.k[i]), s.splat(before.decay));
            for (x, &u) in row.iter_mut().zip(&before.u) {
                *x = s.fma(k, u, s.mul(*x, decay));
            }
            // SAFETY: as above, and the row has been read.
            store_row::<S, N>(s, row, unsafe { state.row(i) });
        }
        for n in 0..N {
            let decayed = s.mul(row[n], decay);
            ks[n] = s.fma(k, decayed, ks[n]);
            qs[n] = s.fma(q, decayed, qs[n]);
        }
    }
    let v = load_row::<S, N>(s, v);
    let mut u = v;
    for n in 0..N {
        u[n] = s.mul(s.splat(token.beta), s.sub(v[n], ks[n]));
        qs[n] = s.fma(s.splat(token.qk), u[n], qs[n]);
    }
    store_row::<S, N>(s, qs, y);
    u
}

/// `to = decay * from + k u^T`
#[inline(always)]
fn update<S: Simd, const N: usize>(
    s: S,
    from: &Block<'_>,
    to: &Block<'_>,
    k: &[f32],
    decay: f32,
    u: [S::V; N],
) {
    let decay = s.splat(decay);
    for (i, &k) in k.iter().enumerate() {
        let k = s.splat(k);
        // SAFETY: the blocks are this unit's alone, and a row is read before it is written.
        let mut row = load_row::<S, N>(s, unsafe { from.row(i) });
        for n in 0..N {
            row[n] = s.fma(k, u[n], s.mul(row[n], decay));
        }
        // SAFETY: as above.
        store_row::<S, N>(s, row, unsafe { to.row(i) });
    }
}

/// `N` vectors of `x`, or with N = 1 what there is of one.
#[inline(always)]
fn load_row<S: Simd, const N: usize>(s: S, x: &[f32]) -> [S::V; N] {
    if N == 1 && x.len() < LANES {
        return [s.load_partial(x); N];
    }
    let (chunks, _) = x.as_chunks::<LANES>();
    assert!(chunks.len() >= N);
    let mut row = [s.splat(0.0); N];
    for n in 0..N {
        row[n] = s.load(&chunks[n]);
    }
    row
}

/// Writes what [`load_row`] reads.
#[inline(always)]
fn store_row<S: Simd, const N: usize>(s: S, row: [S::V; N], x: &mut [f32]) {
    if N == 1 && x.len() < LANES {
        return s.store_partial(row[0], x);
    }
    let (chunks, _) = x.as_chunks_mut::<LANES>();
    assert!(chunks.len() >= N);
    for n in 0..N {
        s.store(row[n], &mut chunks[n]);
    }
}

/// `e^g` as every path of the rule computes it.
#[inline(always)]
fn decay<S: Simd>(s: S, log_decay: f32) -> f32 {
    s.to_array(exp(s, s.splat(log_decay)))[0]
}
