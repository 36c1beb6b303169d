//! One running sequence of a batch.

use std::borrow::Cow;
use std::time::Instant;

use keel_array::AttentionSpec;
use keel_array::sampling::Draw;
use keel_cache::SequenceCache;

use super::chooser::BatchChooser;
use super::pictures::Pictures;
use super::policy::PromptRest;
use super::readout::Reading;
use super::request::{BatchRequest, RequestId, SequenceStatus, TokenLogprobs};
use crate::speculation::{Chooser, RoundSequence, SamplerChooser, Speculation};
use crate::{FinishReason, PREFILL_GRID, Result, Sampler};

/// A request that has memory.
pub(super) struct Running {
    pub id: RequestId,
    pub cache: SequenceCache,
    /// Prompt and generated tokens; the cache holds all but those that are still to be run.
    pub tokens: Vec<u32>,
    pub prompt_len: usize,
    /// Tokens that are run as a prompt: those of the prompt, and more where the sequence had to be run again.
    run_len: usize,
    pub cached_tokens: usize,
    /// Positions on the grid where the prompt's state is saved, ascending.
    pub stops: Vec<usize>,
    /// The state at the last grid point of the answer: position and checkpoint.
    pub rolling: Option<(usize, u32)>,
    pub deadline: Option<Instant>,
    /// Takes no part in this step.
    pub holds: bool,
    /// Set behind the prompt, where the engine drafts.
    pub speculation: Option<Speculation>,
    /// What of it is under way.
    pub ahead: Ahead,
    pub pictures: Pictures,
    /// What is read of the prompt in place of an answer.
    pub reading: Option<Reading>,
    max_tokens: usize,
    chooser: BatchChooser,
    end_tokens: Vec<u32>,
}

/// What of a sequence is in steps under way.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Ahead {
    pub rows: usize,
    pub steps: usize,
    /// Tokens that these steps draw for it.
    pub draws: usize,
}

/// What a step led to.
#[derive(Default)]
pub(super) struct Drawn {
    /// Tokens that belong to the text.
    pub tokens: Vec<(u32, Option<TokenLogprobs>)>,
    pub finish: Option<FinishReason>,
}

/// Pages of a request at full length. The last token is drawn and not run.
pub(super) fn pages_at_full_length(prompt_len: usize, max_tokens: usize) -> usize {
    (prompt_len + max_tokens.max(1) - 1).div_ceil(AttentionSpec::PAGE)
}

impl Running {
    /// A sequence that holds the first tokens of the prompt and is to save its state at `stops`.
    pub fn new(request: BatchRequest, cache: SequenceCache, stops: Vec<usize>, sampler: Sampler) -> Running {
        let chooser = SamplerChooser::new(sampler, request.constraint, request.end_tokens.clone());
        Running {
            id: request.id,
            cached_tokens: cache.len(),
            cache,
            prompt_len: request.prompt.len(),
            run_len: request.prompt.len(),
            tokens: request.prompt,
            stops,
            rolling: None,
            deadline: request.deadline,
            holds: false,
            speculation: None,
            ahead: Ahead::default(),
            pictures: Pictures::default(),
            reading: request.readout.map(Reading::new),
            max_tokens: request.max_tokens,
            chooser: BatchChooser::new(chooser, request.top_logprobs, request.speculate),
            end_tokens: request.end_tokens,
        }
    }

    /// Its first tokens as prefixes know them: those of pictures are the names of the pictures.
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

    /// Whether its prompt, or what stands for it, has just been run for the first time, so that no token behind it is known.
    pub fn awaits_first(&self) -> bool {
        self.awaits_first_at(self.cache.len())
    }

    /// The same, once so many tokens are run.
    pub fn awaits_first_at(&self, at: usize) -> bool {
        at >= self.run_len && self.tokens.len() == self.run_len
    }

    /// Whether tokens of its answer are run as a prompt, because it turns by other frequencies from now on.
    pub fn is_run_again(&self) -> bool {
        self.run_len > self.prompt_len
    }

    /// The token at this position, if it is run as part of a prompt.
    pub fn next_of_prompt(&self, at: usize) -> Option<u32> {
        self.tokens[..self.run_len].get(at).copied()
    }

    /// Has forgotten what it held, and runs all its tokens but the last as a prompt.
    pub fn run_again(&mut self) {
        self.run_len = self.tokens.len() - 1;
    }

    /// Tokens that it holds once all is taken that is under way.
    pub fn virtual_len(&self) -> usize {
        self.cache.len() + self.ahead.rows
    }

    /// As [`Running::is_decoding`], once all is taken that is under way.
    pub fn is_answering(&self) -> bool {
        self.virtual_len() >= self.run_len
    }

    /// Whether what it runs as a prompt ends at this position.
    pub fn prompt_ends_at(&self, at: usize) -> bool {
        at >= self.run_len
    }

    /// Tokens that may still be drawn, beside those that steps under way draw.
    pub fn draws_left(&self) -> usize {
        self.max_tokens - (self.tokens.len() - self.prompt_len) - self.ahead.draws
    }

    /// Whether it decodes in this step.
    pub fn decodes_now(&self) -> bool {
        self.is_decoding() && !self.holds
    }

    /// What is left of its prompt.
    pub fn prompt_rest(&self) -> PromptRest {
        let at = self.virtual_len();
        let end = self.stops.iter().copied().find(|&stop| stop > at).unwrap_or(self.run_len);
        PromptRest { tokens: self.run_len - at, until_stop: end - at }
    }

    /// Whether the state at the current position is worth saving.
    pub fn is_at_stop(&self) -> bool {
        self.stops.contains(&self.cache.len())
    }

