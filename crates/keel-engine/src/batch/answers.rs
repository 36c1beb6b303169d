//! A step of answers that is waited for: a token each, or a round where the engine drafts.

use std::time::{Duration, Instant};

use keel_cache::{CheckpointLease, SavedState};

use super::sequence::{Drawn, Running};
use super::{Batcher, MASK_PATIENCE, members};
use crate::speculation::{Round, RoundSequence};
use crate::{Engine, Result};

impl Batcher {
    /// Runs the last token of each answer, with drafts after it if the engine makes them, and draws the next tokens.
    pub(super) fn decode(&mut self) {
        self.run_outgrown_again();
        let drafts = self.engine.options().drafts;
        let pages = |batch: &Batcher, i: usize| {
            let running = &batch.running[i];
            let takes_part = running.is_decoding() && !running.awaits_mask;
            if takes_part { batch.pages_for(i, drafts + 1) } else { 0 }
        };
        // Masks first: a sequence without a mask sits out, so no sequence is parked for its pages.
        self.ask_masks(Running::is_decoding);
        let holds = self.make_way(pages);
        self.running.iter_mut().zip(holds).for_each(|(running, holds)| running.holds = holds);
        let indices: Vec<usize> =
            (0..self.running.len()).filter(|&i| self.running[i].decodes_now()).collect();
        if indices.is_empty() {
            return;
        }
        let missing = indices.iter().map(|&i| self.pages_for(i, drafts + 1)).sum();
        self.prefixes.make_room(self.engine.cache(), missing);
        self.plain_steps = 0;
        let mut ended = Vec::new();
        for (i, drawn) in self.decode_rows(&indices) {
            if drawn.is_ok() {
                self.keep_state(i);
            }
            if let Some(end) = self.report(i, drawn) {
                ended.push((i, end));
            }
        }
        ended.into_iter().rev().for_each(|(i, end)| self.end(i, end));
    }

    /// Finds out which of these sequences have to wait for their masks. All masks are begun before the first is waited
    /// for.
    pub(super) fn ask_masks(&mut self, of: impl Fn(&Running) -> bool) {
        let until = Instant::now() + MASK_PATIENCE;
        let mut asked: Vec<&mut Running> = self.running.iter_mut().filter(|running| of(running)).collect();
        asked.iter_mut().for_each(|running| running.ask_mask(Duration::ZERO));
        asked.retain(|running| running.awaits_mask);
        for running in asked {
            running.ask_mask(until.saturating_duration_since(Instant::now()));
        }
    }

    /// Runs answers that outgrow their rotary frequencies again as prompts.
    fn run_outgrown_again(&mut self) {
        for i in (0..self.running.len()).rev() {
            let running = &mut self.running[i];
            if !running.is_decoding() || self.engine.can_grow(&running.cache, running.cache.len() + 1) {
                continue;
            }
            running.rolling = None;
            match self.engine.cache_mut().reset(&mut running.cache) {
                Ok(()) => {
                    running.cache.set_long(true);
                    running.run_again();
                    // The MTP head would need rows that are gone.
                    self.draft_no_more(i);
                }
                Err(error) => self.fail(i, error.into()),
            }
        }
    }

    /// An answer makes no more drafts.
    pub(super) fn draft_no_more(&mut self, i: usize) {
        if let Some(speculation) = self.running[i].draft_no_more() {
            self.speculation.add(speculation.counters());
        }
    }

    /// One or more tokens for each of these answers.
    pub(super) fn round(&mut self, indices: &[usize]) -> Result<Vec<Result<Drawn>>> {
        let keeps_state = self.keeps_state();
        let (mut batch, mut outside): (Vec<RoundSequence<'_>>, Vec<_>) = (Vec::new(), Vec::new());
        for (i, running) in self.running.iter_mut().enumerate() {
            match indices.binary_search(&i) {
                Ok(_) => batch.push(running.in_round(keeps_state)),
                Err(_) => outside.extend(&mut running.speculation),
            }
        }
        self.engine.fetch_lags(outside)?;
        let rounds = self.engine.round(&mut batch)?;
        let decoding = members(&mut self.running, indices);
        let take = |(r, round): (&mut Running, Result<Round>)| {
            round.map(|round| r.take(&round.tokens, round.is_last))
        };
        Ok(decoding.zip(rounds).map(take).collect())
    }

    /// Whether the states of answers are kept at grid points.
    pub(super) fn keeps_state(&self) -> bool {
        let cache = self.engine.cache();
        self.options.reuse_generated && cache.spec().is_recurrent() && self.prefixes.keeps_states(cache)
    }

    /// How many more pages the next `rows` tokens of a sequence need.
    pub(super) fn pages_for(&self, i: usize, rows: usize) -> usize {
        let running = &self.running[i];
        running.pages_needed(rows.min(running.rows_max(false)))
    }

    /// Keeps the state of an answer at its last grid point for a next turn. A failure is counted and costs no token:
    /// the answer goes on without that state. If its own state is torn, its next step says so.
    pub(super) fn keep_state(&mut self, i: usize) {
        // If open rows cannot be committed, which is counted there, the state before this one stays.
        if !self.keeps_state() || !self.running[i].is_at_grid_of_answer() || self.commit(i).is_err() {
            return;
        }
        if let Some(checkpoint) = self.save_state(i, false) {
            let running = &mut self.running[i];
            running.rolling = Some(SavedState { position: running.cache.len(), checkpoint });
        }
    }

    /// Saves the state that the steps submitted so far leave. If no checkpoint is free, the state that an answer has
    /// saved before makes room, else one of the tree. A failure counts as a failed step: no token depends on it, and a
    /// state that is not kept is computed again when it is needed.
    pub(super) fn save_state(&mut self, i: usize, is_prompt: bool) -> Option<CheckpointLease> {
        let (running, cache) = (&mut self.running[i], self.engine.cache_mut());
        let own = if is_prompt || cache.free_checkpoints() > 0 { None } else { running.rolling.take() };
        let saved = match own {
            // A copy that fails halfway leaves neither state.
            Some(SavedState { checkpoint, .. }) => cache
                .overwrite_checkpoint(&running.cache, &checkpoint)
                .map(|()| Some(checkpoint))
                .map_err(Into::into),
            None => self.prefixes.save_checkpoint(cache, &running.cache),
        };
        saved.inspect_err(|error| self.count_failed_step(error)).ok().flatten()
    }

    /// Draws the next token of an answer from row `row` of the logits.
    pub(super) fn draw(&mut self, i: usize, row: usize) -> Result<Drawn> {
        self.draw_from(i, |engine, logits| engine.logits(row, logits))
    }

    /// Draws the next token of an answer from the logits that `read` gives.
    pub(super) fn draw_from(
        &mut self,
        i: usize,
        read: impl FnOnce(&Engine, &mut Vec<f32>) -> Result<()>,
    ) -> Result<Drawn> {
        let running = &mut self.running[i];
        self.engine.with_logits_row(|engine, row| {
            read(engine, &mut row.values)?;
            running.draw(row)
        })
    }
}
