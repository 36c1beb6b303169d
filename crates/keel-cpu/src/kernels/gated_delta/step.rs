//! One step on a block of columns of one head's state.

use super::state::{load_row, store_row};
use super::{DeltaLog, GatedDelta, StateElement};
use crate::pool::Worker;
use crate::shared_slice::SharedMut;
use crate::simd::{LANES, Simd, VectorKernel, exp};

/// Most columns of a unit: eight vectors of sums for k S' and eight for q S'.
pub(super) const BLOCK: usize = 8 * LANES;
/// Columns of a unit where heads are too few to balance the workers.
const NARROW_BLOCK: usize = 2 * LANES;
/// Most records that one sweep over a state applies.
const RECORDS: usize = 4;

/// A block of columns of a matrix `[Dk, columns]`.
#[derive(Clone, Copy)]
struct Block<'a, E> {
    data: SharedMut<'a, E>,
    start: usize,
    stride: usize,
    columns: usize,
}

impl<'a, E> Block<'a, E> {
    /// Row `i`.
    ///
    /// # Safety
    /// The caller must be the only one to use this block.
    #[inline(always)]
    unsafe fn row(&self, i: usize) -> &'a mut [E] {
        let start = self.start + i * self.stride;
        // SAFETY: the caller's promise.
        unsafe { self.data.range(start..start + self.columns) }
    }
}

/// The rows of all sequences.
pub(super) struct Step<'a, 'w, E> {
    pub(super) task: &'a GatedDelta<'a, E>,
    pub(super) workspace: SharedMut<'a, f32>,
    /// Where this worker's part of the workspace starts.
    pub(super) start: usize,
    pub(super) worker: &'a Worker<'w>,
}

impl<E: StateElement> VectorKernel for Step<'_, '_, E> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let shape = self.task.inputs.shape;
        let heads = self.task.slot.len() * shape.value_heads;
        let wide = heads * shape.value_size.div_ceil(BLOCK);
        let is_balanced = wide >= 4 * self.worker.count || wide.is_multiple_of(self.worker.count);
        let width = if is_balanced { BLOCK } else { NARROW_BLOCK };
        let blocks = shape.value_size.div_ceil(width);
        // A worker returns to the states that it wrote in the last step: they may still be in its own cache.
        for unit in self.worker.claim_near(heads * blocks).flatten() {
            let (group, block) = (unit / blocks, unit % blocks);
            let (b, head) = (group / shape.value_heads, group % shape.value_heads);
            let end = ((block + 1) * width).min(shape.value_size);
            let mut start = block * width;
            while start < end {
                let unit = Unit { step: &self, b, head, start };
                start += match (end - start) / LANES {
                    0..2 => unit.run::<S, 1>(s, (end - start).min(LANES)),
                    2..4 => unit.run::<S, 2>(s, 2 * LANES),
                    4..8 => unit.run::<S, 4>(s, 4 * LANES),
                    _ => unit.run::<S, 8>(s, 8 * LANES),
                };
            }
        }
    }
}

/// Columns from `start` on of one head of sequence `b`.
struct Unit<'a, 'w, E> {
    step: &'a Step<'a, 'w, E>,
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

impl<E: StateElement> Unit<'_, '_, E> {
    /// Runs all rows of the sequence on `columns` columns: `N` vectors, or with N = 1 a part of one. Returns `columns`.
    #[inline(always)]
    fn run<S: Simd, const N: usize>(&self, s: S, columns: usize) -> usize {
        let task = self.step.task;
        let shape = &task.inputs.shape;
        let accepted = task.log.map_or(0, |log| log.accepted[self.b] as usize);
        if task.batch.rows_of(self.b).is_empty() && accepted == 0 {
            return columns;
        }
        let (slot, key_head) = (task.slot[self.b] as usize, task.inputs.key_head(self.head));
        let committed = Block {
            data: task.state,
            start: (slot * shape.value_heads + self.head) * shape.key_size * shape.value_size + self.start,
            stride: shape.value_size,
            columns,
        };
        let size = shape.key_size;
        let keys = self.step.start;
        let own = self.step.workspace.part(keys + 3 * size..keys + super::worker_len(shape));
        // SAFETY: f32 memory has room for as many elements of any state, and is aligned for them. Only this worker uses
        // this part.
        let data = unsafe { SharedMut::from_raw(own.as_ptr().cast::<E>(), own.len()) };
        let ahead = Block { data, start: 0, stride: columns, columns };
        let rows = task.batch.rows_of(self.b);
        // Updates that `from` has not had yet.
        let mut records = Records::none(s);
        for i in 0..accepted {
            let Some(log) = &task.log else { break };
            if records.are_full() {
                update(s, &committed, &committed, &records);
                records = Records::none(s);
            }
            records.add(self.record::<S, N>(s, log, log.record_at(shape, slot, i), columns));
        }
        // SAFETY: only this worker uses this part of the workspace.
        let q = unsafe { self.step.workspace.range(keys..keys + size) };
        let open = task.log.filter(|log| log.keep_open);
        let (mut from, mut to) = (committed, committed);
        for (i, t) in rows.clone().enumerate() {
            let key = keys + (1 + i % 2) * size;
            // SAFETY: as above. Rows alternate between two keys, because the record of the row before still uses its
            // own.
            let k = unsafe { self.step.workspace.range(key..key + size) };
            task.inputs.query(s, t, key_head, q);
            task.inputs.key(s, t, key_head, k);
            let k = &*k;
            let token = Token {
                qk: s.dot(q, k),
                q,
                k,
                decay: decay(s, task.inputs.log_decay(t, self.head)),
                beta: task.inputs.beta(s, t, self.head),
            };
            let v = &task.inputs.value(t, self.head)[self.start..self.start + columns];
            let column = self.head * shape.value_size + self.start;
            // SAFETY: only this unit has these columns of the row.
            let y = unsafe { task.y.part(t, column..column + columns) };
            let u = attend::<E, S, N>(s, &from, &to, &records, &token, v, y);
            if let Some(log) = &open {
                store_row(s, u, self.record_u(log, log.record_at(shape, slot, i), columns));
                // The committed state stays unchanged from here on; `ahead` receives the updates of open rows.
                (from, to) = (to, ahead);
            }
            records = Records::none(s);
            records.add(Record { k, decay: token.decay, u });
        }
        if open.is_none() || rows.is_empty() {
            update(s, &committed, &committed, &records);
        }
        columns
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
        let inputs = &self.step.task.inputs;
        let shape = &inputs.shape;
        let key = start + inputs.key_head(self.head) * shape.key_size;
        let gate =
            start + shape.key_heads * shape.key_size + shape.value_heads * shape.value_size + self.head;
        // SAFETY: up to the barrier, all units only read keys and decays of records.
        let (k, log_decay) =
            unsafe { (&*log.records.range(key..key + shape.key_size), log.records.range(gate..gate + 1)[0]) };
        let u = load_row(s, &*self.record_u(log, start, columns));
        Record { k, decay: decay(s, log_decay), u }
    }

