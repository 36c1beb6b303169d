//! What becomes of a step that fails.
//!
//! It is tried again: where the engine drafts, a step happens or has not been, so a fault that passes costs a step and nobody's
//! answer. One that stays is looked for by running each sequence by itself, and ends those that fail then.

use super::Batcher;
use super::sequence::Drawn;
use crate::{EngineError, Result};

impl Batcher {
    /// Decodes these answers, whose numbers ascend. Also says what came of each.
    pub(super) fn decode_rows(&mut self, rows: &[usize]) -> Vec<(usize, Result<Drawn>)> {
        let mut cause = String::new();
        for _ in 0..2 {
            match self.decode_together(rows) {
                Ok(drawn) => return rows.iter().copied().zip(drawn).collect(),
                Err(error) => self.note_failed_step(&mut cause, &error),
            }
        }
        rows.iter().map(|&i| (i, self.decode_alone(i, &mut cause))).collect()
    }

    fn decode_alone(&mut self, i: usize, cause: &mut String) -> Result<Drawn> {
        let drawn = self.decode_together(&[i]).map(|mut drawn| drawn.pop());
        match drawn {
            Ok(Some(drawn)) => drawn,
            Ok(None) => unreachable!("one row was run"),
            Err(error) => {
                self.note_failed_step(cause, &error);
                Err(EngineError::Step(cause.clone()))
            }
        }
    }

    /// Makes the open rows of an answer part of its state.
    pub(super) fn commit(&mut self, i: usize) -> Result<()> {
        self.engine.commit(&mut self.running[i].cache).or_else(|error| {
            self.failed_steps += 1;
            if self.is_whole(i) { self.engine.commit(&mut self.running[i].cache) } else { Err(error) }
        })
    }

    pub(super) fn is_whole(&self, i: usize) -> bool {
        self.engine.cache().expect_whole(&self.running[i].cache).is_ok()
    }

    /// Counts it. The first failure is the cause of what follows.
    fn note_failed_step(&mut self, cause: &mut String, error: &EngineError) {
        self.failed_steps += 1;
        if cause.is_empty() {
            *cause = error.to_string();
        }
    }
}