    /// Whether it is about to save a state within `prompt`, behind the `known_len` tokens that are remembered of it, and
    /// will be there no later than the prompt's own sequence would.
    pub fn will_leave(&self, prompt: &[u32], known_len: usize) -> bool {
        let at = self.cache.len();
        let ahead = self.stops.iter().copied().filter(|&stop| stop > at && stop > known_len);
        at >= known_len
            && !self.is_decoding()
            && ahead.take_while(|&stop| stop < prompt.len()).any(|stop| self.key(stop)[..] == prompt[..stop])
    }

    /// Whether an answer has come to a grid point behind the prompt.
    pub fn is_at_grid_of_answer(&self) -> bool {
        let at = self.cache.len();
        at > self.prompt_len && at.is_multiple_of(PREFILL_GRID)
    }

    pub fn pages_at_full_length(&self) -> usize {
        pages_at_full_length(self.prompt_len, self.max_tokens)
    }

    /// Pages that it was promised and does not have yet.
    pub fn pages_missing(&self) -> usize {
        self.pages_at_full_length().saturating_sub(self.cache.pages().len())
    }

    /// Pages that its next `rows` tokens begin.
    pub fn pages_behind(&self, rows: usize) -> usize {
        (self.virtual_len() + rows).div_ceil(AttentionSpec::PAGE).saturating_sub(self.cache.pages().len())
    }

    /// The token that was drawn last, which has not been run.
    pub fn last(&self) -> u32 {
        self.tokens[self.cache.len()]
    }

    /// Rows that its next step may run at most. A round never crosses a grid point whose state is to be kept.
    pub fn rows_max(&self, keeps_state: bool) -> usize {
        let left = self.max_tokens - (self.tokens.len() - self.prompt_len);
        let to_grid = PREFILL_GRID - self.cache.len() % PREFILL_GRID;
        if keeps_state { left.min(to_grid) } else { left }
    }

    /// Its part in a round.
    pub fn in_round(&mut self, keeps_state: bool) -> Option<RoundSequence<'_>> {
        let (last, tokens_max) = (self.last(), self.rows_max(keeps_state));
        let speculation = self.speculation.as_mut()?;
        Some(RoundSequence {
            cache: &mut self.cache,
            speculation,
            chooser: &mut self.chooser,
            last,
            tokens_max,
        })
    }

    /// How its next token can be drawn on the device, if the host has no need to.
    pub fn draw_ahead(&mut self) -> Option<Draw> {
        self.chooser.begin();
        self.chooser.draw_ahead()
    }

    /// As [`BatchChooser::draft_if_drawn_ahead`].
    pub fn draft_if_drawn_ahead(&mut self) {
        self.chooser.draft_if_drawn_ahead();
    }

    /// Whether what it knows is remembered for others.
    pub fn shares_prefixes(&self) -> bool {
        self.reading.as_ref().is_none_or(Reading::shares_prefixes)
    }

    /// Whether the device can draw its next tokens, and the host needs nothing else of its steps.
    pub fn draws_ahead(&self) -> bool {
        self.reading.is_none() && self.chooser.draws_ahead()
    }

    /// How the device draws the token of the next step, whether or not one is still to be taken.
    pub fn draw_next(&mut self) -> Option<Draw> {
        if self.ahead.draws == 0 { self.draw_ahead() } else { self.chooser.draw_behind() }
    }

    /// The step that [`Running::draw_next`] was for is not run.
    pub fn forget_next_draw(&mut self) {
        if self.ahead.draws > 0 {
            self.chooser.forget_behind();
        } else {
            self.abandon_ahead();
        }
    }

    /// Takes the token that the first step under way has drawn.
    pub fn take_ahead(&mut self, token: u32) -> Result<Drawn> {
        self.ahead.draws -= 1;
        let drawn = self.take_drawn(token);
        if self.ahead.draws > 0 {
            self.chooser.begin();
        }
        drawn
    }

    /// The draws that are under way were not made.
    pub fn abandon_ahead(&mut self) {
        // Without a constraint there is nothing that cannot go back.
        let abandoned = self.chooser.abandon();
        debug_assert!(abandoned.is_ok(), "the device draws for it");
    }

    /// The step failed: the draw was not made, nor one behind it.
    pub fn abandon_draw(&mut self) -> Result<()> {
        self.chooser.abandon()
    }

    /// Takes the token that the device has drawn.
    pub fn take_drawn(&mut self, token: u32) -> Result<Drawn> {
        let choice = self.chooser.take(token)?;
        self.take(&[choice.token], choice.is_last)
    }

    /// Draws the next token from the logits, which are overwritten.
    pub fn draw(&mut self, logits: &mut [f32]) -> Result<Drawn> {
        self.chooser.begin();
        let choice = self.chooser.choose(logits, None)?;
        self.take(&[choice.token], choice.is_last)
    }

    /// Takes tokens that were chosen. One that ends the text is not part of it.
    ///
    /// # Errors
    /// What the constraint said meanwhile.
    pub fn take(&mut self, chosen: &[u32], is_last: bool) -> Result<Drawn> {
        if let Some(error) = self.chooser.take_failure() {
            return Err(error);
        }
        let mut drawn = Drawn::default();
        let mut logprobs = self.chooser.take_logprobs();
        for &id in chosen {
            let logprobs = logprobs.next();
            if self.end_tokens.contains(&id) {
                drawn.finish = Some(FinishReason::Stop);
                return Ok(drawn);
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
        Ok(drawn)
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
            slot: self.cache.slot(),
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
