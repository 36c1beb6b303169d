//! The gated delta rule, one token at a time: the decode regime.
//!
//! For each value head `h`, which reads key head `h / (Hv / Hk)`, with `S` its state `[Dk, Dv]`:
//!
//! ```text
//! q, k    = q / |q| * Dk^-0.5, k / |k|           |x| = sqrt(sum(x^2) + 1e-6)
//! beta    = sigmoid(b)
//! decay   = e^g,  g = -e^A_log * softplus(a + dt_bias)
//! S'      = decay * S
//! u       = beta * (v - k S')
//! y       = q S' + (q . k) u                     equal to q S, without another sweep
//! S       = S' + k u^T
//! ```
//!
//! Columns of a state do not meet, so heads are cut into column blocks when there are too few of them.
//!
//! # The delta log
//! `(k, u, g)` of a token is its *record*: `S = e^g S + k u^T` again gives the same bits. A step whose rows
//! may be taken back does not write the state: it leaves records. The next step is told how many were
//! accepted, applies those and writes the state once. Taking back rows moves a count, no bytes.
//!
//! Memory: a state is read once and written once, `8 * Hv * Dk * Dv` bytes a token of one sequence.
//! The first sweep (k S', q S') brings a block to L2, the second updates it there.

use super::rows::{Batch, Rows, RowsMut};
use crate::pool::Worker;
use crate::shared_slice::SharedMut;
use crate::simd::{self, LANES, Simd, VectorKernel, exp, lanes, sigmoid};

/// Added to the sum of squares of queries and keys.
const L2_EPS: f32 = 1e-6;
/// Most columns of a unit: eight vectors of sums for k S' and as many for q S'.
const BLOCK: usize = 8 * LANES;
/// Columns of a unit where heads are too few to balance the workers.
const NARROW_BLOCK: usize = 2 * LANES;

/// Sizes of the heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatedDeltaShape {
    /// Hk
    pub key_heads: usize,
    /// Hv, a multiple of Hk
    pub value_heads: usize,
    /// Dk
    pub key_size: usize,
    /// Dv
    pub value_size: usize,
}

impl GatedDeltaShape {
    /// Values of a row of q, k and v.
    pub fn qkv_len(&self) -> usize {
        2 * self.key_heads * self.key_size + self.value_heads * self.value_size
    }

    /// Values of a sequence's state.
    pub fn state_len(&self) -> usize {
        self.value_heads * self.key_size * self.value_size
    }

    /// Values of a record of the delta log: k `[Hk, Dk]`, u `[Hv, Dv]`, g `[Hv]`.
    pub fn record_len(&self) -> usize {
        self.key_heads * self.key_size + self.value_heads * (self.value_size + 1)
    }
}

/// What the rule reads for each row, in both regimes.
#[derive(Clone, Copy)]
pub struct GatedDeltaInputs<'a> {
    /// Sizes of the heads.
    pub shape: GatedDeltaShape,
    /// `[T, 2 Hk Dk + Hv Dv]`: queries, keys, values, after the convolution.
    pub qkv: Rows<'a>,
    /// `[T, Hv]`
    pub a: Rows<'a>,
    /// `[T, Hv]`
    pub b: Rows<'a>,
    /// `[Hv]`
    pub a_log: &'a [f32],
    /// `[Hv]`
    pub dt_bias: &'a [f32],
}

impl<'a> GatedDeltaInputs<'a> {
    pub(super) fn check(&self, rows: usize) {
        let shape = &self.shape;
        assert!(shape.key_heads > 0 && shape.value_heads.is_multiple_of(shape.key_heads), "{shape:?}");
        assert_eq!(self.qkv.width(), shape.qkv_len());
        assert!(self.a.width() == shape.value_heads && self.b.width() == shape.value_heads);
        assert!(self.a_log.len() == shape.value_heads && self.dt_bias.len() == shape.value_heads);
        assert!(self.qkv.len() >= rows && self.a.len() >= rows && self.b.len() >= rows);
    }

