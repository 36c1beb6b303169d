//! Logits of every token of a prompt, to compare with other programs.

use std::sync::Arc;

use keel_array::Regime;
use keel_cache::{SequenceCache, VisionInputs};

use super::Engine;
use crate::step::{LOGITS_ROWS, Outcome, Rows};
use crate::{EngineError, Result};

/// Takes one row of logits at a time.
pub type LogitSink<'a> = dyn FnMut(&[f32]) -> Result<()> + 'a;

impl Engine {
    /// Gives the logits of every token of a prompt, row by row. With `mtp_sink`, the MTP head's logits follow, for all
    /// tokens but the last; they take a second sequence meanwhile. Needs `all_logits`. With `one_by_one`, each token
    /// goes through the decode regime.
    ///
    /// # Errors
    /// As [`Engine::prefill`]; [`EngineError::NoMtpHead`].
    pub fn all_logits(
        &mut self,
        sequence: &mut SequenceCache,
        prompt: &[u32],
        one_by_one: bool,
        sink: &mut LogitSink<'_>,
        mtp_sink: Option<&mut LogitSink<'_>>,
    ) -> Result<()> {
        if mtp_sink.is_some() && sequence.offset() > 0 {
            return Err(EngineError::Option("the head's logits are given for whole prompts only".into()));
        }
        if mtp_sink.is_some() && self.model().mtp.is_none() {
            return Err(EngineError::NoMtpHead);
        }
        // Those of the whole prompt, for the head.
        let mut hidden = Vec::new();
        let mut rows = Vec::new();
        let mut collect =
            |engine: &mut Engine, sequence: &SequenceCache, tokens: &[u32], regime| -> Result<()> {
                engine.run(regime, Outcome::Hidden, &[Rows::after(sequence, tokens)])?;
                engine.stepper.read_hidden(0, tokens.len(), &mut rows)?;
                if mtp_sink.is_some() {
                    hidden.extend_from_slice(&rows);
                }
                engine.head(&rows, sink)
            };
        if one_by_one {
            self.choose_rope_frequencies(sequence, sequence.len() + prompt.len());
            self.admit(sequence, prompt)?;
            self.commit(sequence)?;
            self.cache.reserve(sequence, prompt.len())?;
            let mut rest = prompt;
            while !rest.is_empty() {
                // Rows of a picture that see each other stay together.
                let at = sequence.offset();
                let together =
                    sequence.vision_inputs().map_or(1, |vision| vision.end(at) + 1 - at).min(rest.len());
                let regime = if together > 1 { Regime::Prefill } else { Regime::Decode };
                let (tokens, after) = rest.split_at(together);
                collect(self, sequence, tokens, regime)?;
                sequence.advance(together);
                rest = after;
            }
        } else {
            let rows_max = self.options.prefill_step;
            self.each_prefill_step(sequence, prompt, rows_max, &mut |engine, sequence, tokens, _| {
                collect(engine, sequence, tokens, Regime::Prefill)
            })?;
        }
        let Some(sink) = mtp_sink else { return Ok(()) };
        let vision = sequence.vision_inputs().cloned();
        self.mtp_logits(prompt, vision, &hidden, one_by_one, sink)
    }

    /// Logits of hidden states `[rows, hidden]`, row by row.
    fn head(&mut self, hidden: &[f32], sink: &mut LogitSink<'_>) -> Result<()> {
        let (width, mut row_logits) = (self.model().config.hidden, Vec::new());
        for block in hidden.chunks(LOGITS_ROWS * width) {
            self.run_output_head(block)?;
            for row in 0..block.len() / width {
                self.stepper.read_logits(row, &mut row_logits)?;
                sink(&row_logits)?;
            }
        }
        Ok(())
    }

    /// Runs the MTP head over a whole prompt in a sequence of its own. The head's keys and values are separate from the
    /// model's, but positions and pages are counted alike.
    fn mtp_logits(
        &mut self,
        prompt: &[u32],
        vision: Option<Arc<VisionInputs>>,
        hidden: &[f32],
        one_by_one: bool,
        sink: &mut LogitSink<'_>,
    ) -> Result<()> {
        let width = self.model().config.hidden;
        let mut sequence = self.open()?;
        self.choose_rope_frequencies(&mut sequence, prompt.len());
        sequence.set_vision_inputs(vision);
        let (regime, step) =
            if one_by_one { (Regime::Decode, 1) } else { (Regime::Prefill, self.options.prefill_step) };
        let mut rows = Vec::new();
        let pairs = prompt[1..].chunks(step).zip(hidden.chunks(step * width));
        let mut outcome = Ok(());
        for (next, hidden) in pairs {
            outcome = (|| {
                self.cache.reserve(&mut sequence, next.len())?;
                self.write_hidden(&hidden[..next.len() * width])?;
                self.run(regime, Outcome::MtpHidden, &[Rows::after(&sequence, next)])?;
                sequence.advance(next.len());
                self.stepper.read_hidden(0, next.len(), &mut rows)?;
                self.head(&rows, sink)
            })();
            if outcome.is_err() {
                break;
            }
        }
        self.release(sequence);
        outcome
    }
}
