//! What steps that failed did to their sequences.

use keel_array::{ArrayError, FailedRun, RowLog};
use keel_cache::{CommitProgress, SlotId};

use crate::engine::in_flight::EndedRun;
use crate::split::step::first_cause;
use crate::step::{Outcome, StepKind};
use crate::{Engine, EngineError, Result};

impl Engine {
    /// Records what a failed step did to its sequences.
    pub(crate) fn note_failed(
        &mut self,
        kind: StepKind,
        slots: Vec<SlotId>,
        failed: Box<FailedRun>,
    ) -> EngineError {
        let (settled, commits_rows) = self.commits_of(kind);
        self.cache.note_failure(slots, &|state| failed.has_mutated(state), settled, commits_rows);
        ArrayError::from(failed).into()
    }

    /// The tokens of a program that was submitted. If it has failed, records what it did to its sequences.
    pub(crate) fn note_ended(&mut self, kind: StepKind, ended: EndedRun) -> Result<Vec<u32>> {
        if !ended.has_failed() {
            return Ok(ended.tokens());
        }
        let (settled, commits_rows) = self.commits_of(kind);
        self.note_devices(&ended.devices, ended.slots, settled, commits_rows);
        Err(first_cause(ended.devices))
    }

    /// Which commits are made before a step, and whether the step commits its own rows.
    fn commits_of(&self, kind: StepKind) -> (CommitProgress, bool) {
        match kind.outcome {
            Outcome::Commit(settled) => (settled, false),
            _ => (CommitProgress::default(), self.stepper.row_log(kind) != RowLog::KeepOpen),
        }
    }

    /// Records how the programs of a failed step left its sequences. Returns the error that was the first cause. A device
    /// that failed in a `later` step may be why its peers report a failure of this one.
    pub(super) fn note_failed_runs(
        &mut self,
        ended: Vec<EndedRun>,
        later: Vec<EndedRun>,
        refusal: Option<EngineError>,
    ) -> EngineError {
        for run in &ended {
            let slots = run.slots.iter().copied();
            if run.has_failed() {
                self.note_devices(&run.devices, slots, CommitProgress::default(), true);
            } else if !self.can_take_back() {
                // These rows were run, but they do not count.
                self.cache.note_ahead(slots);
            }
        }
        refusal.unwrap_or_else(|| first_cause_of(ended.into_iter().chain(later)))
    }
}

/// The first cause of the failures of these programs, at least one of which has failed.
pub(super) fn first_cause_of(ended: impl IntoIterator<Item = EndedRun>) -> EngineError {
    first_cause(ended.into_iter().flat_map(|run| run.devices))
}
