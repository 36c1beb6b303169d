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
//! Columns of a state are independent. So a unit of work is a block of columns of a head, narrower where heads are few.
//!
//! # The delta log
//! The *record* of a token is `(k, u, g)`. Computing `S = e^g S + k u^T` again from it gives the same bits. A step
//! whose rows may be taken back writes records, not the state. The next step reads how many were accepted, applies
//! those and writes the state once. So taking rows back changes a count and moves no bytes.
//!
//! Row `i` of a step has record `i` of its slot ([`keel_array::GatedDeltaSpec`]). Each block writes its columns of `u`.
//! Keys and decays are written after a barrier, because all blocks of a head read those of the step before.
//!
//! # A state in f16
//! Arithmetic stays in f32, and `S` is rounded after each update, also between two rows of a step and in the replay of
//! records. So it does not matter which rows share a step, or which are left open.
//!
//! Memory: a state is read once and written once, `8 * Hv * Dk * Dv` bytes for each token of a sequence (4 in f16).
//! Each row takes one sweep over the state. The sweep applies pending updates (of accepted records, or of the row
//! before) while it sums k S' and q S'. Only a row that is committed in its own step needs a second sweep, in L2.

mod inputs;
pub(crate) mod state;
mod step;

pub use inputs::{GatedDeltaInputs, GatedDeltaShape};
pub use state::StateElement;

use super::rows::{Batch, RowsMut};
use crate::pool::Worker;
use crate::shared_slice::SharedMut;
use crate::simd::{self, Simd, VectorKernel};
use step::{BLOCK, Step};

/// Records of the rows that the last step left open.
#[derive(Clone, Copy)]
pub struct DeltaLog<'a> {
    /// `[slots, capacity, record_len]`, by slot of the sequence and row of its step.
    pub records: SharedMut<'a, f32>,
    /// Records of a slot.
    pub capacity: usize,
    /// Number of records to apply before this step's rows, `[B]`: the first of each slot.
    pub accepted: &'a [u32],
    /// Leave this step's rows open (at most `capacity` for each sequence) instead of committing them.
    pub keep_open: bool,
}

impl DeltaLog<'_> {
    /// Start of record `i` of a slot.
    #[inline(always)]
    fn record_at(&self, shape: &GatedDeltaShape, slot: usize, i: usize) -> usize {
        (slot * self.capacity + i) * shape.record_len()
    }
}

/// Operands of [`gated_delta`].
#[derive(Clone, Copy)]
pub struct GatedDelta<'a, E> {
    /// Rows of all sequences.
    pub inputs: GatedDeltaInputs<'a>,
    /// Rows of each sequence. Positions are not read.
    pub batch: Batch<'a>,
    /// Slot of each sequence, `[B]`, all different.
    pub slot: &'a [u32],
    /// `[slots, Hv, Dk, Dv]`, updated in place.
    pub state: SharedMut<'a, E>,
    /// Log of rows that may be taken back; `None`: every step commits its rows.
    pub log: Option<DeltaLog<'a>>,
    /// `[T, Hv * Dv]`
    pub y: RowsMut<'a>,
}

/// `f32` values of workspace for `workers` workers.
pub fn gated_delta_workspace_len(shape: &GatedDeltaShape, workers: usize) -> usize {
    workers * worker_len(shape)
}

/// A query, two keys (of a row and of the row before it), and a block of the state that runs ahead of the committed
/// state.
fn worker_len(shape: &GatedDeltaShape) -> usize {
    shape.key_size * (3 + BLOCK)
}

/// The gated delta rule in the decode regime. `workspace` holds [`gated_delta_workspace_len`] values.
///
/// # Panics
/// If the shapes disagree, a slot lies outside `state`, or more rows than the log holds are to be kept open.
pub fn gated_delta<E: StateElement>(
    task: &GatedDelta<'_, E>,
    workspace: SharedMut<'_, f32>,
    worker: &Worker<'_>,
) {
    E::step(task, workspace, worker);
}

/// [`gated_delta`] for a state of any element.
fn run<E: StateElement>(task: &GatedDelta<'_, E>, workspace: SharedMut<'_, f32>, worker: &Worker<'_>) {
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
    simd::run_at(worker.isa, Step { task, workspace, start, worker });
    if let Some(log) = task.log.filter(|log| log.keep_open) {
        // All blocks of a head read its keys and decays, so these are overwritten after all blocks are done.
        worker.barrier();
        simd::run_at(
            worker.isa,
            WriteKeys { inputs: &task.inputs, batch: task.batch, slot: task.slot, log, worker },
        );
    }
}

/// Writes keys and decays of the rows kept open.
struct WriteKeys<'a, 'w> {
    inputs: &'a GatedDeltaInputs<'a>,
    batch: Batch<'a>,
    slot: &'a [u32],
    log: DeltaLog<'a>,
    worker: &'a Worker<'w>,
}

impl VectorKernel for WriteKeys<'_, '_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let WriteKeys { inputs, batch, .. } = &self;
        let shape = &inputs.shape;
        for t in self.worker.claim(batch.rows(), 1).flatten() {
            let b = batch.sequence_of(t);
            let (slot, i) = (self.slot[b] as usize, t - batch.rows_of(b).start);
            let keys = self.log.record_at(shape, slot, i);
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
