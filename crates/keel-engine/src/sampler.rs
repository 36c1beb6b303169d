//! From logits to a token.
//!
//! Order: repetition, presence and frequency penalties, logit bias, then (unless greedy) temperature, top-k, top-p,
//! min-p and a draw. [`keel_array::sampling`] defines the draw to the bit. Without penalties and bias, the device that
//! has the logits draws the same token.

use std::collections::HashMap;

use keel_array::random::SplitMix64;
use keel_array::sampling::Draw;

use crate::logits_row::{Distribution, LogitsRow, argmax};
use crate::{EngineError, Result};

/// How tokens are drawn.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplerOptions {
    /// Divides the logits; 0 takes the greatest logit.
    pub temperature: f32,
    /// How many of the most probable tokens to keep; 0 keeps all.
    pub top_k: usize,
    /// Keeps the smallest set of tokens with this probability; 1 keeps all.
    pub top_p: f32,
    /// Drops tokens less probable than this share of the most probable token; 0 drops nothing.
    pub min_p: f32,
    /// Divides positive logits of tokens seen before, and multiplies negative ones; 1 changes nothing.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens generated before.
    pub presence_penalty: f32,
    /// Subtracted once for each earlier occurrence of the token in the generated text.
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// The same seed draws the same tokens.
    pub seed: u64,
}

impl Default for SamplerOptions {
    fn default() -> SamplerOptions {
        SamplerOptions {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
        }
    }
}

impl SamplerOptions {
    fn check(&self) -> Result<()> {
        let within = |name: &str, value: f32, low: f32, high: f32| {
            if (low..=high).contains(&value) {
                return Ok(());
            }
            Err(EngineError::Option(format!("{name} is {value}, expected {low:?} to {high:?}")))
        };
        within("temperature", self.temperature, 0.0, 100.0)?;
        within("top-p", self.top_p, f32::MIN_POSITIVE, 1.0)?;
        within("min-p", self.min_p, 0.0, 1.0)?;
        within("repetition penalty", self.repetition_penalty, 0.01, 100.0)?;
        within("presence penalty", self.presence_penalty, -100.0, 100.0)?;
        within("frequency penalty", self.frequency_penalty, -100.0, 100.0)?;
        self.logit_bias.iter().try_for_each(|&(_, bias)| within("logit bias", bias, -1000.0, 1000.0))
    }

    /// Checks the options against a model's number of tokens.
    ///
    /// # Errors
    /// [`EngineError::Option`] if a logit bias is for a token that the model does not have.
    pub fn check_tokens(&self, vocab: usize) -> Result<()> {
        match self.logit_bias.iter().find(|(id, _)| *id as usize >= vocab) {
            None => Ok(()),
            Some((id, _)) => Err(EngineError::Option(format!(
                "a logit bias is for token {id}, but the model has {vocab} tokens, from 0"
            ))),
        }
    }
}

/// Draws the tokens of one sequence.
#[derive(Clone, Debug)]
pub struct Sampler {
    options: SamplerOptions,
    random: SplitMix64,
    /// Tokens of the prompt and generated ones. The value counts how often a token was generated. Empty without
    /// penalties.
    seen: HashMap<u32, u32>,
}

impl Sampler {
    /// A sampler for a sequence that starts with `prompt`.
    ///
    /// # Memory
    /// An entry for each token of the prompt and of the answer if there are penalties. The memory for a draw is that of
    /// the [`LogitsRow`].
    ///
    /// # Errors
    /// [`EngineError::Option`] naming the option that is out of range.
    pub fn new(options: SamplerOptions, prompt: &[u32]) -> Result<Sampler> {
        options.check()?;
        let mut sampler = Sampler { random: SplitMix64(options.seed), options, seen: HashMap::new() };
        if sampler.has_penalties() {
            sampler.seen.extend(prompt.iter().map(|&id| (id, 0)));
        }
        Ok(sampler)
    }

