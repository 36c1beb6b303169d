//! One running sequence of a batch.

use std::time::Instant;

use keel_array::AttentionSpec;
use keel_cache::SequenceCache;

use super::policy::PromptRest;
use super::request::{BatchRequest, Constraint, RequestId, SequenceStatus, TokenLogprobs};
use crate::{EngineError, FinishReason, PREFILL_GRID, Result, Sampler};

/// A request that has memory.
pub(super) struct Running {
    pub id: RequestId,
    pub cache: SequenceCache,
    /// Prompt and generated tokens; the cache holds all but those that are still to be run.
    pub tokens: Vec<u32>,
    pub prompt_len: usize,
    pub cached_tokens: usize,
    /// Positions on the grid where the prompt's state is saved, ascending.
    pub stops: Vec<usize>,
    /// The state at the last grid point of the answer: position and checkpoint.
    pub rolling: Option<(usize, u32)>,
    pub deadline: Option<Instant>,
    max_tokens: usize,
    sampler: Sampler,
    end_tokens: Vec<u32>,
    top_logprobs: Option<usize>,
    constraint: Option<Box<dyn Constraint>>,
}

/// What a draw led to.
pub(super) struct Drawn {
    /// The token, unless it is one that ends the text.
    pub token: Option<(u32, Option<TokenLogprobs>)>,
    pub finish: Option<FinishReason>,
}

/// Pages of a request at full length. The last token is drawn and not run.
pub(super) fn pages_at_full_length(prompt_len: usize, max_tokens: usize) -> usize {
    (prompt_len + max_tokens.max(1) - 1).div_ceil(AttentionSpec::PAGE)
}

impl Running {
    /// A sequence that holds the first tokens of the prompt and is to save its state at `stops`.
    pub fn new(request: BatchRequest, cache: SequenceCache, stops: Vec<usize>, sampler: Sampler) -> Running {
        Running {
            id: request.id,
            cached_tokens: cache.len(),
            cache,
            prompt_len: request.prompt.len(),
            tokens: request.prompt,
            stops,
            rolling: None,
            deadline: request.deadline,
            max_tokens: request.max_tokens,
            sampler,
            end_tokens: request.end_tokens,
            top_logprobs: request.top_logprobs,
            constraint: request.constraint,
        }
    }

    /// Whether its prompt has been run.
    pub fn is_decoding(&self) -> bool {
        self.cache.len() >= self.prompt_len
    }

    /// What is left of its prompt.
    pub fn prompt_rest(&self) -> PromptRest {
        let at = self.cache.len();
        let end = self.stops.iter().copied().find(|&stop| stop > at).unwrap_or(self.prompt_len);
        PromptRest { tokens: self.prompt_len - at, until_stop: end - at }
    }

    /// Whether the state at the current position is worth saving.
    pub fn is_at_stop(&self) -> bool {
        self.stops.contains(&self.cache.len())
    }

    /// Whether an answer has come to a grid point behind the prompt.
    pub fn is_at_grid_of_answer(&self) -> bool {
        let at = self.cache.len();
        at > self.prompt_len && at.is_multiple_of(PREFILL_GRID)
    }

    /// Pages that it was promised and does not have yet.
    pub fn pages_missing(&self) -> usize {
        let all = pages_at_full_length(self.prompt_len, self.max_tokens);
        all.saturating_sub(self.cache.pages().len())
    }

    /// Draws the next token from the logits, which are overwritten.
    pub fn draw(&mut self, logits: &mut [f32]) -> Result<Drawn> {
        let raw = self.top_logprobs.map(|_| logits.to_vec());
        if let Some(constraint) = &mut self.constraint {
            constraint.mask(logits).map_err(EngineError::Constraint)?;
        }
        let id = self.sampler.sample(logits);
        if self.end_tokens.contains(&id) {
            return Ok(Drawn { token: None, finish: Some(FinishReason::Stop) });
        }
        if let Some(constraint) = &mut self.constraint {
            constraint.accept(id).map_err(EngineError::Constraint)?;
        }
        self.tokens.push(id);
        let is_complete = self.constraint.as_ref().is_some_and(|constraint| constraint.is_complete());
        let finish = if is_complete {
            Some(FinishReason::Stop)
        } else {
            (self.tokens.len() - self.prompt_len >= self.max_tokens).then_some(FinishReason::Length)
        };
        let logprobs = raw.zip(self.top_logprobs).map(|(raw, count)| logprobs(&raw, id, count));
        Ok(Drawn { token: Some((id, logprobs)), finish })
    }

    pub fn status(&self) -> SequenceStatus {
        SequenceStatus {
            id: self.id,
            prompt_tokens: self.prompt_len,
            cached_tokens: self.cached_tokens,
            prefilled_tokens: self.cache.len().min(self.prompt_len),
            generated_tokens: self.tokens.len() - self.prompt_len,
            pages: self.cache.pages().len(),
            pages_promised: pages_at_full_length(self.prompt_len, self.max_tokens),
            slot: self.cache.slot(),
        }
    }
}

/// Log softmax at the token drawn and at the `count` most probable, in f64 sums.
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

    #[test]
    fn the_last_token_needs_no_room() {
        assert_eq!(pages_at_full_length(200, 57), 1);
        assert_eq!(pages_at_full_length(200, 58), 2);
        assert_eq!(pages_at_full_length(256, 0), 1);
    }
}
