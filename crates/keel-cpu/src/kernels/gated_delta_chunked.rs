//! The gated delta rule, 64 tokens at a time: the prefill regime.
//!
//! Within a chunk let `G[i]` be the sum of `g` up to row `i`, `S` the state before the chunk, and
//! `D[i, j] = e^(G[i] - G[j])` for `j <= i`. Unrolling the rule of [`super::gated_delta`] gives
//!
//! ```text
//! (1 + L) U = R          L[i, j] = beta[i] D[i, j] k[i].k[j]  (j < i),  R[i] = beta[i] (v[i] - e^G[i] k[i] S)
//! Y         = e^G q S + P U                                    P[i, j] = D[i, j] q[i].k[j]        (j <= i)
//! S         = e^G[last] S + sum_j e^(G[last] - G[j]) k[j] u[j]^T
//! ```
//!
//! so all but the solution of the unit triangular system are matrix products. The system is solved for the Dv
//! right-hand sides directly, eight rows at a time, which needs less arithmetic than forming the inverse of
//! `1 + L` as is done where heads of many chunks run at once. No exponent is ever positive.
//!
//! Chunks are anchored at position 0, so a call's first row must stand at a multiple of 64; only a
//! sequence's last chunk may be partial. Its missing rows are zeros that take part in nothing.
//!
//! Cost of a chunk and value head: `64 (6 Dk Dv + 2 * 64 (Dk + Dv))` operations at most, 10.5 M at 128 x 128.

use super::gated_delta::{GatedDelta, GatedDeltaShape};
use super::small_gemm::{SmallGemm, Start};
use crate::pool::Worker;
use crate::shared_slice::SharedMut;
use crate::simd::{self, LANES, Simd, VectorKernel, exp, lanes};
use std::ops::Range;

/// Tokens of a chunk.
pub const CHUNK: usize = 64;
/// Rows of the triangular system that are solved together.
const STRIP: usize = 8;
/// Rows of the input that are asked for ahead of use.
const ROWS_AHEAD: usize = 8;

/// `f32` values of workspace for `workers` workers.
pub fn gated_delta_chunked_workspace_len(shape: &GatedDeltaShape, workers: usize) -> usize {
    workers * worker_len(shape)
}

/// Values of a worker's [`Scratch`].
fn worker_len(shape: &GatedDeltaShape) -> usize {
    let (dk, dv) = (shape.key_size, shape.value_size.next_multiple_of(LANES));
    dk * dv + CHUNK * (3 * dk + 3 * dv + 3 * CHUNK + 6)
}

/// The gated delta rule in the prefill regime; every step commits. `workspace` holds
/// [`gated_delta_chunked_workspace_len`] values.
///
/// # Panics
/// If the shapes disagree, a sequence does not start at a multiple of 64, a slot lies outside `state`, or the task
/// has a delta log.
pub fn gated_delta_chunked(task: &GatedDelta<'_>, workspace: SharedMut<'_, f32>, worker: &Worker<'_>) {
    let shape = &task.inputs.shape;
    task.inputs.check(task.batch.rows());
    assert_eq!(task.slot.len(), task.batch.sequences());
    assert!(task.y.width() == shape.value_heads * shape.value_size && task.y.len() >= task.batch.rows());
    assert!(task.log.is_none(), "prefill commits: it has no delta log");
    for b in 0..task.batch.sequences() {
        let aligned = (task.batch.position[b] as usize).is_multiple_of(CHUNK);
        assert!(aligned || task.batch.rows_of(b).is_empty(), "prefill starts at a multiple of {CHUNK}");
    }
    let needed = gated_delta_chunked_workspace_len(shape, worker.count);
    assert!(
        workspace.len() >= needed,
        "gated_delta_chunked: workspace of {} values, {needed} needed",
        workspace.len()
    );
    let start = worker.index * worker_len(shape);
    // SAFETY: each worker uses its own part.
    let scratch = unsafe { workspace.range(start..start + worker_len(shape)) };
    simd::run(Task { task, scratch, worker });
}

struct Task<'a, 'w> {
    task: &'a GatedDelta<'a>,
    scratch: &'a mut [f32],
    worker: &'a Worker<'w>,
}

impl VectorKernel for Task<'_, '_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let heads = self.task.inputs.shape.value_heads;
        for unit in self.worker.claim(self.task.slot.len() * heads, 1).flatten() {
            let head = Head { task: self.task, b: unit / heads, head: unit % heads };
            head.run(s, &mut Scratch::new(&head.task.inputs.shape, &mut *self.scratch));
        }
    }
}

