//! From logits to a token.
//!
//! Order: repetition, presence and frequency penalties, logit bias, then (unless greedy) temperature, top-k, top-p,
//! min-p and a draw. [`keel_array::sampling`] defines the draw to the bit. Without penalties and bias, the device that
//! has the logits draws the same token.

use std::cmp::Reverse;
use std::collections::HashMap;

use keel_array::sampling::{Draw, EXPONENT_MIN, enough, id_of, order, target, weight};

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
    random: u64,
    /// Tokens of the prompt and generated ones. The value counts how often a token was generated.
    seen: HashMap<u32, u32>,
    /// Tokens that may be drawn, with their weights, most probable first. This vector and `orders` are reused for each
    /// token.
    candidates: Vec<(u32, u64)>,
    orders: Vec<u64>,
}

impl Sampler {
    /// A sampler for a sequence that starts with `prompt`.
    ///
    /// # Errors
    /// [`EngineError::Option`] naming the option that is out of range.
    pub fn new(options: SamplerOptions, prompt: &[u32]) -> Result<Sampler> {
        options.check()?;
        let seen = prompt.iter().map(|&id| (id, 0)).collect();
        let (candidates, orders) = (Vec::new(), Vec::new());
        Ok(Sampler { random: options.seed, options, seen, candidates, orders })
    }

    /// Draws the next token and counts it as generated. Penalties and bias overwrite the logits.
    pub fn sample(&mut self, logits: &mut [f32]) -> u32 {
        let id = self.pick(logits);
        self.note(id);
        id
    }

    /// As [`Sampler::sample`], but does not count the token as generated.
    pub(crate) fn pick(&mut self, logits: &mut [f32]) -> u32 {
        self.penalise(logits);
        if self.options.temperature == 0.0 { argmax(logits) } else { self.draw(logits) }
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
        self.random
    }

    /// Goes back to a state that [`Sampler::random`] returned.
    pub(crate) fn set_random(&mut self, random: u64) {
        self.random = random;
    }

    /// Counts a token as generated. Returns whether it is new: neither in the prompt nor generated before.
    pub(crate) fn note(&mut self, id: u32) -> bool {
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

    /// Fills `weights` with the probabilities with which [`Sampler::sample`] draws from penalised logits. Greedy: one
    /// token.
    pub(crate) fn distribution(&mut self, penalised: &[f32], weights: &mut Vec<(u32, f32)>) {
        weights.clear();
        let total = if self.options.temperature == 0.0 { 0 } else { self.shape_distribution(penalised) };
        if total == 0 {
            weights.push((argmax(penalised), 1.0));
            return;
        }
        let share = |weight: u64| (weight as f64 / total as f64) as f32;
        weights.extend(self.candidates.iter().map(|&(id, weight)| (id, share(weight))));
    }

    /// Applies the penalties and the bias to the logits.
    pub(crate) fn penalise(&self, logits: &mut [f32]) {
        let o = &self.options;
        if self.has_penalties() {
            for (&id, &generated) in &self.seen {
                let Some(logit) = logits.get_mut(id as usize) else { continue };
                *logit =
                    if *logit > 0.0 { *logit / o.repetition_penalty } else { *logit * o.repetition_penalty };
                if generated > 0 {
                    *logit -= o.presence_penalty + o.frequency_penalty * generated as f32;
                }
            }
        }
        for &(id, bias) in &o.logit_bias {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit += bias;
            }
        }
    }

    fn draw(&mut self, logits: &[f32]) -> u32 {
        let uniform = self.uniform();
        let mut left = target(uniform, self.shape_distribution(logits));
        for &(id, weight) in &self.candidates {
            if left < weight {
                return id;
            }
            left -= weight;
        }
        // No logit is finite.
        0
    }

