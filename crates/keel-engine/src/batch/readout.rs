//! Prompts without an answer: hidden states or logits are read instead.
//!
//! The step that ends a prompt leaves the hidden state of its last row and the logits after it, so these cost nothing
//! more. A mean is added up on the host, row by row in f64: its bits do not depend on how the prompt was cut into
//! steps.

use super::Batcher;
use super::request::BatchEvent;
use super::sequence::Drawn;
use crate::{EngineError, FinishReason, Result};

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

    /// Adds `rows` rows of the last step, from row `first` on, if their mean is wanted.
    pub(super) fn add_rows(&mut self, i: usize, first: usize, rows: usize) -> Result<()> {
        let reading = self.running[i].reading.as_mut();
        let Some(reading) = reading.filter(|reading| reading.wanted == Readout::MeanHidden) else {
            return Ok(());
        };
        self.engine.row_hidden(first, rows, &mut self.row_hidden)?;
        reading.add(&self.row_hidden, self.engine.model().config.hidden);
        Ok(())
    }

    /// Reports the values read of a prompt that was row `row` of the last step. `None` if the prompt is to be answered.
    pub(super) fn read_out(&mut self, i: usize, row: usize) -> Option<Result<Drawn>> {
        let running = &self.running[i];
        let reading = running.reading.as_ref()?;
        let values = match &reading.wanted {
            Readout::LastHidden => self.engine.last_hidden_of(row),
            Readout::MeanHidden => Ok(reading.mean(running.prompt_len)),
            Readout::Logits(ids) => self.engine.with_logits_row(|engine, logits| {
                engine.logits(row, &mut logits.values)?;
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