/// A worker's matrices, row-major; `dv` is Dv rounded up to whole vectors.
struct Scratch<'a> {
    /// `[Dk, dv]`
    state: &'a mut [f32],
    /// `[64, Dk]`
    q: &'a mut [f32],
    /// `[64, Dk]`
    k: &'a mut [f32],
    /// `[Dk, 64]`
    k_transposed: &'a mut [f32],
    /// `[64, dv]`
    u: &'a mut [f32],
    /// `[64, dv]`, v, later u decayed to the chunk's end
    u_decayed: &'a mut [f32],
    /// `[64, dv]`
    y: &'a mut [f32],
    /// D `[64, 64]`, zero above the diagonal
    between: &'a mut [f32],
    /// -L `[64, 64]`, zero from the diagonal on
    lower: &'a mut [f32],
    /// P `[64, 64]`, zero above the diagonal
    scores: &'a mut [f32],
    /// beta, `[64]`
    beta: &'a mut [f32],
    /// G as the sum of two floats, `[64]` each
    log_high: &'a mut [f32],
    log_low: &'a mut [f32],
    /// `e^G`, `[64]`
    from_start: &'a mut [f32],
    /// `e^(G[last] - G)`, `[64]`
    to_end: &'a mut [f32],
    dk: usize,
    dv: usize,
}

impl<'a> Scratch<'a> {
    fn new(shape: &GatedDeltaShape, memory: &'a mut [f32]) -> Scratch<'a> {
        let (dk, dv) = (shape.key_size, shape.value_size.next_multiple_of(LANES));
        let mut rest = memory;
        let mut take = |len: usize| {
            let (part, tail) = std::mem::take(&mut rest).split_at_mut(len);
            rest = tail;
            part
        };
        Scratch {
            state: take(dk * dv),
            u: take(CHUNK * dv),
            u_decayed: take(CHUNK * dv),
            y: take(CHUNK * dv),
            between: take(CHUNK * CHUNK),
            lower: take(CHUNK * CHUNK),
            scores: take(CHUNK * CHUNK),
            beta: take(CHUNK),
            log_high: take(CHUNK),
            log_low: take(CHUNK),
            from_start: take(CHUNK),
            to_end: take(CHUNK),
            q: take(CHUNK * dk),
            k: take(CHUNK * dk),
            k_transposed: take(CHUNK * dk),
            dk,
            dv,
        }
    }
}

/// One value head of sequence `b`.
struct Head<'a> {
    task: &'a GatedDelta<'a>,
    b: usize,
    head: usize,
}

impl Head<'_> {
    #[inline(always)]
    fn run<S: Simd>(&self, s: S, m: &mut Scratch<'_>) {
        let shape = &self.task.inputs.shape;
        let rows = self.task.batch.rows_of(self.b);
        let start = (self.task.slot[self.b] as usize * shape.value_heads + self.head)
            * shape.key_size
            * shape.value_size;
        // SAFETY: this unit alone has this head of this slot.
        let state = unsafe { self.task.state.range(start..start + shape.key_size * shape.value_size) };
        for (padded, row) in m.state.chunks_exact_mut(m.dv).zip(state.chunks_exact(shape.value_size)) {
            padded[..row.len()].copy_from_slice(row);
            padded[row.len()..].fill(0.0);
        }
        for t in rows.clone().step_by(CHUNK) {
            self.chunk(s, t..(t + CHUNK).min(rows.end), m);
        }
        for (padded, row) in m.state.chunks_exact(m.dv).zip(state.chunks_exact_mut(shape.value_size)) {
            row.copy_from_slice(&padded[..row.len()]);
        }
    }

    #[inline(always)]
    fn chunk<S: Simd>(&self, s: S, rows: Range<usize>, m: &mut Scratch<'_>) {
        // Whole strips: rows past the last are zeros.
        let padded = rows.len().next_multiple_of(STRIP);
        self.load_rows(s, rows.clone(), padded, m);
        self.load_gates(s, rows.clone(), m);
        decays_between(s, rows.len(), padded, m);
        right_hand_sides(s, padded, m);
        triangles(s, padded, m);
        solve(s, padded, m);
        outputs(s, padded, m);
        for (i, t) in rows.clone().enumerate() {
            let size = self.task.inputs.shape.value_size;
            // SAFETY: this unit alone has this head of this row.
            let y = unsafe { self.task.y.part(t, self.head * size..(self.head + 1) * size) };
            y.copy_from_slice(&m.y[i * m.dv..][..size]);
        }
        update_state(s, rows.len(), m);
    }

    /// Fills q, k, the transpose of k, and v (where decayed u will be). Rows past the last are zeros.
    #[inline(always)]
    fn load_rows<S: Simd>(&self, s: S, rows: Range<usize>, padded: usize, m: &mut Scratch<'_>) {
        let (inputs, dk, dv) = (&self.task.inputs, m.dk, m.dv);
        let (key_head, end) = (inputs.key_head(self.head), self.task.batch.rows_of(self.b).end);
        for (i, t) in rows.clone().enumerate() {
            // Rows are too far apart for the hardware to foresee the next ones.
            if t + ROWS_AHEAD < end {
                for part in inputs.parts(t + ROWS_AHEAD, self.head) {
                    s.prefetch_all(part);
                }
            }
            inputs.query(s, t, key_head, &mut m.q[i * dk..(i + 1) * dk]);
            inputs.key(s, t, key_head, &mut m.k[i * dk..(i + 1) * dk]);
            let (v, row) = (inputs.value(t, self.head), &mut m.u_decayed[i * dv..(i + 1) * dv]);
            row[..v.len()].copy_from_slice(v);
            row[v.len()..].fill(0.0);
        }
        m.q[rows.len() * dk..padded * dk].fill(0.0);
        m.k[rows.len() * dk..padded * dk].fill(0.0);
        m.u_decayed[rows.len() * dv..padded * dv].fill(0.0);
        transpose_keys(s, padded, m);
    }

    /// Fills beta, G, `e^G` and `e^(G[last] - G)`. Rows past the last decay by nothing.
    #[inline(always)]
    fn load_gates<S: Simd>(&self, s: S, rows: Range<usize>, m: &mut Scratch<'_>) {
        m.beta.fill(0.0);
        // In f64: after a strong decay, differences of later sums would lose their digits.
        let mut sum = 0.0f64;
        for i in 0..CHUNK {
            if i < rows.len() {
                m.beta[i] = self.task.inputs.beta(s, rows.start + i, self.head);
                sum += f64::from(self.task.inputs.log_decay(rows.start + i, self.head));
            }
            m.log_high[i] = sum as f32;
            m.log_low[i] = (sum - f64::from(m.log_high[i])) as f32;
        }
        let last = (m.log_high[CHUNK - 1], m.log_low[CHUNK - 1]);
        lanes!(s, m.from_start, [x = m.log_high] => exp(s, x));
        lanes!(s, m.to_end, [high = m.log_high, low = m.log_low] => exp(s, difference(s, last, high, low)));
    }
}