    /// Draws the next token and counts it as generated. Penalties and bias overwrite the logits.
    pub fn sample(&mut self, row: &mut LogitsRow) -> u32 {
        let id = self.pick(row);
        self.note(id);
        id
    }

    /// As [`Sampler::sample`], but does not count the token as generated.
    pub(crate) fn pick(&mut self, row: &mut LogitsRow) -> u32 {
        self.penalise(&mut row.values);
        if self.options.temperature == 0.0 {
            return argmax(&row.values);
        }
        let uniform = self.uniform();
        row.draw(&self.options, uniform)
    }

    /// How the device can draw the next token; `None` if penalties or bias change the logits. This uses up the draw's
    /// random number, so the next draw follows from the next state.
    pub(crate) fn draw_ahead(&mut self) -> Option<Draw> {
        if self.changes_logits() {
            return None;
        }
        let SamplerOptions { temperature, top_k, top_p, min_p, .. } = self.options;
        Some(match temperature {
            0.0 => Draw::GREATEST,
            _ => Draw { temperature, top_k, top_p, min_p, uniform: self.uniform() },
        })
    }

    /// Whether the device can draw every token.
    pub(crate) fn draws_ahead(&self) -> bool {
        !self.changes_logits()
    }

    fn changes_logits(&self) -> bool {
        self.has_penalties() || !self.options.logit_bias.is_empty()
    }

    fn has_penalties(&self) -> bool {
        let o = &self.options;
        o.repetition_penalty != 1.0 || o.presence_penalty != 0.0 || o.frequency_penalty != 0.0
    }

    /// The random state, from which the next draw follows.
    pub(crate) fn random(&self) -> u64 {
        self.random.0
    }

    /// Goes back to a state that [`Sampler::random`] returned.
    pub(crate) fn set_random(&mut self, random: u64) {
        self.random = SplitMix64(random);
    }

    /// Counts a token as generated, if there are penalties. Returns whether it is new: neither in the prompt nor
    /// generated before.
    pub(crate) fn note(&mut self, id: u32) -> bool {
        if !self.has_penalties() {
            return false;
        }
        let is_new = !self.seen.contains_key(&id);
        *self.seen.entry(id).or_default() += 1;
        is_new
    }

    /// Undoes [`Sampler::note`]. `was_new` is the value that it returned.
    pub(crate) fn forget(&mut self, id: u32, was_new: bool) {
        if was_new {
            self.seen.remove(&id);
        } else if let Some(count) = self.seen.get_mut(&id) {
            *count = count.saturating_sub(1);
        }
    }

