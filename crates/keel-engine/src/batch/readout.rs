//! Prompts without an answer: hidden states or logits are read instead.
//!
//! The step that ends a prompt leaves the hidden state of its last row and the logits after it, so these cost nothing
//! more. Where steps run ahead, a program after the step copies these results, and the host reads the copy while the
//! next step runs (`step/kept.rs`). A mean is added up on the host, row by row in f64: its bits do not depend on how
//! the prompt was cut into steps.

use super::Batcher;
use super::request::BatchEvent;
use super::sequence::Drawn;
use crate::{Engine, EngineError, FinishReason, HostReads, Result};

/// The values to read of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readout {
    /// The hidden state of the last token, after the final norm.
    LastHidden,
    /// The mean of the hidden states of all tokens. The engine must be made with [`crate::EngineOptions::row_hidden`].
    MeanHidden,
    /// The logits of these tokens after the prompt.
    Logits(Vec<u32>),
}

impl Readout {
    /// Whether the prompt may use remembered prefixes, and is remembered for later ones. Embedded texts are seldom seen
    /// twice, and would evict conversations.
    pub(super) fn shares_prefixes(&self) -> bool {
        matches!(self, Readout::Logits(_))
    }
}

/// The first `dimensions` values of a hidden state, scaled to length 1.
///
/// # Errors
/// [`EngineError::Step`]: they are all zero, or not finite.
pub fn direction(mut values: Vec<f32>, dimensions: usize) -> Result<Vec<f32>> {
    values.truncate(dimensions);
    let length = values.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
    if !length.is_finite() || length == 0.0 {
        return Err(EngineError::Step(format!("a hidden state of length {length} has no direction")));
    }
    values.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
    Ok(values)
}

/// Where a step has its results of a prompt.
#[derive(Clone, Copy)]
pub(super) enum ResultsOf {
    /// In this row. The step was waited for.
    Row(usize),
    /// At this work item. The step was the last to be taken.
    Item(usize),
}

/// A readout in progress.
pub(super) struct Reading {
    wanted: Readout,
    /// The sums over the rows so far, for a mean.
    sums: Vec<f64>,
}

impl Reading {
    pub fn new(wanted: Readout) -> Reading {
        Reading { wanted, sums: Vec::new() }
    }

    pub fn shares_prefixes(&self) -> bool {
        self.wanted.shares_prefixes()
    }

    /// The results that the host reads of a step of the prompt, which ends in it if `ends` is set.
    pub fn reads(&self, ends: bool) -> HostReads {
        match self.wanted {
            Readout::MeanHidden => HostReads::AllHidden,
            Readout::LastHidden if ends => HostReads::LastHidden,
            Readout::Logits(_) if ends => HostReads::Logits,
            Readout::LastHidden | Readout::Logits(_) => HostReads::Nothing,
        }
    }

    pub fn needs_logits(&self) -> bool {
        matches!(self.wanted, Readout::Logits(_))
    }

    /// Adds rows of `width` values.
    fn add(&mut self, rows: &[f32], width: usize) {
        self.sums.resize(width, 0.0);
        for row in rows.chunks_exact(width) {
            self.sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x));
        }
    }

    fn mean(&self, rows: usize) -> Vec<f32> {
        self.sums.iter().map(|sum| (sum / rows as f64) as f32).collect()
    }
}

impl Batcher {
    /// Refuses a readout that this engine cannot give.
    pub(super) fn check_readout(&self, readout: &Readout) -> Result<()> {
        let vocab = self.engine.model().config.vocab;
        match readout {
            Readout::MeanHidden if !self.engine.options().row_hidden => {
                Err(EngineError::Option("means of hidden states were not planned for: set row_hidden".into()))
            }
            Readout::Logits(ids) => match ids.iter().find(|&&id| id as usize >= vocab) {
                Some(&id) => Err(EngineError::TokenId { id, vocab }),
                None => Ok(()),
            },
            _ => Ok(()),
        }
    }

    /// Adds `rows` rows of a step's prompts, from row `first` on, if their mean is wanted. `read` copies them.
    pub(super) fn add_rows(
        &mut self,
        i: usize,
        first: usize,
        rows: usize,
        read: impl FnOnce(&Engine, usize, usize, &mut Vec<f32>) -> Result<()>,
    ) -> Result<()> {
        let reading = self.running[i].reading.as_mut();
        let Some(reading) = reading.filter(|reading| reading.wanted == Readout::MeanHidden) else {
            return Ok(());
        };
        read(&self.engine, first, rows, &mut self.row_hidden)?;
        reading.add(&self.row_hidden, self.engine.model().config.hidden);
        Ok(())
    }

    /// Reads the wanted values of work item `item` of the step taken last: `rows` rows of a prompt, from row `first` of
    /// all prompts on. `None` if the prompt goes on.
    pub(super) fn read_item(
        &mut self,
        i: usize,
        item: usize,
        first: usize,
        rows: usize,
    ) -> Option<Result<Drawn>> {
        match self.add_rows(i, first, rows, Engine::kept_row_hidden) {
            Ok(()) if self.running[i].awaits_first() => self.read_out(i, ResultsOf::Item(item)),
            Ok(()) => None,
            Err(error) => Some(Err(error)),
        }
    }

    /// Reports the values read of a prompt that has ended. `None` if it is to be answered.
    pub(super) fn read_out(&mut self, i: usize, results: ResultsOf) -> Option<Result<Drawn>> {
        let running = &self.running[i];
        let reading = running.reading.as_ref()?;
        let values = match (&reading.wanted, results) {
            (Readout::LastHidden, ResultsOf::Row(row)) => self.engine.last_hidden_of(row),
            (Readout::LastHidden, ResultsOf::Item(item)) => self.engine.kept_hidden(item),
            (Readout::MeanHidden, _) => Ok(reading.mean(running.prompt_len)),
            (Readout::Logits(ids), _) => self.engine.with_logits_row(|engine, logits| {
                match results {
                    ResultsOf::Row(row) => engine.logits(row, &mut logits.values)?,
                    ResultsOf::Item(item) => engine.kept_logits(item, &mut logits.values)?,
                }
                Ok(ids.iter().map(|&id| logits.values[id as usize]).collect())
            }),
        };
        let id = running.id;
        Some(values.map(|values| {
            self.emit(id, BatchEvent::Read(values));
            Drawn { tokens: Vec::new(), finish: Some(FinishReason::Stop) }
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::direction;

    #[test]
    fn a_direction_has_length_one_however_many_dimensions_it_keeps() {
        assert_eq!(direction(vec![3.0, 4.0, 12.0], 2).expect("it has one"), [0.6, 0.8]);
        assert!(direction(vec![0.0; 3], 3).is_err() && direction(vec![f32::NAN, 1.0], 2).is_err());
    }
}
