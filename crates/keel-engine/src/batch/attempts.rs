//! What happens when a step fails.
//!
//! A failed step is retried once. Where the engine drafts, steps are atomic, so a transient fault costs one step and no
//! answer. If the retry fails, each sequence is run alone, and only those that fail again end with the error.

use super::Batcher;
use super::sequence::Drawn;
use crate::{EngineError, Result};

impl Batcher {
    /// Decodes these answers, whose numbers ascend, and returns the outcome of each.
    pub(super) fn decode_rows(&mut self, rows: &[usize]) -> Vec<(usize, Result<Drawn>)> {
        let mut cause = String::new();
        for _ in 0..2 {
            match self.round(rows) {
                Ok(drawn) => return rows.iter().copied().zip(drawn).collect(),
                Err(error) => self.note_failed_step(&mut cause, &error),
            }
        }
        rows.iter().map(|&i| (i, self.decode_alone(i, &mut cause))).collect()
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
        self.engine.commit(&mut self.running[i].cache).or_else(|error| {
            self.count_failed_step(&error);
            if self.is_whole(i) { self.engine.commit(&mut self.running[i].cache) } else { Err(error) }
        })
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