    /// The key head that value head `head` reads.
    #[inline(always)]
    pub(super) fn key_head(&self, head: usize) -> usize {
        head / (self.shape.value_heads / self.shape.key_heads)
    }

    /// `y = q / |q| * Dk^-0.5` of row `t`.
    #[inline(always)]
    pub(super) fn query<S: Simd>(&self, s: S, t: usize, key_head: usize, y: &mut [f32]) {
        let size = self.shape.key_size;
        l2_norm(s, &self.qkv.row(t)[key_head * size..][..size], (size as f32).sqrt().recip(), y);
    }

    /// `y = k / |k|` of row `t`.
    #[inline(always)]
    pub(super) fn key<S: Simd>(&self, s: S, t: usize, key_head: usize, y: &mut [f32]) {
        let size = self.shape.key_size;
        l2_norm(s, &self.qkv.row(t)[(self.shape.key_heads + key_head) * size..][..size], 1.0, y);
    }

    /// v of row `t`.
    #[inline(always)]
    pub(super) fn value(&self, t: usize, head: usize) -> &'a [f32] {
        let start = 2 * self.shape.key_heads * self.shape.key_size;
        &self.qkv.row(t)[start + head * self.shape.value_size..][..self.shape.value_size]
    }

    /// q, k and v of row `t` as value head `head` reads them, before the norms.
    #[inline(always)]
    pub(super) fn parts(&self, t: usize, head: usize) -> [&'a [f32]; 3] {
        let (row, size, key_head) = (self.qkv.row(t), self.shape.key_size, self.key_head(head));
        let k = self.shape.key_heads + key_head;
        [&row[key_head * size..][..size], &row[k * size..][..size], self.value(t, head)]
    }

    /// `g = -e^A_log * softplus(a + dt_bias)`
    pub(super) fn log_decay(&self, t: usize, head: usize) -> f32 {
        let x = self.a.row(t)[head] + self.dt_bias[head];
        // Beyond 20 the two agree in f32.
        let softplus = if x > 20.0 { x } else { x.exp().ln_1p() };
        -self.a_log[head].exp() * softplus
    }

    /// `sigmoid(b)`
    #[inline(always)]
    pub(super) fn beta<S: Simd>(&self, s: S, t: usize, head: usize) -> f32 {
        s.to_array(sigmoid(s, s.splat(self.b.row(t)[head])))[0]
    }
}

/// `y = x / sqrt(sum(x^2) + eps) * scale`
#[inline(always)]
fn l2_norm<S: Simd>(s: S, x: &[f32], scale: f32, y: &mut [f32]) {
    let factor = s.splat(scale / (s.dot(x, x) + L2_EPS).sqrt());
    lanes!(s, y, [x = x] => s.mul(x, factor));
}

/// `e^g` as every path of the rule computes it.
#[inline(always)]
fn decay<S: Simd>(s: S, log_decay: f32) -> f32 {
    s.to_array(exp(s, s.splat(log_decay)))[0]
}

/// Records of the rows that the last step left open.
#[derive(Clone, Copy)]
pub struct DeltaLog<'a> {
    /// `[slots, capacity, record_len]`, by slot of the sequence.
    pub records: SharedMut<'a, f32>,
    /// Records of a slot.
    pub capacity: usize,
    /// Records to apply before this step's rows, `[B]`.
    pub accepted: &'a [u32],
    /// Leave this step's rows open (at most `capacity` for each sequence) instead of committing them.
    pub keep_open: bool,
}

