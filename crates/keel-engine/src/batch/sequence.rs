//! One running sequence of a batch.

use std::borrow::Cow;
use std::time::{Duration, Instant};

use keel_array::AttentionSpec;
use keel_array::sampling::Draw;
use keel_cache::{SavedState, SequenceCache};

use super::pictures::Pictures;
use super::policy::PromptRest;
use super::readout::Reading;
use super::request::{BatchRequest, SequenceId, SequenceStatus};
use crate::logits_row::TokenLogprobs;
use crate::speculation::{Chooser, RoundSequence, SamplerChooser, Speculation};
use crate::{Engine, FinishReason, LogitsRow, PREFILL_GRID, Result, Sampler};

/// A request that has memory.
pub(super) struct Running {
    pub id: SequenceId,
    pub cache: SequenceCache,
    /// Prompt and generated tokens. The cache holds all of them but those that have not been run.
    pub tokens: Vec<u32>,
    pub prompt_len: usize,
    /// How many tokens are run as a prompt: the prompt itself, and more if the sequence had to be run again.
    run_len: usize,
    /// Whether tokens of its answer are run as a prompt, because it has new rotary frequencies.
    pub is_run_again: bool,
    pub cached_tokens: usize,
    /// Grid positions where the prompt's state is saved, ascending.
    pub save_points: Vec<usize>,
    /// The state at the last grid point of the answer.
    pub rolling: Option<SavedState>,
    pub deadline: Option<Instant>,
    /// Whether it takes no part in this step.
    pub holds: bool,
    /// Its constraint is not ready, so it sits out of the step.
    pub awaits_mask: bool,
    /// Set after the prompt, if the engine drafts and it may.
    pub speculation: Option<Speculation>,
    /// Its part in steps under way.
    pub ahead: Ahead,
    /// The number of the last turn of its answer in a step under way. Before that, of the last turn before it was
    /// admitted.
    pub last_turn: usize,
    pub pictures: Pictures,
    /// The values to read of the prompt instead of an answer.
    pub reading: Option<Reading>,
    max_tokens: usize,
    chooser: SamplerChooser,
    end_tokens: Vec<u32>,
}

/// The part of a sequence in steps under way.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Ahead {
    pub rows: usize,
    pub steps: usize,
    /// Tokens that these steps draw for it.
    pub draws: usize,
}

/// The outcome of a step for one answer.
#[derive(Default)]
pub(super) struct Drawn {
    /// Tokens that belong to the text.
    pub tokens: Vec<(u32, Option<TokenLogprobs>)>,
    pub finish: Option<FinishReason>,
}

/// Rows of a request at full length. The last token is drawn but not run.
pub(super) fn rows_at_full_length(prompt_len: usize, max_tokens: usize) -> usize {
    prompt_len + max_tokens.max(1) - 1
}

/// Pages of a request at full length.
pub(super) fn pages_at_full_length(prompt_len: usize, max_tokens: usize) -> usize {
    rows_at_full_length(prompt_len, max_tokens).div_ceil(AttentionSpec::PAGE)
}

impl Running {
    /// A sequence that holds the first tokens of the prompt and will save its state at `save_points`. `draws_rows` says
    /// that the device draws after drafts, too. A text that it draws is the same with drafts.
    pub fn new(
        request: BatchRequest,
        cache: SequenceCache,
        save_points: Vec<usize>,
        sampler: Sampler,
        draws_rows: bool,
    ) -> Running {
        let mut chooser = SamplerChooser::new(sampler, request.constraint, request.end_tokens.clone());
        chooser.top_logprobs = request.top_logprobs;
        chooser.drafts = request.speculate || draws_rows && chooser.draws_ahead();
        Running {
            id: request.id,
            cached_tokens: cache.len(),
            cache,
            prompt_len: request.prompt.len(),
            run_len: request.prompt.len(),
            is_run_again: false,
            tokens: request.prompt,
            save_points,
            rolling: None,
            deadline: request.deadline,
            holds: false,
            awaits_mask: false,
            speculation: None,
            ahead: Ahead::default(),
            last_turn: 0,
            pictures: Pictures::default(),
            reading: request.readout.map(Reading::new),
            max_tokens: request.max_tokens,
            chooser,
            end_tokens: request.end_tokens,
        }
    }

