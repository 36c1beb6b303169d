//! From logits to a token.
//!
//! Order: repetition, presence and frequency penalties, logit bias, then (unless greedy) temperature, top-k, top-p,
//! min-p, and a draw from what is left.

use std::collections::HashMap;

use crate::{EngineError, Result};

/// How tokens are drawn.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplerOptions {
    /// Divides the logits; 0 is greedy.
    pub temperature: f32,
    /// Keeps the most probable; 0 keeps all.
    pub top_k: usize,
    /// Keeps the smallest set of this probability; 1 keeps all.
    pub top_p: f32,
    /// Drops what is less probable than this share of the most probable; 0 drops nothing.
    pub min_p: f32,
    /// Divides positive logits of tokens seen before and multiplies negative ones; 1 changes nothing.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens generated before.
    pub presence_penalty: f32,
    /// Subtracted once for each time that a token was generated before.
    pub frequency_penalty: f32,
    /// Added to single logits.
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
}

/// Draws the tokens of one sequence.
#[derive(Clone, Debug)]
pub struct Sampler {
    options: SamplerOptions,
    random: u64,
    /// Tokens of the prompt and generated ones, for the repetition penalty.
    /// The value counts how often a token was generated.
    seen: HashMap<u32, u32>,
    /// Reused from token to token.
    candidates: Vec<(u32, f32)>,
}

impl Sampler {
    /// A sampler for a sequence that starts with `prompt`.
    ///
    /// # Errors
    /// [`EngineError::Option`] naming the option that is out of range.
    pub fn new(options: SamplerOptions, prompt: &[u32]) -> Result<Sampler> {
        options.check()?;
        let seen = prompt.iter().map(|&id| (id, 0)).collect();
        Ok(Sampler { random: options.seed, options, seen, candidates: Vec::new() })
    }

    /// The next token. The logits are overwritten by the penalties.
    pub fn sample(&mut self, logits: &mut [f32]) -> u32 {
        let id = self.pick(logits);
        self.note(id);
        id
    }

    /// As [`Sampler::sample`], without counting the token as generated.
    pub(crate) fn pick(&mut self, logits: &mut [f32]) -> u32 {
        self.penalise(logits);
        if self.options.temperature == 0.0 { argmax(logits) } else { self.draw(logits) }
    }

    /// Whether it always draws the token with the greatest logit.
    pub(crate) fn is_argmax(&self) -> bool {
        let o = &self.options;
        o.temperature == 0.0 && !self.has_penalties() && o.logit_bias.is_empty()
    }

    fn has_penalties(&self) -> bool {
        let o = &self.options;
        o.repetition_penalty != 1.0 || o.presence_penalty != 0.0 || o.frequency_penalty != 0.0
    }

    /// The state that the next draw follows from.
    pub(crate) fn random(&self) -> u64 {
        self.random
    }

    /// Goes back to a state that [`Sampler::random`] gave.
    pub(crate) fn set_random(&mut self, random: u64) {
        self.random = random;
    }

    /// Counts a token as generated. Returns whether it had never been seen.
    pub(crate) fn note(&mut self, id: u32) -> bool {
        let is_new = !self.seen.contains_key(&id);
        *self.seen.entry(id).or_default() += 1;
        is_new
    }

    /// Undoes [`Sampler::note`], given what that returned.
    pub(crate) fn forget(&mut self, id: u32, was_new: bool) {
        if was_new {
            self.seen.remove(&id);
        } else if let Some(count) = self.seen.get_mut(&id) {
            *count = count.saturating_sub(1);
        }
    }

    /// The probabilities with which [`Sampler::sample`] would draw from penalised logits; one token if greedy.
    pub(crate) fn distribution(&mut self, penalised: &[f32], weights: &mut Vec<(u32, f32)>) {
        weights.clear();
        if self.options.temperature == 0.0 || !self.gather(penalised) {
            weights.push((argmax(penalised), 1.0));
            return;
        }
        let total = self.shape_distribution();
        weights.extend(self.candidates.iter().map(|&(id, weight)| (id, weight / total)));
    }

    /// Overwrites logits by the penalties.
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

    /// Makes the tokens with finite logits the candidates; false if there are none.
    fn gather(&mut self, logits: &[f32]) -> bool {
        self.candidates.clear();
        self.candidates.extend((0u32..).zip(logits.iter().copied()).filter(|(_, l)| l.is_finite()));
        !self.candidates.is_empty()
    }

    fn draw(&mut self, logits: &[f32]) -> u32 {
        if !self.gather(logits) {
            return argmax(logits);
        }
        let total = self.shape_distribution();
        let mut left = self.uniform() * total;
        for &(id, p) in &self.candidates {
            left -= p;
            if left < 0.0 {
                return id;
            }
        }
        // Rounding may leave a crumb; the most probable takes it.
        self.candidates[0].0
    }

    /// Turns the candidates' logits into weights, most probable first, drops those that the options exclude, and
    /// returns the sum of the rest.
    fn shape_distribution(&mut self) -> f32 {
        let o = &self.options;
        let kept = &mut self.candidates;
        let by_weight = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        if o.top_k > 0 && o.top_k < kept.len() {
            kept.select_nth_unstable_by(o.top_k - 1, by_weight);
            kept.truncate(o.top_k);
        }
        kept.sort_unstable_by(by_weight);
        let max = kept[0].1;
        kept.iter_mut().for_each(|c| c.1 = ((c.1 - max) / o.temperature).exp());
        let total: f32 = kept.iter().map(|c| c.1).sum();
        if o.top_p < 1.0 {
            let mut sum = 0.0;
            let enough = kept.iter().position(|c| {
                sum += c.1;
                sum >= o.top_p * total
            });
            kept.truncate(enough.map_or(kept.len(), |i| i + 1));
        }
        if o.min_p > 0.0 {
            let below = kept.iter().position(|c| c.1 < o.min_p);
            kept.truncate(below.unwrap_or(kept.len()).max(1));
        }
        kept.iter().map(|c| c.1).sum()
    }

    /// In `[0, 1)`, by splitmix64.
    pub(crate) fn uniform(&mut self) -> f32 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1u64 << 24) as f32
    }
}

/// Index of the largest; the first among equals. NaN never wins.
fn argmax(logits: &[f32]) -> u32 {
    // Side by side, which the compiler makes vectors of; with an index in each comparison it would not.
    let mut greatest = [f32::NEG_INFINITY; 32];
    for chunk in logits.chunks(greatest.len()) {
        for (greatest, &logit) in greatest.iter_mut().zip(chunk) {
            *greatest = if logit > *greatest { logit } else { *greatest };
        }
    }
    let greatest = greatest.into_iter().fold(f32::NEG_INFINITY, f32::max);
    logits.iter().position(|&logit| logit == greatest).unwrap_or(0) as u32
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