/// `u[i] = beta[i] (v[i] - e^G[i] k[i] S)`
#[inline(always)]
fn right_hand_sides<S: Simd>(s: S, padded: usize, m: &mut Scratch<'_>) {
    let (dk, dv) = (m.dk, m.dv);
    let gemm = SmallGemm { m: padded, n: dv, k: dk, a: (&*m.k, dk), b: (&*m.state, dv), start: Start::Zero };
    gemm.run(s, m.u, dv);
    for i in 0..padded {
        let (factor, beta) = (s.splat(m.from_start[i]), s.splat(m.beta[i]));
        let row = i * dv..(i + 1) * dv;
        let (u, _) = m.u[row.clone()].as_chunks_mut::<LANES>();
        let (v, _) = m.u_decayed[row].as_chunks::<LANES>();
        for (u, v) in u.iter_mut().zip(v) {
            let difference = s.fnma(factor, s.load(u), s.load(v));
            s.store(s.mul(beta, difference), u);
        }
    }
}

/// Fills the transpose of k, rows in whole vectors: those past `padded` become zero.
#[inline(always)]
fn transpose_keys<S: Simd>(s: S, padded: usize, m: &mut Scratch<'_>) {
    let dk = m.dk;
    for i in (0..padded).step_by(LANES) {
        for d in (0..dk).step_by(LANES) {
            let columns = LANES.min(dk - d);
            let mut tile = [s.splat(0.0); LANES];
            for (row, tile) in tile.iter_mut().enumerate().take(padded - i) {
                *tile = s.load_partial(&m.k[(i + row) * dk + d..][..columns]);
            }
            let tile = s.transpose(tile);
            for (column, tile) in tile.into_iter().enumerate().take(columns) {
                s.store_at(tile, m.k_transposed, (d + column) * CHUNK + i);
            }
        }
    }
}

/// `a - b` of two sums kept as two floats each.
#[inline(always)]
fn difference<S: Simd>(s: S, a: (f32, f32), b_high: S::V, b_low: S::V) -> S::V {
    s.add(s.sub(s.splat(a.0), b_high), s.sub(s.splat(a.1), b_low))
}

/// Numbers of the lanes from `start` on.
#[inline(always)]
fn lane_numbers<S: Simd>(s: S, start: usize) -> S::V {
    s.load(&std::array::from_fn(|i| (start + i) as f32))
}

