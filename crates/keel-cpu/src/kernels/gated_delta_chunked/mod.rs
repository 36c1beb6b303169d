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
//! Everything but the solution of the unit triangular system is a matrix product. The system is solved directly for the
//! Dv right-hand sides, eight rows at a time. That needs less arithmetic than forming the inverse of `1 + L`, which
//! pays off where heads of many chunks run at once. No exponent is ever positive.
//!
//! Chunks are anchored at position 0, so a call's first row must stand at a multiple of 64. Only a sequence's last
//! chunk may be partial. Its missing rows are zeros and contribute nothing.
//!
//! A state in f16 is rounded after each chunk, so it does not matter which chunks share a step.
//!
//! Cost of a chunk and value head: `64 (6 Dk Dv + 2 * 64 (Dk + Dv))` operations at most, 10.5 M at 128 x 128.

mod algebra;
mod scratch;

use super::gated_delta::state::{keep, narrow, widen};
use super::gated_delta::{GatedDelta, GatedDeltaShape, StateElement};
use crate::pool::Worker;
use crate::shared_slice::SharedMut;
use crate::simd::{self, LANES, Simd, VectorKernel, exp, lanes};
use algebra::{
    decays_between, difference, outputs, right_hand_sides, solve, transpose_keys, triangles, update_state,
};
use keel_array::PREFILL_GRID;
use scratch::Scratch;
use std::ops::Range;

/// Tokens of a chunk.
pub const CHUNK: usize = PREFILL_GRID;
/// Rows of the triangular system that are solved together.
const STRIP: usize = 8;
/// Distance of prefetching, in rows of the input.
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
pub fn gated_delta_chunked<E: StateElement>(
    task: &GatedDelta<'_, E>,
    workspace: SharedMut<'_, f32>,
    worker: &Worker<'_>,
) {
    E::chunks(task, workspace, worker);
}

/// [`gated_delta_chunked`] for a state of any element.
pub(super) fn run<E: StateElement>(
    task: &GatedDelta<'_, E>,
    workspace: SharedMut<'_, f32>,
    worker: &Worker<'_>,
) {
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
    simd::run_at(worker.isa, Task { task, scratch, worker });
}

struct Task<'a, 'w, E> {
    task: &'a GatedDelta<'a, E>,
    scratch: &'a mut [f32],
    worker: &'a Worker<'w>,
}

impl<E: StateElement> VectorKernel for Task<'_, '_, E> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let heads = self.task.inputs.shape.value_heads;
        for unit in self.worker.claim(self.task.slot.len() * heads, 1).flatten() {
            let head = Head { task: self.task, b: unit / heads, head: unit % heads };
            head.run(s, &mut Scratch::new(&head.task.inputs.shape, &mut *self.scratch));
        }
    }
}

/// One value head of sequence `b`.
struct Head<'a, E> {
    task: &'a GatedDelta<'a, E>,
    b: usize,
    head: usize,
}

impl<E: StateElement> Head<'_, E> {
    #[inline(always)]
    fn run<S: Simd>(&self, s: S, m: &mut Scratch<'_>) {
        let shape = &self.task.inputs.shape;
        let rows = self.task.batch.rows_of(self.b);
        if rows.is_empty() {
            return;
        }
        let start = (self.task.slot[self.b] as usize * shape.value_heads + self.head)
            * shape.key_size
            * shape.value_size;
        // SAFETY: only this unit has this head of this slot.
        let state = unsafe { self.task.state.range(start..start + shape.key_size * shape.value_size) };
        for (padded, row) in m.state.chunks_exact_mut(m.dv).zip(state.chunks_exact(shape.value_size)) {
            widen(s, row, padded);
        }
        for t in rows.clone().step_by(CHUNK) {
            self.chunk(s, t..(t + CHUNK).min(rows.end), m);
        }
        for (padded, row) in m.state.chunks_exact(m.dv).zip(state.chunks_exact_mut(shape.value_size)) {
            narrow(s, padded, row);
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
            // SAFETY: only this unit has this head of this row.
            let y = unsafe { self.task.y.part(t, self.head * size..(self.head + 1) * size) };
            y.copy_from_slice(&m.y[i * m.dv..][..size]);
        }
        update_state(s, rows.len(), m);
        keep::<E, S>(s, m.state);
    }

    /// Fills q, k, the transpose of k, and v (in the place of the decayed u). Rows past the last are zeros.
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

    /// Fills beta, G, `e^G` and `e^(G[last] - G)`. Rows past the last do not decay.
    #[inline(always)]
    fn load_gates<S: Simd>(&self, s: S, rows: Range<usize>, m: &mut Scratch<'_>) {
        m.beta.fill(0.0);
        // In f64: after a strong decay, differences of later f32 sums would lose their digits.
        let mut sum = 0.0f64;
        for i in 0..CHUNK {
            if i < rows.len() {
                m.beta[i] = self.task.inputs.beta(s, rows.start + i, self.head);
                sum += f64::from(self.task.inputs.log_decay(rows.start + i, self.head));
            }
            m.log_high[i] = sum as f32;
            m.log_low[i] = (sum - f64::from(m.log_high[i])) as f32;
        }
        let (last_high, last_low) = (m.log_high[CHUNK - 1], m.log_low[CHUNK - 1]);
        lanes!(s, m.from_start, [x = m.log_high] => exp(s, x));
        lanes!(s, m.to_end, [high = m.log_high, low = m.log_low] =>
            exp(s, difference(s, last_high, last_low, high, low)));
    }
}
