//! Retries of failed steps.
//!
//! A failed step is retried once. Where the engine drafts, steps are atomic, so a transient fault costs one step and no
//! answer. If the retry fails, each sequence is run alone, and only those that fail again end with the error.

use super::Batcher;
use super::sequence::Drawn;
use crate::{EngineError, Result};

impl Batcher {
    /// Decodes these answers, whose numbers ascend, and returns the outcome of each.
    pub(super) fn decode_rows(&mut self, indices: &[usize]) -> Vec<(usize, Result<Drawn>)> {
        let (mut cause, mut whole, mut torn) = (String::new(), indices.to_vec(), Vec::new());
        let mut outcomes = Vec::with_capacity(indices.len());
        for _ in 0..2 {
            match self.round(&whole) {
                Ok(drawn) => {
                    outcomes.extend(whole.drain(..).zip(drawn));
                    break;
                }
                Err(error) => self.note_failed_step(&mut cause, &error),
            }
            // A sequence whose state is torn cannot be run again.
            torn.extend(whole.extract_if(.., |i| !self.is_whole(*i)));
            if whole.is_empty() {
                break;
            }
        }
        for i in whole {
            outcomes.push((i, self.decode_alone(i, &mut cause)));
        }
        outcomes.extend(torn.into_iter().map(|i| (i, Err(EngineError::Step(cause.clone())))));
        outcomes.sort_by_key(|(i, _)| *i);
        outcomes
    }

    fn decode_alone(&mut self, i: usize, cause: &mut String) -> Result<Drawn> {
        let drawn = self.round(&[i]).map(|mut drawn| drawn.pop());
        match drawn {
            Ok(Some(drawn)) => drawn,
            Ok(None) => unreachable!("one row was run"),
            Err(error) => {
                self.note_failed_step(cause, &error);
                Err(EngineError::Step(cause.clone()))
            }
        }
    }

    /// Makes the open rows of an answer part of its state. A failure is retried once if the sequence is still whole.
    pub(super) fn commit(&mut self, i: usize) -> Result<()> {
        self.twice(&[i], |batch| batch.engine.commit(&mut batch.running[i].cache))
    }

    /// Runs a step of these sequences. If it fails and leaves all of them whole, it is run once more.
    pub(super) fn twice<T>(
        &mut self,
        indices: &[usize],
        mut step: impl FnMut(&mut Batcher) -> Result<T>,
    ) -> Result<T> {
        let first = match step(self) {
            Err(error) => error,
            done => return done,
        };
        self.count_failed_step(&first);
        if indices.iter().any(|&i| !self.is_whole(i)) {
            return Err(first);
        }
        step(self).inspect_err(|error| self.count_failed_step(error))
    }

    pub(super) fn is_whole(&self, i: usize) -> bool {
        self.engine.cache().expect_whole(&self.running[i].cache).is_ok()
    }

    /// Counts a failed step. The first failure is the cause of all that follow.
    fn note_failed_step(&mut self, cause: &mut String, error: &EngineError) {
        self.count_failed_step(error);
        if cause.is_empty() {
            *cause = error.to_string();
        }
    }

    pub(super) fn count_failed_step(&mut self, error: &EngineError) {
        self.failed_steps += 1;
        self.is_device_lost |= error.is_device_lost();
    }
}
