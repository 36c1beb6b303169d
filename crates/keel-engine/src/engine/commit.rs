//! Accepted open rows become part of the state.

use keel_array::Regime;
use keel_cache::{CommitProgress, FailedStepState, ModelCache, SequenceCache};

use super::Engine;
use crate::Result;
use crate::step::{Outcome, Rows};

impl Engine {
    /// Makes the accepted open rows part of the state. Steps do so on their own, but a drafting sequence needs it
    /// before it is saved or gets a checkpoint. If a step failed while it was committing, this commits the rest.
    ///
    /// # Errors
    /// An error of the runtime; the call may then be retried. [`keel_cache::CacheError::TornState`].
    pub fn commit(&mut self, sequence: &mut SequenceCache) -> Result<()> {
        self.cache.expect_whole(sequence)?;
        let settled = match self.cache.failed_step(sequence) {
            Some(FailedStepState::PartlyCommitted(settled)) => settled,
            _ => CommitProgress::default(),
        };
        if sequence.accepted() > 0 && settled.states < self.cache.spec().recurrent_layers() {
            self.run(Regime::Decode, Outcome::Commit(settled), &[Rows::after(sequence, &[])])?;
        }
        self.cache.note_settled(sequence);
        Ok(())
    }

    /// As [`Engine::commit`] for many sequences, in one step for those that no failed step has left halfway.
    pub(crate) fn commit_all(&mut self, sequences: &mut [&mut SequenceCache]) -> Result<()> {
        let is_open =
            |cache: &ModelCache, s: &SequenceCache| s.accepted() > 0 && cache.failed_step(s).is_none();
        let open = sequences.iter().filter(|s| is_open(&self.cache, s));
        let rows: Vec<Rows<'_>> = open.map(|s| Rows::after(s, &[])).collect();
        if rows.len() > 1 && self.cache.spec().is_recurrent() {
            self.run(Regime::Decode, Outcome::COMMIT, &rows)?;
            sequences.iter_mut().filter(|s| is_open(&self.cache, s)).for_each(|s| s.advance(0));
        }
        sequences.iter_mut().try_for_each(|sequence| self.commit(sequence))
    }

    /// Commits the rest if a failed step was committing.
    pub(crate) fn finish_commit(&mut self, sequence: &mut SequenceCache) -> Result<()> {
        self.cache.expect_whole(sequence)?;
        if self.cache.failed_step(sequence).is_some() { self.commit(sequence) } else { Ok(()) }
    }
}
