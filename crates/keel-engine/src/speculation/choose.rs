//! How the token after a row is chosen.
//!
//! A draft `d` was drawn from the MTP head's distribution `q`; the model's distribution is `p`. With probability
//! `min(1, p(d) / q(d))` the draft stays. Otherwise the token is drawn from `max(p - q, 0)`, normalised. Either way the
//! token's distribution is `p`. Both `p` and `q` are taken after penalties, bias, constraint, temperature and filters.
//! Any `q` will do, so it has the [`PROPOSED_TOKENS_MAX`] most probable tokens alone, which bounds its memory. A greedy
//! distribution has one token, so a draft stays if it is the model's token.

use std::collections::VecDeque;
use std::time::Duration;

use keel_array::sampling::Draw;

use crate::batch::Constraint;
use crate::logits_row::TokenLogprobs;
use crate::{EngineError, LogitsRow, Result, Sampler};

/// The most tokens of a draft's distribution.
const PROPOSED_TOKENS_MAX: usize = 256;

/// The token chosen after a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The token.
    pub token: u32,
    /// Whether the sequence ends with it.
    pub is_last: bool,
}

/// A draft that the token after a row is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draft {
    /// Its number in the round, from 0.
    pub index: usize,
    /// The drafted token.
    pub token: u32,
}

/// How a sequence chooses its drafts and tokens.
pub trait Chooser {
    /// Whether it can draft now.
    fn can_draft(&self) -> bool {
        true
    }

    /// Whether it can choose another token of the round, after a wait of at most `patience`. If not, the round ends
    /// before that token.
    fn can_go_on(&mut self, _patience: Duration) -> bool {
        true
    }

    /// Whether a draft may stay unchecked. Within a constraint it may not, because the constraint does not bind all
    /// drafts.
    fn may_go_unchecked(&self) -> bool {
        true
    }

    /// Whether the device can draw every token.
    fn draws_ahead(&self) -> bool {
        false
    }

    /// How the device can draw the token after those that it draws already; `None` if the host has to choose. The token
    /// is then passed to [`Chooser::take`]. The draw counts as made until [`Chooser::forget_draws`] or
    /// [`Chooser::abandon`].
    fn draw_next(&mut self) -> Option<Draw> {
        None
    }

    /// The last `count` draws whose tokens were not taken count as not made.
    fn forget_draws(&mut self, _count: usize) {}

    /// Draws a draft from the MTP head's logits, as if the drafts before it had stayed. The logits are overwritten.
    ///
    /// # Errors
    /// An error of the constraint.
    fn draft(&mut self, row: &mut LogitsRow) -> Result<u32>;

    /// Begins a round, with the first of the draws whose tokens were not taken. [`Chooser::abandon`] returns to this
    /// state.
    fn begin(&mut self);

    /// Takes back a failed round. The state is that of its begin, so a retry chooses the same tokens. If the constraint
    /// cannot go back, the chooser fails from then on.
    fn abandon(&mut self);

    /// Ends drafting: the drafts do not count as tokens any more. Random numbers that they took stay taken: a draft
    /// must not be judged with the number that it was drawn with.
    fn retract(&mut self);

    /// Chooses the token after a row with these logits, which are overwritten. `draft` is the draft for its place.
    ///
    /// # Errors
    /// An error of the constraint.
    fn choose(&mut self, row: &mut LogitsRow, draft: Option<Draft>) -> Result<Choice>;

    /// Takes a token that was found without this chooser, such as one that the device drew.
    ///
    /// # Errors
    /// An error of the constraint.
    fn take(&mut self, token: u32) -> Result<Choice>;
}