    /// Fills `candidates` with the tokens that the options allow. Returns the sum of their weights; 0 if there are
    /// none.
    fn shape_distribution(&mut self, logits: &[f32]) -> u64 {
        let o = &self.options;
        let greatest = greatest(logits, f32::MAX);
        let exponent = |logit: f32| (logit - greatest) / o.temperature;
        // The range is a little too wide, so some candidates may have weight 0. They come after all others.
        let span = o.temperature * -EXPONENT_MIN;
        let weighted = greatest - span - 1e-5 * (greatest.abs() + span)..=greatest;
        let orders = &mut self.orders;
        orders.clear();
        let is_weighted = |(_, logit): &(u32, &f32)| weighted.contains(logit) && logit.is_finite();
        orders.extend((0..).zip(logits).filter(is_weighted).map(|(id, &logit)| order(logit, id)));
        if (1..orders.len()).contains(&o.top_k) {
            orders.select_nth_unstable_by_key(o.top_k - 1, |&order| Reverse(order));
            orders.truncate(o.top_k);
        }
        orders.sort_unstable_by_key(|&order| Reverse(order));
        let exponent_of = |id: u32| exponent(logits[id as usize]);
        let kept = &mut self.candidates;
        kept.clear();
        kept.extend(orders.iter().map(|&order| id_of(order)).map(|id| (id, weight(exponent_of(id)))));
        if o.top_p < 1.0 {
            let enough = enough(o.top_p, kept.iter().map(|c| c.1).sum());
            let mut sum = 0;
            let last = kept.iter().position(|c| {
                sum += c.1;
                sum >= enough
            });
            kept.truncate(last.map_or(kept.len(), |last| last + 1));
        }
        let least = o.min_p.ln();
        kept.truncate(kept.partition_point(|&(id, _)| exponent_of(id) >= least));
        kept.iter().map(|c| c.1).sum()
    }

    /// The next random number in `[0, 1)`, by splitmix64.
    pub(crate) fn uniform(&mut self) -> f32 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1u64 << 24) as f32
    }
}

/// Index of the greatest logit; the first among equals. NaN never wins.
fn argmax(logits: &[f32]) -> u32 {
    let greatest = greatest(logits, f32::INFINITY);
    logits.iter().position(|&logit| logit == greatest).unwrap_or(0) as u32
}

/// The greatest logit that is at most `most`.
fn greatest(logits: &[f32], most: f32) -> f32 {
    // 32 independent maxima, which the compiler vectorises. With an index in each comparison it would not.
    let mut greatest = [f32::NEG_INFINITY; 32];
    for chunk in logits.chunks(greatest.len()) {
        for (greatest, &logit) in greatest.iter_mut().zip(chunk) {
            *greatest = if logit > *greatest && logit <= most { logit } else { *greatest };
        }
    }
    greatest.into_iter().fold(f32::NEG_INFINITY, f32::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draws(options: SamplerOptions, logits: &[f32], count: usize) -> Vec<usize> {
        let mut sampler = Sampler::new(options, &[]).expect("options are in range");
        let mut counts = vec![0; logits.len()];
        for _ in 0..count {
            counts[sampler.sample(&mut logits.to_vec()) as usize] += 1;
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
            Sampler::new(options, prompt).expect("in range").sample(&mut [1.0, 0.9, -5.0])
        };
        assert_eq!(greedy(SamplerOptions::default(), &[0]), 0);
        assert_eq!(greedy(SamplerOptions { repetition_penalty: 1.5, ..Default::default() }, &[0]), 1);
        assert_eq!(greedy(SamplerOptions { logit_bias: vec![(2, 10.0)], ..Default::default() }, &[]), 2);
        let mut sampler = Sampler::new(SamplerOptions { presence_penalty: 0.2, ..Default::default() }, &[0])
            .expect("in range");
        assert_eq!(sampler.sample(&mut [1.0, 0.9, -5.0]), 0, "the prompt does not count for presence");
        assert_eq!(sampler.sample(&mut [1.0, 0.9, -5.0]), 1);
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
        assert_eq!(sampler.sample(&mut [f32::NAN, f32::NEG_INFINITY, 1.0]), 2);
        assert_eq!(sampler.sample(&mut [f32::NAN, f32::NAN]), 0);
        assert!(Sampler::new(SamplerOptions { top_p: 0.0, ..Default::default() }, &[]).is_err());
    }
}