/// What `gated_delta` reads and writes.
#[derive(Clone, Copy)]
pub struct GatedDelta<'a> {
    /// Rows of all sequences.
    pub inputs: GatedDeltaInputs<'a>,
    /// Rows of each sequence. Positions are not read.
    pub batch: Batch<'a>,
    /// Slot of each sequence, `[B]`, all different.
    pub slot: &'a [u32],
    /// `[slots, Hv, Dk, Dv]`, updated in place.
    pub state: SharedMut<'a, f32>,
    /// Where rows may be taken back; `None`: every step commits.
    pub log: Option<DeltaLog<'a>>,
    /// `[T, Hv * Dv]`
    pub y: RowsMut<'a>,
}

/// `f32` values of workspace for `workers` workers.
pub fn gated_delta_workspace_len(shape: &GatedDeltaShape, workers: usize) -> usize {
    workers * worker_len(shape)
}

/// A query, a key, and a block of the state that runs ahead of the committed one.
fn worker_len(shape: &GatedDeltaShape) -> usize {
    shape.key_size * (2 + BLOCK)
}

/// The gated delta rule in the decode regime. `workspace` holds [`gated_delta_workspace_len`] values.
///
/// # Panics
/// If the shapes disagree, a slot lies outside `state`, or more rows than the log holds are to be kept open.
pub fn gated_delta(task: &GatedDelta<'_>, workspace: SharedMut<'_, f32>, worker: &Worker<'_>) {
    let shape = &task.inputs.shape;
    task.inputs.check(task.batch.rows());
    assert_eq!(task.slot.len(), task.batch.sequences());
    assert!(task.y.width() == shape.value_heads * shape.value_size && task.y.len() >= task.batch.rows());
    let needed = gated_delta_workspace_len(shape, worker.count);
    assert!(
        workspace.len() >= needed,
        "gated_delta: workspace of {} values, {needed} needed",
        workspace.len()
    );
    if let Some(log) = task.log {
        assert_eq!(log.accepted.len(), task.slot.len());
        assert!(
            !log.keep_open || task.batch.most_rows() <= log.capacity,
            "more rows than the log has records"
        );
        assert!(
            log.accepted.iter().all(|&n| n as usize <= log.capacity),
            "more accepted than the log has records"
        );
    }
    let start = worker.index * worker_len(shape);
    simd::run(Step { task, workspace, start, worker });
    if let Some(log) = task.log.filter(|log| log.keep_open) {
        // Keys and decays of a head are read by all its blocks, so they are replaced when all are done.
        worker.barrier();
        simd::run(WriteKeys { task, log, worker });
    }
}

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