/// Fills D: `e^(G[i] - G[j])` for `j <= i` in the chunk's rows, else zero.
#[inline(always)]
fn decays_between<S: Simd>(s: S, rows: usize, padded: usize, m: &mut Scratch<'_>) {
    for i in 0..padded {
        let row = &mut m.between[i * CHUNK..(i + 1) * CHUNK];
        if i >= rows {
            row.fill(0.0);
            continue;
        }
        let log = (m.log_high[i], m.log_low[i]);
        lanes!(s, row, [high = m.log_high, low = m.log_low] => exp(s, difference(s, log, high, low)));
        row[i + 1..].fill(0.0);
    }
}

/// Fills -L and P.
#[inline(always)]
fn triangles<S: Simd>(s: S, padded: usize, m: &mut Scratch<'_>) {
    let dk = m.dk;
    for start in (0..padded).step_by(STRIP) {
        // Columns past the strip's last row are above the diagonal.
        let n = (start + STRIP).next_multiple_of(LANES);
        let keys = (&*m.k_transposed, CHUNK);
        let product = |a| SmallGemm { m: STRIP, n, k: dk, a, b: keys, start: Start::Zero };
        product((&m.k[start * dk..], dk)).run(s, &mut m.lower[start * CHUNK..], CHUNK);
        product((&m.q[start * dk..], dk)).run(s, &mut m.scores[start * CHUNK..], CHUNK);
        for i in start..start + STRIP {
            let (between, _) = m.between[i * CHUNK..i * CHUNK + n].as_chunks::<LANES>();
            let (lower, _) = m.lower[i * CHUNK..i * CHUNK + n].as_chunks_mut::<LANES>();
            let (scores, _) = m.scores[i * CHUNK..i * CHUNK + n].as_chunks_mut::<LANES>();
            let minus_beta = s.splat(-m.beta[i]);
            for (c, ((between, lower), scores)) in between.iter().zip(lower).zip(scores).enumerate() {
                let between = s.load(between);
                s.store(s.mul(between, s.load(scores)), scores);
                let entry = s.mul(minus_beta, s.mul(between, s.load(lower)));
                let below = s.select_lt(lane_numbers(s, c * LANES), s.splat(i as f32), entry, s.splat(0.0));
                s.store(below, lower);
            }
        }
    }
}

/// Solves `(1 + L) U = R` in place: a strip takes what the rows before it contribute, then its own rows in turn.
#[inline(always)]
fn solve<S: Simd>(s: S, padded: usize, m: &mut Scratch<'_>) {
    let dv = m.dv;
    for start in (0..padded).step_by(STRIP) {
        let (solved, strip) = m.u.split_at_mut(start * dv);
        let a = (&m.lower[start * CHUNK..], CHUNK);
        let gemm = SmallGemm { m: STRIP, n: dv, k: start, a, b: (&*solved, dv), start: Start::Scaled(1.0) };
        gemm.run(s, strip, dv);
        for i in 1..STRIP {
            let (above, row) = strip.split_at_mut(i * dv);
            let a = (&m.lower[(start + i) * CHUNK + start..], CHUNK);
            let gemm = SmallGemm { m: 1, n: dv, k: i, a, b: (&*above, dv), start: Start::Scaled(1.0) };
            gemm.run(s, row, dv);
        }
    }
}

/// `Y = e^G q S + P U`
#[inline(always)]
fn outputs<S: Simd>(s: S, padded: usize, m: &mut Scratch<'_>) {
    let (dk, dv) = (m.dk, m.dv);
    let gemm = SmallGemm { m: padded, n: dv, k: dk, a: (&*m.q, dk), b: (&*m.state, dv), start: Start::Zero };
    gemm.run(s, m.y, dv);
    for start in (0..padded).step_by(STRIP) {
        let a = (&m.scores[start * CHUNK..], CHUNK);
        let factors = Start::Rows(&m.from_start[start..]);
        let gemm = SmallGemm { m: STRIP, n: dv, k: start + STRIP, a, b: (&*m.u, dv), start: factors };
        gemm.run(s, &mut m.y[start * dv..], dv);
    }
}

/// `S = e^G[last] S + sum_j e^(G[last] - G[j]) k[j] u[j]^T`
#[inline(always)]
fn update_state<S: Simd>(s: S, rows: usize, m: &mut Scratch<'_>) {
    let (dk, dv) = (m.dk, m.dv);
    for (i, decayed) in m.u_decayed.chunks_exact_mut(dv).enumerate().take(rows) {
        let factor = s.splat(m.to_end[i]);
        lanes!(s, decayed, [u = &m.u[i * dv..(i + 1) * dv]] => s.mul(u, factor));
    }
    let start = Start::Scaled(m.from_start[rows - 1]);
    let gemm =
        SmallGemm { m: dk, n: dv, k: rows, a: (&*m.k_transposed, CHUNK), b: (&*m.u_decayed, dv), start };
    gemm.run(s, m.state, dv);
}
