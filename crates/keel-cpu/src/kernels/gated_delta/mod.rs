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
//! The record of the token at position `p` is record `p mod capacity` of its slot. Usually a step's rows and the
//! accepted rows before them fit into the log together. Then no new record overwrites a record that is still to be
//! read, and each block writes its share of the records immediately. Otherwise keys and decays, which all blocks of a
//! head read, are written after a barrier.
//!
//! Memory: a state is read once and written once, `8 * Hv * Dk * Dv` bytes for each token of a sequence. Each row takes
//! one sweep over the state. The sweep applies pending updates (of accepted records, or of the row before) while it
//! sums k S' and q S'. Only a row that is committed in its own step needs a second sweep, in L2.

mod inputs;
mod step;

pub use inputs::{GatedDeltaInputs, GatedDeltaShape};

use super::rows::{Batch, RowsMut};
use crate::pool::Worker;
use crate::shared_slice::SharedMut;
use crate::simd::{self, Simd, VectorKernel};
use step::{BLOCK, Step};

/// Records of the rows that the last step left open.
#[derive(Clone, Copy)]
pub struct DeltaLog<'a> {
    /// `[slots, capacity, record_len]`, by slot of the sequence and position of the token.
    pub records: SharedMut<'a, f32>,
    /// Records of a slot.
    pub capacity: usize,
    /// Number of records to apply before this step's rows, `[B]`: those of the positions directly before.
    pub accepted: &'a [u32],
    /// Leave this step's rows open (at most `capacity` for each sequence) instead of committing them.
    pub keep_open: bool,
}

impl DeltaLog<'_> {
    /// Whether records of this step's rows overwrite records that it reads.
    fn overlaps_itself(&self, batch: &Batch<'_>) -> bool {
        let rows = (0..batch.sequences()).map(|b| batch.rows_of(b).len());
        self.keep_open && rows.zip(self.accepted).any(|(rows, &n)| rows + n as usize > self.capacity)
    }

    /// Start of the record of row `i` of a sequence whose first row in this step is at `position`.
    #[inline(always)]
    fn record_at(&self, shape: &GatedDeltaShape, slot: usize, position: u32, i: usize) -> usize {
        (slot * self.capacity + (position as usize + i) % self.capacity) * shape.record_len()
    }

    /// Start of record `i` of the `accepted` records before that row.
    #[inline(always)]
    fn accepted_at(
        &self,
        shape: &GatedDeltaShape,
        slot: usize,
        (position, accepted): (u32, u32),
        i: usize,
    ) -> usize {
        // `accepted` is at most `capacity`.
        self.record_at(shape, slot, position, self.capacity - accepted as usize + i)
    }
}

/// Operands of [`gated_delta`].
#[derive(Clone, Copy)]
pub struct GatedDelta<'a> {
    /// Rows of all sequences.
    pub inputs: GatedDeltaInputs<'a>,
    /// Rows of each sequence. Positions are read where there is a log.
    pub batch: Batch<'a>,
    /// Slot of each sequence, `[B]`, all different.
    pub slot: &'a [u32],
    /// `[slots, Hv, Dk, Dv]`, updated in place.
    pub state: SharedMut<'a, f32>,
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
    let overlapping = task.log.filter(|log| log.overlaps_itself(&task.batch));
    simd::run_at(worker.isa, Step { task, workspace, start, worker, writes_keys: overlapping.is_none() });
    if let Some(log) = overlapping {
        // All blocks of a head read its keys and decays, so these are overwritten after all blocks are done.
        worker.barrier();
        simd::run_at(worker.isa, WriteKeys { task, log, worker });
    }
}

/// Writes keys and decays of the rows kept open, where they could not be written immediately.
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
            let (slot, i) = (self.task.slot[b] as usize, t - batch.rows_of(b).start);
            let keys = self.log.record_at(shape, slot, batch.position[b], i);
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
