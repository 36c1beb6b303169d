//! The effect of failed steps on their sequences.

use keel_array::RowLog;
use keel_cache::{CommitProgress, SequenceCache};

use crate::engine::in_flight::EndedRun;
use crate::step::StepKind;
use crate::{Engine, EngineError};

impl Engine {
    /// If a program of a round has failed, records its effect on its sequences.
    pub(crate) fn note_failed_pass(&mut self, kind: StepKind, ended: &EndedRun) {
        let commits_rows = self.stepper.row_log(kind) != RowLog::KeepOpen;
        let slots = ended.slots.iter().copied();
        self.note_devices(&ended.devices, slots, CommitProgress::default(), commits_rows);
    }

    /// Records how the programs of a failed step left its sequences. Returns the error that was the first cause. A
    /// device that failed in a `later` program may be why its peers report a failure of this step.
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
        refusal.unwrap_or_else(|| self.first_cause_of(ended.into_iter().chain(later)))
    }

    /// The results of a step that has run are lost. Its rows are taken back. Without a log they cannot be where there
    /// are gated-delta states: these sequences answer [`keel_cache::CacheError::AheadState`].
    pub(crate) fn note_lost<'s>(&mut self, sequences: impl Iterator<Item = &'s mut SequenceCache>) {
        if self.leaves_open() {
            sequences.for_each(|sequence| sequence.accept(0));
        } else if !self.can_take_back() {
            self.cache.note_ahead(sequences.map(|sequence| sequence.slot()));
        }
    }

    /// The first cause of the failures of these programs, at least one of which has failed.
    pub(crate) fn first_cause_of(&self, ended: impl IntoIterator<Item = EndedRun>) -> EngineError {
        self.first_cause(ended.into_iter().flat_map(|run| run.devices))
    }
}