    /// This unit's columns of u in the record that begins at `start`.
    #[inline(always)]
    fn record_u<'l>(&self, log: &DeltaLog<'l>, start: usize, columns: usize) -> &'l mut [f32] {
        let shape = &self.step.task.inputs.shape;
        let start = start + shape.key_heads * shape.key_size + self.head * shape.value_size + self.start;
        // SAFETY: only this unit has these columns of this head, and it holds one record at a time.
        unsafe { log.records.range(start..start + columns) }
    }
}

/// The data that repeats a row's update of some columns: `S = decay * S + k u^T`.
#[derive(Clone, Copy)]
struct Record<'a, S: Simd, const N: usize> {
    k: &'a [f32],
    decay: f32,
    u: [S::V; N],
}

/// Updates that a state has not had yet, in order.
struct Records<'a, S: Simd, const N: usize> {
    all: [Record<'a, S, N>; RECORDS],
    len: usize,
}

impl<'a, S: Simd, const N: usize> Records<'a, S, N> {
    #[inline(always)]
    fn none(s: S) -> Self {
        Records { all: [Record { k: &[], decay: 1.0, u: [s.splat(0.0); N] }; RECORDS], len: 0 }
    }

    #[inline(always)]
    fn are_full(&self) -> bool {
        self.len == RECORDS
    }

    #[inline(always)]
    fn add(&mut self, record: Record<'a, S, N>) {
        self.all[self.len] = record;
        self.len += 1;
    }

    /// Row `i` of a state, after these updates.
    #[inline(always)]
    fn repeat<E: StateElement>(&self, s: S, mut row: [S::V; N], i: usize) -> [S::V; N] {
        for record in &self.all[..self.len] {
            let (k, decay) = (s.splat(record.k[i]), s.splat(record.decay));
            for (x, &u) in row.iter_mut().zip(&record.u) {
                *x = E::kept(s, s.fma(k, u, s.mul(*x, decay)));
            }
        }
        row
    }
}

/// `y = q S' + (q . k) u`; returns `u = beta * (v - k S')`. The state is `from` with the updates of `records` applied.
/// If there are any updates, the result is stored in `to`.
#[inline(always)]
fn attend<E: StateElement, S: Simd, const N: usize>(
    s: S,
    from: &Block<'_, E>,
    to: &Block<'_, E>,
    records: &Records<'_, S, N>,
    token: &Token<'_>,
    v: &[f32],
    y: &mut [f32],
) -> [S::V; N] {
    let (mut ks, mut qs) = ([s.splat(0.0); N], [s.splat(0.0); N]);
    let decay = s.splat(token.decay);
    for (i, (&k, &q)) in token.k.iter().zip(token.q).enumerate() {
        let (k, q) = (s.splat(k), s.splat(q));
        // SAFETY: only this unit has the blocks, and a row is read before it is written.
        let mut row = load_row(s, &*unsafe { from.row(i) });
        if records.len > 0 {
            row = records.repeat::<E>(s, row, i);
            // SAFETY: as above.
            store_row(s, row, unsafe { to.row(i) });
        }
        for n in 0..N {
            let decayed = s.mul(row[n], decay);
            ks[n] = s.fma(k, decayed, ks[n]);
            qs[n] = s.fma(q, decayed, qs[n]);
        }
    }
    let v = load_row(s, v);
    let mut u = v;
    for n in 0..N {
        u[n] = s.mul(s.splat(token.beta), s.sub(v[n], ks[n]));
        qs[n] = s.fma(s.splat(token.qk), u[n], qs[n]);
    }
    store_row(s, qs, y);
    u
}

/// Stores `from`, with the updates of `records` applied, in `to`.
#[inline(always)]
fn update<E: StateElement, S: Simd, const N: usize>(
    s: S,
    from: &Block<'_, E>,
    to: &Block<'_, E>,
    records: &Records<'_, S, N>,
) {
    if records.len == 0 {
        return;
    }
    for i in 0..records.all[0].k.len() {
        // SAFETY: only this unit has the blocks, and a row is read before it is written.
        let row = load_row(s, &*unsafe { from.row(i) });
        // SAFETY: as above.
        store_row(s, records.repeat::<E>(s, row, i), unsafe { to.row(i) });
    }
}

/// `e^g`. Every path of the rule uses this function, so their bits agree.
#[inline(always)]
fn decay<S: Simd>(s: S, log_decay: f32) -> f32 {
    s.to_array(exp(s, s.splat(log_decay)))[0]
}