/// Chooses with a [`Sampler`], and within a [`Constraint`] if there is one. Keeps log probabilities of the tokens that
/// it chose, if they are wanted.
///
/// The constraint binds the first draft alone, because the masks of later ones would be computed while others of the
/// round wait. A draft that it forbids is not kept.
///
/// # Memory
/// At most 2 KiB for each draft of a round that was sampled on the host.
pub struct SamplerChooser {
    sampler: Sampler,
    constraint: Option<Box<dyn Constraint>>,
    end_tokens: Vec<u32>,
    /// Whether it may draft at all.
    pub(crate) drafts: bool,
    /// How many of the most probable tokens to report with each token's log probability.
    pub(crate) top_logprobs: Option<usize>,
    /// Log probabilities of the tokens chosen in this round.
    logprobs: Vec<TokenLogprobs>,
    /// Drafts that were not retracted yet.
    drafted: Vec<Noted>,
    /// Tokens chosen in this round.
    chosen: Vec<Noted>,
    /// How many of them the constraint accepted.
    constrained: usize,
    /// The sampler's random state when the round began.
    random: u64,
    /// The random state before each draw that was made and whose token was not taken.
    drawn_from: VecDeque<u64>,
    /// The drafts of the round. Reused from round to round.
    proposed: Vec<Proposed>,
}

impl SamplerChooser {
    /// The most bytes of a draft that was sampled on the host.
    pub(crate) const DRAFT_BYTES: usize = PROPOSED_TOKENS_MAX * size_of::<(u32, f32)>();

    /// Tokens in `end_tokens` end the sequence.
    pub fn new(
        sampler: Sampler,
        constraint: Option<Box<dyn Constraint>>,
        end_tokens: Vec<u32>,
    ) -> SamplerChooser {
        SamplerChooser {
            constraint,
            end_tokens,
            drafts: true,
            top_logprobs: None,
            logprobs: Vec::new(),
            drafted: Vec::new(),
            chosen: Vec::new(),
            constrained: 0,
            random: sampler.random(),
            drawn_from: VecDeque::new(),
            sampler,
            proposed: Vec::new(),
        }
    }

    /// The log probabilities of the tokens chosen in this round, if they were asked for.
    pub(crate) fn take_logprobs(&mut self) -> Vec<TokenLogprobs> {
        std::mem::take(&mut self.logprobs)
    }

    /// Whether the constraint can be applied without a wait, or after one of at most `patience`.
    pub(crate) fn is_ready(&mut self, patience: Duration) -> bool {
        self.constraint.as_mut().is_none_or(|constraint| constraint.is_ready(patience))
    }

    fn process(&mut self, logits: &mut [f32]) -> Result<()> {
        if let Some(constraint) = &mut self.constraint {
            constraint.mask(logits).map_err(EngineError::Constraint)?;
        }
        Ok(())
    }

    /// The token after a row, as [`Chooser::choose`] chooses it.
    fn pick(&mut self, row: &mut LogitsRow, draft: Option<Draft>) -> Result<u32> {
        self.process(&mut row.values)?;
        let Some(Draft { index, token: draft }) = draft else { return Ok(self.sampler.pick(row)) };
        self.sampler.penalise(&mut row.values);
        let uniforms = [self.sampler.uniform(), self.sampler.uniform()];
        // A draft that was not drawn here counts as proposed with probability 1.
        let certain = [(draft, 1.0)];
        let drawn = self.proposed.get(index).filter(|proposed| proposed.token == draft);
        let q = drawn.map_or(&certain[..], |proposed| &proposed.distribution);
        Ok(self.sampler.distribution(row).judge(q, draft, uniforms))
    }

    /// Counts a chosen token and passes it to the constraint.
    fn chosen(&mut self, token: u32) -> Result<Choice> {
        self.chosen.push(Noted { token, was_new: self.sampler.note(token) });
        let mut is_last = self.end_tokens.contains(&token);
        if let Some(constraint) = self.constraint.as_mut().filter(|_| !is_last) {
            constraint.accept(token).map_err(EngineError::Constraint)?;
            self.constrained += 1;
            is_last = constraint.is_complete();
        }
        Ok(Choice { token, is_last })
    }
}

/// A draft that was drawn from the logits of the MTP head.
struct Proposed {
    token: u32,
    /// The tokens that it was drawn from with their probabilities, by token.
    distribution: Vec<(u32, f32)>,
}

/// A token that the sampler can forget.
struct Noted {
    token: u32,
    /// Whether the sampler had not seen it before.
    was_new: bool,
}

