//! Passes of the multi-token-prediction head.

use std::time::Instant;

use keel_array::Regime;

use super::round::{Part, RoundSequence};
use crate::options::HEAD_LAG_MAX;
use crate::step::{Outcome, Rows};
use crate::{Engine, Result};

impl Engine {
    /// Runs rows that the head is behind, if they are many and no draft does it anyway.
    pub(super) fn catch_up(&mut self, sequence: &RoundSequence<'_>, part: &mut Part) -> Result<()> {
        let speculation = &*sequence.speculation;
        let lag = speculation.lag_rows();
        if lag < HEAD_LAG_MAX && (part.depth == 0 || lag <= self.options.open_rows()) {
            return Ok(());
        }
        // The last row stays for the next draft.
        let rows = if part.depth == 0 { lag.min(HEAD_LAG_MAX) } else { lag - 1 };
        self.stepper.write_draft_input(&speculation.lag_hidden[..rows * self.model.config.hidden])?;
        let (first, tokens) = (sequence.cache.len() - lag, &speculation.lag_tokens[..rows]);
        let rows_of = Rows { first, ..Rows::behind(sequence.cache, tokens) };
        self.run(Regime::Decode, Outcome::HeadState, &[rows_of])?;
        part.caught_up = rows;
        Ok(())
    }

    /// Makes the drafts of each sequence. The first pass of the head runs the rows it is behind, each further one its own
    /// result and the draft made of it.
    pub(super) fn draft(&mut self, batch: &mut [RoundSequence<'_>], parts: &mut [Part]) -> Result<()> {
        let deepest = parts.iter().map(|part| part.depth).max().unwrap_or(0);
        if deepest == 0 {
            return Ok(());
        }
        let width = self.model.config.hidden;
        let mut logits = Vec::new();
        // Results of the last pass, in its order.
        let mut hidden: Vec<(usize, Vec<f32>)> = Vec::new();
        for pass in 0..deepest {
            let start = Instant::now();
            let active: Vec<usize> = (0..batch.len()).filter(|&i| parts[i].depth > pass).collect();
            let mut input = Vec::new();
            let mut rows = Vec::with_capacity(active.len());
            for &i in &active {
                let (RoundSequence { cache, speculation, .. }, part) = (&batch[i], &parts[i]);
                let (first, tokens) = if pass == 0 {
                    input.extend_from_slice(&speculation.lag_hidden[part.caught_up * width..]);
                    let tokens = &speculation.lag_tokens[part.caught_up..];
                    (cache.len() - tokens.len(), tokens)
                } else {
                    let own = hidden.iter().find(|(of, _)| *of == i);
                    input.extend_from_slice(own.map_or(&[], |(_, hidden)| hidden));
                    (cache.len() + pass - 1, &part.drafts[pass - 1..])
                };
                rows.push(Rows { first, ..Rows::behind(cache, tokens) });
            }
            self.stepper.write_draft_input(&input)?;
            self.run(Regime::Decode, Outcome::Draft, &rows)?;
            hidden.clear();
            let greatest = self.stepper.read_greatest(active.len())?;
            for (row, &i) in active.iter().enumerate() {
                let draft = if batch[i].chooser.is_argmax() {
                    greatest[row]
                } else {
                    self.stepper.read_logits(row, &mut logits)?;
                    batch[i].chooser.draft(&mut logits)?
                };
                parts[i].drafts.push(draft);
                let mut own = Vec::new();
                self.stepper.append_draft_hidden(row, &mut own)?;
                hidden.push((i, own));
            }
            self.costs.note_draft(active.len(), start.elapsed().as_secs_f64());
        }
        for (sequence, part) in batch.iter_mut().zip(parts) {
            sequence.chooser.retract()?;
            sequence.chooser.revise(&mut part.drafts);
        }
        Ok(())
    }
}