struct Step<'a, 'w> {
    task: &'a GatedDelta<'a>,
    workspace: SharedMut<'a, f32>,
    /// Where this worker's part of the workspace starts.
    start: usize,
    worker: &'a Worker<'w>,
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
        if let Some(log) = &task.log {
            for i in 0..log.accepted[self.b] as usize {
                self.apply_record::<S, N>(s, log, slot, i, &committed);
            }
        }
        // SAFETY: this part of the workspace is this worker's alone.
        let (q, k) = unsafe { self.step.workspace.range(keys..keys + 2 * shape.key_size) }
            .split_at_mut(shape.key_size);
        let open = task.log.filter(|log| log.keep_open);
        let rows = task.batch.rows_of(self.b);
        let mut from = committed;
        for (i, t) in rows.clone().enumerate() {
            task.inputs.query(s, t, key_head, q);
            task.inputs.key(s, t, key_head, k);
            let token = Token {
                qk: s.dot(q, k),
                q,
                k,
                decay: decay(s, task.inputs.log_decay(t, self.head)),
                beta: task.inputs.beta(s, t, self.head),
            };
            let v = &task.inputs.value(t, self.head)[self.start..self.start + columns];
            let column = self.head * shape.value_size + self.start;
            // SAFETY: this unit alone has these columns of the row.
            let y = unsafe { task.y.part(t, column..column + columns) };
            let u = attend::<S, N>(s, &from, &token, v, y);
            match &open {
                None => update::<S, N>(s, &from, &committed, token.k, token.decay, u),
                Some(log) => {
                    store_row::<S, N>(s, u, self.record_u(log, slot, i, columns));
                    if t + 1 < rows.end {
                        update::<S, N>(s, &from, &ahead, token.k, token.decay, u);
                        from = ahead;
                    }
                }
            }
        }
        columns
    }

    /// `S = e^g S + k u^T` with record `i` of the slot.
    #[inline(always)]
    fn apply_record<S: Simd, const N: usize>(
        &self,
        s: S,
        log: &DeltaLog<'_>,
        slot: usize,
        i: usize,
        state: &Block<'_>,
    ) {
        let shape = &self.step.task.inputs.shape;
        let start = (slot * log.capacity + i) * shape.record_len();
        let key = start + self.step.task.inputs.key_head(self.head) * shape.key_size;
        let gate =
            start + shape.key_heads * shape.key_size + shape.value_heads * shape.value_size + self.head;
        // SAFETY: keys and decays are only read until the barrier; other units read them too.
        let (k, log_decay) =
            unsafe { (&*log.records.range(key..key + shape.key_size), log.records.range(gate..gate + 1)[0]) };
        let u = load_row::<S, N>(s, self.record_u(log, slot, i, state.columns));
        update::<S, N>(s, state, state, k, decay(s, log_decay), u);
    }

    /// This unit's columns of u in record `i` of the slot.
    #[inline(always)]
    fn record_u<'l>(&self, log: &DeltaLog<'l>, slot: usize, i: usize, columns: usize) -> &'l mut [f32] {
        let shape = &self.step.task.inputs.shape;
        let start = (slot * log.capacity + i) * shape.record_len() + shape.key_heads * shape.key_size;
        let start = start + self.head * shape.value_size + self.start;
        // SAFETY: this unit alone has these columns of this head, and holds one record at a time.
        unsafe { log.records.range(start..start + columns) }
    }
}

/// `y = q S' + (q . k) u`; returns `u = beta * (v - k S')`.
#[inline(always)]
fn attend<S: Simd, const N: usize>(
    s: S,
    state: &Block<'_>,
    token: &Token<'_>,
    v: &[f32],
    y: &mut [f32],
) -> [S::V; N] {
    let (mut ks, mut qs) = ([s.splat(0.0); N], [s.splat(0.0); N]);
    let decay = s.splat(token.decay);
    for (i, (&k, &q)) in token.k.iter().zip(token.q).enumerate() {
        let (k, q) = (s.splat(k), s.splat(q));
        // SAFETY: the block is this unit's alone.
        let row = load_row::<S, N>(s, unsafe { state.row(i) });
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

/// Keys and decays of the rows kept open.
struct WriteKeys<'a, 'w> {
    task: &'a GatedDelta<'a>,
    log: DeltaLog<'a>,
    worker: &'a Worker<'w>,
}

impl VectorKernel for WriteKeys<'_, '_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (inputs, batch) = (&self.task.inputs, &self.task.batch);
        let shape = &inputs.shape;
        for t in self.worker.claim(batch.rows(), 1).flatten() {
            let b = batch.sequence_of(t);
            let record = self.task.slot[b] as usize * self.log.capacity + t - batch.rows_of(b).start;
            let keys = record * shape.record_len();
            let gates = keys + shape.key_heads * shape.key_size + shape.value_heads * shape.value_size;
            // SAFETY: each row has one record, and each row is claimed once.
            let (keys, gates) = unsafe {
                let keys = self.log.records.range(keys..keys + shape.key_heads * shape.key_size);
                (keys, self.log.records.range(gates..gates + shape.value_heads))
            };
            for (head, key) in keys.chunks_exact_mut(shape.key_size).enumerate() {
                inputs.key(s, t, head, key);
            }
            for (head, gate) in gates.iter_mut().enumerate() {
                *gate = inputs.log_decay(t, head);
            }
        }
    }
}