/// Forgets tokens, the last one first.
fn forget(tokens: &mut Vec<Noted>, sampler: &mut Sampler) {
    while let Some(Noted { token, was_new }) = tokens.pop() {
        sampler.forget(token, was_new);
    }
}

/// In place of a constraint that could not take tokens back, because its state is not known.
struct Broken(String);

impl Constraint for Broken {
    fn mask(&mut self, _: &mut [f32]) -> std::result::Result<(), String> {
        Err(self.0.clone())
    }

    fn accept(&mut self, _: u32) -> std::result::Result<(), String> {
        Err(self.0.clone())
    }

    fn is_complete(&self) -> bool {
        false
    }
}

impl Chooser for SamplerChooser {
    fn can_draft(&self) -> bool {
        self.drafts && self.constraint.as_ref().is_none_or(|constraint| constraint.is_quick())
    }

    fn can_go_on(&mut self, patience: Duration) -> bool {
        self.is_ready(patience)
    }

    fn may_go_unchecked(&self) -> bool {
        // A token that is taken unchecked has no log probability.
        self.constraint.is_none() && self.top_logprobs.is_none()
    }

    fn draws_ahead(&self) -> bool {
        self.constraint.is_none() && self.top_logprobs.is_none() && self.sampler.draws_ahead()
    }

    fn draw_next(&mut self) -> Option<Draw> {
        let random = self.sampler.random();
        let draw = if self.draws_ahead() { self.sampler.draw_ahead() } else { None };
        self.drawn_from.extend(draw.map(|_| random));
        draw
    }

    fn forget_draws(&mut self, count: usize) {
        let kept = self.drawn_from.len().saturating_sub(count);
        if let Some(random) = self.drawn_from.drain(kept..).next() {
            self.sampler.set_random(random);
        }
    }

    fn begin(&mut self) {
        self.chosen.clear();
        self.constrained = 0;
        self.logprobs.clear();
        self.random = self.drawn_from.front().copied().unwrap_or(self.sampler.random());
    }

    fn abandon(&mut self) {
        self.sampler.set_random(self.random);
        self.drawn_from.clear();
        self.logprobs.clear();
        self.retract();
        forget(&mut self.chosen, &mut self.sampler);
        let taken = std::mem::take(&mut self.constrained);
        let Some(constraint) = self.constraint.as_mut().filter(|_| taken > 0) else { return };
        if let Err(reason) = constraint.rollback(taken) {
            *constraint = Box::new(Broken(reason));
        }
    }

    fn draft(&mut self, row: &mut LogitsRow) -> Result<u32> {
        let at = self.drafted.len();
        if at == 0 {
            self.process(&mut row.values)?;
        }
        self.sampler.penalise(&mut row.values);
        let uniform = self.sampler.uniform();
        let q = self.sampler.distribution(row).first(PROPOSED_TOKENS_MAX);
        if self.proposed.len() == at {
            // All its memory at once: a list that grows may take more than it needs.
            self.proposed.push(Proposed { token: 0, distribution: Vec::with_capacity(PROPOSED_TOKENS_MAX) });
        }
        let Proposed { token, distribution } = &mut self.proposed[at];
        *token = q.draw(uniform);
        distribution.clear();
        distribution.extend(q.tokens());
        distribution.sort_unstable_by_key(|&(id, _)| id);
        let token = *token;
        self.drafted.push(Noted { token, was_new: self.sampler.note(token) });
        Ok(token)
    }

    fn retract(&mut self) {
        forget(&mut self.drafted, &mut self.sampler);
    }

    fn choose(&mut self, row: &mut LogitsRow, draft: Option<Draft>) -> Result<Choice> {
        if self.top_logprobs.is_some() {
            row.keep_raw();
        }
        let token = self.pick(row, draft)?;
        self.logprobs.extend(self.top_logprobs.map(|count| row.logprobs(token, count)));
        self.chosen(token)
    }

    fn take(&mut self, token: u32) -> Result<Choice> {
        self.drawn_from.pop_front();
        self.chosen(token)
    }
}

#[cfg(test)]
mod tests;
