//! Hidden states that a step of prompts leaves for the host.

use crate::step::HiddenOf;
use crate::{Engine, EngineError, Result};

/// Why hidden states of all rows cannot be read.
pub(super) const ROWS_NOT_PLANNED: &str = "hidden states of all rows were not planned for: set row_hidden";

impl Engine {
    /// The hidden state of the last token of a prompt that has just been run, after the final norm.
    ///
    /// # Errors
    /// If the device cannot be read.
    pub fn last_hidden(&self) -> Result<Vec<f32>> {
        self.last_hidden_of(0)
    }

    /// As [`Engine::last_hidden`], for prompt `row` of [`Engine::prefill_chunks`].
    ///
    /// # Errors
    /// As [`Engine::last_hidden`].
    pub fn last_hidden_of(&self, row: usize) -> Result<Vec<f32>> {
        let mut hidden = Vec::new();
        self.stepper.read_last_hidden(row, &mut hidden)?;
        Ok(hidden)
    }

    /// Copies the hidden states of rows of the last step of prompts, in the order of the prompts and their tokens.
    ///
    /// # Errors
    /// If the engine was made without [`crate::EngineOptions::row_hidden`].
    pub fn row_hidden(&self, first: usize, rows: usize, hidden: &mut Vec<f32>) -> Result<()> {
        if !self.stepper.keeps_rows() {
            return Err(EngineError::Option(ROWS_NOT_PLANNED.into()));
        }
        self.stepper.read_hidden(first, rows, hidden)
    }

    /// The hidden state after work item `item` of the step taken last: a prompt that has ended and is not answered.
    ///
    /// # Errors
    /// It could not be read.
    pub(crate) fn kept_hidden(&self, item: usize) -> Result<Vec<f32>> {
        let (row, mut hidden) = (self.taken.items[item].row, Vec::new());
        self.stepper.append_kept_hidden(self.taken.step, HiddenOf::Prompts, row..row + 1, &mut hidden)?;
        Ok(hidden)
    }

    /// As [`Engine::row_hidden`], for the prompts of the step taken last.
    ///
    /// # Errors
    /// They could not be read.
    pub(crate) fn kept_row_hidden(&self, first: usize, rows: usize, hidden: &mut Vec<f32>) -> Result<()> {
        hidden.clear();
        self.stepper.append_kept_hidden(self.taken.step, HiddenOf::PromptRows, first..first + rows, hidden)
    }
}