    /// The distribution from which [`Sampler::sample`] draws, of penalised logits. Greedy: one token.
    pub(crate) fn distribution<'a>(&self, penalised: &'a mut LogitsRow) -> Distribution<'a> {
        let is_greedy = self.options.temperature == 0.0;
        if is_greedy || !penalised.values.iter().any(|logit| logit.is_finite()) {
            return penalised.certain(argmax(&penalised.values));
        }
        penalised.distribution(&self.options)
    }

    /// Applies the penalties and the bias to the logits.
    pub(crate) fn penalise(&self, logits: &mut [f32]) {
        let o = &self.options;
        for (&id, &generated) in &self.seen {
            let Some(logit) = logits.get_mut(id as usize) else { continue };
            *logit = if *logit > 0.0 { *logit / o.repetition_penalty } else { *logit * o.repetition_penalty };
            if generated > 0 {
                *logit -= o.presence_penalty + o.frequency_penalty * generated as f32;
            }
        }
        for &(id, bias) in &o.logit_bias {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit += bias;
            }
        }
    }

    /// The next random number in `[0, 1)`.
    pub(crate) fn uniform(&mut self) -> f32 {
        (self.random.bits() >> 40) as f32 / (1u64 << 24) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draws(options: SamplerOptions, logits: &[f32], count: usize) -> Vec<usize> {
        let mut sampler = Sampler::new(options, &[]).expect("options are in range");
        let mut counts = vec![0; logits.len()];
        for _ in 0..count {
            counts[sampler.sample(&mut LogitsRow::from(logits)) as usize] += 1;
        }
        counts
    }

    #[test]
    fn frequencies_follow_the_softmax() {
        let logits = [0.0f32, 1.0, 2.0, -1.0];
        let options = SamplerOptions { temperature: 0.7, seed: 5, ..Default::default() };
        let counts = draws(options, &logits, 40_000);
        let weights = logits.map(|l| (l / 0.7).exp());
        let total: f32 = weights.iter().sum();
        let chi: f32 = weights
            .iter()
            .zip(&counts)
            .map(|(w, &n)| {
                let expected = 40_000.0 * w / total;
                (n as f32 - expected).powi(2) / expected
            })
            .sum();
        assert!(chi < 16.27, "chi-square of 3 degrees of freedom is {chi}, above the 0.1% bound");
    }

    #[test]
    fn filters_keep_what_they_promise() {
        let logits = [3.0f32, 2.0, 1.0, 0.0];
        let base = SamplerOptions { temperature: 1.0, ..Default::default() };
        let kept = |options| draws(options, &logits, 4000).iter().filter(|&&n| n > 0).count();
        assert_eq!(kept(SamplerOptions { top_k: 2, ..base.clone() }), 2);
        // Probabilities are 0.644, 0.237, 0.087, 0.032.
        assert_eq!(kept(SamplerOptions { top_p: 0.8, ..base.clone() }), 2);
        assert_eq!(kept(SamplerOptions { min_p: 0.1, ..base.clone() }), 3);
        assert_eq!(kept(base), 4);
    }

    #[test]
    fn penalties_and_bias_change_the_greedy_choice() {
        let greedy = |options, prompt: &[u32]| {
            Sampler::new(options, prompt).expect("in range").sample(&mut LogitsRow::from(&[1.0, 0.9, -5.0]))
        };
        assert_eq!(greedy(SamplerOptions::default(), &[0]), 0);
        assert_eq!(greedy(SamplerOptions { repetition_penalty: 1.5, ..Default::default() }, &[0]), 1);
        assert_eq!(greedy(SamplerOptions { logit_bias: vec![(2, 10.0)], ..Default::default() }, &[]), 2);
        let mut sampler = Sampler::new(SamplerOptions { presence_penalty: 0.2, ..Default::default() }, &[0])
            .expect("in range");
        assert_eq!(
            sampler.sample(&mut LogitsRow::from(&[1.0, 0.9, -5.0])),
            0,
            "the prompt does not count for presence"
        );
        assert_eq!(sampler.sample(&mut LogitsRow::from(&[1.0, 0.9, -5.0])), 1);
    }

    #[test]
    fn the_same_seed_draws_the_same() {
        let options = |seed| SamplerOptions { temperature: 1.0, seed, ..Default::default() };
        let logits = [0.5f32; 64];
        assert_eq!(draws(options(3), &logits, 100), draws(options(3), &logits, 100));
        assert_ne!(draws(options(3), &logits, 100), draws(options(4), &logits, 100));
    }

    #[test]
    fn odd_logits_do_not_break_it() {
        let options = SamplerOptions { temperature: 1.0, top_p: 0.9, ..Default::default() };
        let mut sampler = Sampler::new(options, &[]).expect("in range");
        assert_eq!(sampler.sample(&mut LogitsRow::from(&[f32::NAN, f32::NEG_INFINITY, 1.0])), 2);
        assert_eq!(sampler.sample(&mut LogitsRow::from(&[f32::NAN, f32::NAN])), 0);
        assert!(Sampler::new(SamplerOptions { top_p: 0.0, ..Default::default() }, &[]).is_err());
    }
}