    /// Its first tokens as prefixes know them: tokens of pictures become the names of the pictures.
    pub fn key(&self, len: usize) -> Cow<'_, [u32]> {
        match &self.pictures.key {
            None => Cow::Borrowed(&self.tokens[..len]),
            Some(key) if len <= key.len() => Cow::Borrowed(&key[..len]),
            Some(key) => [key, &self.tokens[key.len()..len]].concat().into(),
        }
    }

    /// Whether its prompt has been run.
    pub fn is_decoding(&self) -> bool {
        self.cache.len() >= self.run_len
    }

    /// Whether its prompt has just been run and no token after it is known.
    pub fn awaits_first(&self) -> bool {
        self.awaits_first_at(self.cache.len())
    }

    /// The same, once `at` tokens are run.
    pub fn awaits_first_at(&self, at: usize) -> bool {
        at >= self.run_len && self.tokens.len() == self.run_len
    }

    /// The token at this position, if it is run as part of a prompt.
    pub fn next_of_prompt(&self, at: usize) -> Option<u32> {
        self.tokens[..self.run_len].get(at).copied()
    }

    /// Called after its cache was reset: all its tokens but the last are run as a prompt.
    pub fn run_again(&mut self) {
        self.run_len = self.tokens.len() - 1;
        self.is_run_again = true;
    }

    /// How many tokens it holds once all steps under way are taken.
    pub fn virtual_len(&self) -> usize {
        self.cache.len() + self.ahead.rows
    }

    /// Whether it is answered and its prompt has been run, once all steps under way are taken.
    pub fn is_answering(&self) -> bool {
        self.prompt_rows_left() == 0 && self.reading.is_none()
    }

    /// How many tokens may still be drawn, not counting those that steps under way draw.
    pub fn draws_left(&self) -> usize {
        self.max_tokens - (self.tokens.len() - self.prompt_len) - self.ahead.draws
    }

    /// How many rows of its answer may still be run. The last token drawn is not run, and the prompt draws the first.
    pub fn answer_rows_left(&self) -> usize {
        let is_first_to_come = !self.is_answering() && self.awaits_first_at(self.run_len);
        self.draws_left().saturating_sub(usize::from(is_first_to_come))
    }

    /// Whether it decodes in this step.
    pub fn decodes_now(&self) -> bool {
        self.is_decoding() && !self.holds && !self.awaits_mask
    }

    /// Asks its constraint whether it is ready for the next token, which may take `patience`.
    pub fn ask_mask(&mut self, patience: Duration) {
        self.awaits_mask = !self.chooser.is_ready(patience);
    }

    /// How many rows of its prompt are left.
    pub fn prompt_rows_left(&self) -> usize {
        self.run_len.saturating_sub(self.virtual_len())
    }

    /// The rest of its prompt.
    pub fn prompt_rest(&self) -> PromptRest {
        let at = self.virtual_len();
        let end = self.save_points.iter().copied().find(|&stop| stop > at).unwrap_or(self.run_len);
        PromptRest { tokens: self.prompt_rows_left(), until_save_point: end - at }
    }

    /// Whether the state at the current position is to be saved.
    pub fn is_at_save_point(&self) -> bool {
        self.save_points.contains(&self.cache.len())
    }

    /// Whether it is about to save a state within `prompt`, after the `known_len` tokens that are remembered already,
    /// and no later than the prompt's own sequence would get there.
    pub fn will_leave(&self, prompt: &[u32], known_len: usize) -> bool {
        let at = self.cache.len();
        let ahead = self.save_points.iter().copied().filter(|&stop| stop > at && stop > known_len);
        at >= known_len
            && !self.is_decoding()
            && ahead.take_while(|&stop| stop < prompt.len()).any(|stop| self.key(stop)[..] == prompt[..stop])
    }

    /// Whether an answer is at a grid point after the prompt.
    pub fn is_at_grid_of_answer(&self) -> bool {
        let at = self.cache.len();
        at > self.prompt_len && at.is_multiple_of(PREFILL_GRID)
    }

    pub fn rows_at_full_length(&self) -> usize {
        rows_at_full_length(self.prompt_len, self.max_tokens)
    }

    pub fn pages_at_full_length(&self) -> usize {
        pages_at_full_length(self.prompt_len, self.max_tokens)
    }

    /// Pages that were promised to it and that it does not have yet.
    pub fn pages_missing(&self) -> usize {
        self.pages_at_full_length().saturating_sub(self.cache.pages().len())
    }

    /// How many more pages its next `rows` tokens need.
    pub fn pages_needed(&self, rows: usize) -> usize {
        (self.virtual_len() + rows).div_ceil(AttentionSpec::PAGE).saturating_sub(self.cache.pages().len())
    }

    /// The token drawn last. It has not been run.
    pub fn last(&self) -> u32 {
        self.tokens[self.cache.len()]
    }

    /// How many rows its next step may run. A round never crosses a grid point whose state is kept.
    pub fn rows_max(&self, keeps_state: bool) -> usize {
        let left = self.max_tokens - (self.tokens.len() - self.prompt_len);
        let to_grid = PREFILL_GRID - self.cache.len() % PREFILL_GRID;
        if keeps_state { left.min(to_grid) } else { left }
    }

    /// Its part in a round.
    pub fn in_round(&mut self, keeps_state: bool) -> RoundSequence<'_> {
        RoundSequence {
            last: self.last(),
            tokens_max: self.rows_max(keeps_state),
            cache: &mut self.cache,
            speculation: self.speculation.as_mut(),
            chooser: &mut self.chooser,
        }
    }

    /// Whether it would make drafts in a round of `sequences` sequences after the steps under way.
    pub fn wants_drafts(&self, engine: &Engine, keeps_state: bool, sequences: usize) -> bool {
        let Some(speculation) = &self.speculation else { return false };
        let (room, left) = (engine.room_of(&self.cache), self.rows_max(keeps_state));
        engine.wants_drafts(speculation, &self.chooser, room, left, sequences, self.ahead.draws)
    }

    /// Whether it may make drafts at all.
    pub fn may_draft(&self) -> bool {
        self.chooser.drafts
    }

    /// It makes no drafts from now on. Returns the data that it kept for them.
    pub fn draft_no_more(&mut self) -> Option<Speculation> {
        self.chooser.drafts = false;
        self.speculation.take()
    }

    /// How many rows the head lags behind after the steps under way, if it drafts.
    pub fn lag(&self) -> usize {
        self.speculation.as_ref().map_or(0, |speculation| speculation.lag_after(self.ahead.draws))
    }

    /// Whether its tokens are remembered for others.
    pub fn shares_prefixes(&self) -> bool {
        self.reading.as_ref().is_none_or(Reading::shares_prefixes)
    }

    /// Whether the host reads logits after its rows, to draw tokens or for themselves.
    pub fn needs_logits(&self) -> bool {
        self.reading.as_ref().map_or_else(|| !self.chooser.draws_ahead(), Reading::needs_logits)
    }

    /// How the device draws the token of the next step, even if an earlier token is still to be taken; `None` if the
    /// host draws it.
    pub fn draw_next(&mut self) -> Option<Draw> {
        if self.ahead.draws == 0 {
            self.chooser.begin();
        }
        self.chooser.draw_next()
    }

    /// Undoes [`Running::draw_next`] for a step that is not run.
    pub fn forget_next_draw(&mut self) {
        self.chooser.forget_draws(1);
    }

    /// Takes the token that the first step under way drew.
    pub fn take_ahead(&mut self, token: u32) -> Result<Drawn> {
        self.ahead.draws -= 1;
        let drawn = self.take_drawn(token);
        if self.ahead.draws > 0 {
            self.chooser.begin();
        }
        drawn
    }

    /// Takes back the draw of a failed step, and a later draw if there is one.
    pub fn abandon_draws(&mut self) {
        self.chooser.abandon();
    }

    /// Takes the token that the device drew.
    pub fn take_drawn(&mut self, token: u32) -> Result<Drawn> {
        let choice = self.chooser.take(token)?;
        Ok(self.take(&[choice.token], choice.is_last))
    }

    /// Draws the next token from the logits, which are overwritten.
    pub fn draw(&mut self, row: &mut LogitsRow) -> Result<Drawn> {
        self.chooser.begin();
        let choice = self.chooser.choose(row, None)?;
        Ok(self.take(&[choice.token], choice.is_last))
    }

    /// Takes chosen tokens. A token that ends the text is not part of it.
    pub fn take(&mut self, chosen: &[u32], is_last: bool) -> Drawn {
        let mut drawn = Drawn::default();
        let mut logprobs = self.chooser.take_logprobs().into_iter();
        for &id in chosen {
            let logprobs = logprobs.next();
            if self.end_tokens.contains(&id) {
                drawn.finish = Some(FinishReason::Stop);
                return drawn;
            }
            self.tokens.push(id);
            drawn.tokens.push((id, logprobs));
        }
        let is_full = self.tokens.len() - self.prompt_len >= self.max_tokens;
        drawn.finish = match (is_last, is_full) {
            (true, _) => Some(FinishReason::Stop),
            (false, true) => Some(FinishReason::Length),
            (false, false) => None,
        };
        drawn
    }

    pub fn status(&self) -> SequenceStatus {
        let counters = self.speculation.as_ref().map(|s| s.counters().clone()).unwrap_or_default();
        SequenceStatus {
            id: self.id,
            prompt_tokens: self.prompt_len,
            cached_tokens: self.cached_tokens,
            prefilled_tokens: self.cache.len().min(self.prompt_len),
            generated_tokens: self.tokens.len() - self.prompt_len,
            pages: self.cache.pages().len(),
            pages_promised: self.pages_at_full_length(),
            slot: self.cache.slot().0,
            drafted: counters.drafted_total(),
            accepted: counters.accepted_total(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::pages_at_full_length;

    #[test]
    fn the_last_token_needs_no_room() {
        assert_eq!(pages_at_full_length(200, 57), 1);
        assert_eq!(pages_at_full_length(200, 58), 2);
        assert_eq!(pages_at_full_length(256, 0), 1);
    }
}
