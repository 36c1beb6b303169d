//! How a sequence of a batch chooses its tokens, with log probabilities where they were asked for.

use keel_array::sampling::Draw;

use super::request::TokenLogprobs;
use crate::speculation::{Choice, Chooser, SamplerChooser};
use crate::{EngineError, Result};

/// A [`SamplerChooser`] that keeps the log probabilities of the tokens that it chose.
pub(super) struct BatchChooser {
    inner: SamplerChooser,
    top_logprobs: Option<usize>,
    drafts: bool,
    /// Log probabilities of tokens that were chosen and not reported yet.
    logprobs: Vec<TokenLogprobs>,
    /// Length of `logprobs` when the round began.
    reported: usize,
    /// An error of the constraint. It ends this sequence alone: other sequences share the round, so the round goes on.
    failure: Option<EngineError>,
}

impl BatchChooser {
    /// `drafts` says whether the sequence may draft at all.
    pub fn new(inner: SamplerChooser, top_logprobs: Option<usize>, drafts: bool) -> BatchChooser {
        BatchChooser { inner, top_logprobs, drafts, logprobs: Vec::new(), reported: 0, failure: None }
    }

    /// The log probabilities of the tokens chosen since the last call, if they were asked for.
    pub fn take_logprobs(&mut self) -> impl Iterator<Item = TokenLogprobs> + use<> {
        std::mem::take(&mut self.logprobs).into_iter()
    }
}

impl BatchChooser {
    /// Why the sequence cannot go on, if it cannot.
    pub fn take_failure(&mut self) -> Option<EngineError> {
        self.failure.take()
    }

    /// Lets the sequence draft if the device draws its tokens, because they are then the same with drafts.
    pub fn draft_if_drawn_ahead(&mut self) {
        self.drafts |= self.draws_ahead();
    }

    /// Whether nothing but the sampler can need the logits on the host.
    fn needs_no_logits(&self) -> bool {
        self.top_logprobs.is_none() && self.failure.is_none()
    }

    /// Whether the device can draw the next tokens.
    pub fn draws_ahead(&self) -> bool {
        self.needs_no_logits() && self.inner.draws_ahead()
    }

    /// As [`Chooser::draw_ahead`], for the token after the one that is still to be taken.
    pub fn draw_behind(&mut self) -> Option<Draw> {
        self.inner.draw_behind()
    }

    /// Undoes [`BatchChooser::draw_behind`].
    pub fn forget_behind(&mut self) {
        self.inner.forget_behind();
    }

    /// Keeps a failure for later and returns `instead`, which is never shown.
    fn or_fail<T>(&mut self, outcome: Result<T>, instead: T) -> T {
        outcome.unwrap_or_else(|error| {
            self.failure.get_or_insert(error);
            instead
        })
    }
}

const FAILED: Choice = Choice { token: 0, is_last: true };

impl Chooser for BatchChooser {
    fn can_draft(&self) -> bool {
        self.drafts && self.inner.can_draft()
    }

    fn is_argmax(&self) -> bool {
        self.needs_no_logits() && self.inner.is_argmax()
    }

    fn draw_ahead(&mut self) -> Option<Draw> {
        if self.needs_no_logits() { self.inner.draw_ahead() } else { None }
    }

    fn draw_rows(&mut self, count: usize) -> Option<Vec<Draw>> {
        if self.needs_no_logits() { self.inner.draw_rows(count) } else { None }
    }

    fn keep_draws(&mut self, count: usize) {
        self.inner.keep_draws(count);
    }

    fn begin(&mut self) {
        self.inner.begin();
        self.reported = self.logprobs.len();
    }

    fn abandon(&mut self) -> Result<()> {
        self.logprobs.truncate(self.reported);
        let abandoned = self.inner.abandon();
        self.or_fail(abandoned, ());
        Ok(())
    }

    fn draft(&mut self, logits: &mut [f32]) -> Result<u32> {
        let draft = self.inner.draft(logits);
        Ok(self.or_fail(draft, 0))
    }

    fn retract(&mut self) -> Result<()> {
        let retracted = self.inner.retract();
        self.or_fail(retracted, ());
        Ok(())
    }

    fn choose(&mut self, logits: &mut [f32], draft: Option<(usize, u32)>) -> Result<Choice> {
        let raw = self.top_logprobs.map(|count| (logits.to_vec(), count));
        if self.failure.is_some() {
            return Ok(FAILED);
        }
        let choice = self.inner.choose(logits, draft);
        let choice = self.or_fail(choice, FAILED);
        self.logprobs.extend(raw.map(|(raw, count)| logprobs(&raw, choice.token, count)));
        Ok(choice)
    }

    fn take(&mut self, token: u32) -> Result<Choice> {
        let choice = self.inner.take(token);
        Ok(self.or_fail(choice, FAILED))
    }
}

/// Log softmax at the drawn token and at the `count` most probable ones, with sums in f64.
fn logprobs(logits: &[f32], drawn: u32, count: usize) -> TokenLogprobs {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&l| f64::from(l - max).exp()).sum();
    let of = |logit: f32| (f64::from(logit - max) - sum.ln()) as f32;
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    let by_logit = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    let count = count.min(order.len());
    if count > 0 && count < order.len() {
        order.select_nth_unstable_by(count - 1, by_logit);
    }
    order.truncate(count);
    order.sort_unstable_by(by_logit);
    let top = order.into_iter().map(|id| (id, of(logits[id as usize]))).collect();
    TokenLogprobs { drawn: logits.get(drawn as usize).map_or(f32::NEG_INFINITY, |&l| of(l)), top }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_probabilities_add_up_to_one() {
        let logits: Vec<f32> = (0..33).map(|i| ((i * 7) % 13) as f32 / 3.0).collect();
        let all = logprobs(&logits, 4, 33);
        let sum: f64 = all.top.iter().map(|&(_, p)| f64::from(p).exp()).sum();
        assert!((sum - 1.0).abs() < 1e-5, "{sum}");
        assert!(all.top.windows(2).all(|w| w[0].1 >= w[1].1));
        assert_eq!(all.drawn, all.top.iter().find(|t| t.0 == 4).expect("listed").1);
        assert_eq!(logprobs(&logits, 4, 3).top, all.top[..3]);
        assert!(logprobs(&logits, 4, 0).top.is_empty());
    }
}
