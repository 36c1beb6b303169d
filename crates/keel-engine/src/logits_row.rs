//! One row of logits on the host, and the memory in which a token is drawn from it.

use std::cmp::Reverse;

use keel_array::sampling::{EXPONENT_MIN, enough, greatest, id_of, order, target, weight};

use crate::SamplerOptions;

/// Log probabilities at one position, before penalties, temperature and constraints.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// Log probability of the token drawn.
    pub drawn: f32,
    /// The most probable tokens, most probable first.
    pub top: Vec<(u32, f32)>,
}

/// One row of logits on the host, and the memory in which a token is drawn from it. All sequences of an engine share
/// one, because tokens are drawn one after the other.
///
/// # Memory
/// At most [`LogitsRow::TOKEN_BYTES`] for each token of the vocabulary. [`LogitsRow::for_vocab`] allocates it all;
/// others grow to the longest row.
#[derive(Clone, Debug, Default)]
pub struct LogitsRow {
    /// The logits. Drawing may overwrite them.
    pub values: Vec<f32>,
    /// The logits as they were, for log probabilities.
    raw: Vec<f32>,
    /// Sort keys of the tokens that may be drawn, most probable first.
    orders: Vec<u64>,
    /// The weight of each of them.
    weights: Vec<u64>,
}

impl<T: AsRef<[f32]>> From<T> for LogitsRow {
    fn from(logits: T) -> LogitsRow {
        LogitsRow { values: logits.as_ref().to_vec(), ..LogitsRow::default() }
    }
}

impl LogitsRow {
    /// The most bytes for each token of the vocabulary.
    pub const TOKEN_BYTES: usize = 2 * size_of::<f32>() + 2 * size_of::<u64>();

    /// An empty row that can hold the logits of `vocab` tokens. Drawing from them allocates nothing.
    pub fn for_vocab(vocab: usize) -> LogitsRow {
        LogitsRow {
            values: Vec::with_capacity(vocab),
            raw: Vec::with_capacity(vocab),
            orders: Vec::with_capacity(vocab),
            weights: Vec::with_capacity(vocab),
        }
    }

    /// Keeps the logits as they are now for [`LogitsRow::logprobs`].
    pub(crate) fn keep_raw(&mut self) {
        self.raw.clone_from(&self.values);
    }

    /// Log softmax of the logits that were kept, at the drawn token and at the `count` most probable ones. Sums are in
    /// f64.
    pub(crate) fn logprobs(&mut self, drawn: u32, count: usize) -> TokenLogprobs {
        let LogitsRow { raw: logits, orders, .. } = self;
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|&l| f64::from(l - max).exp()).sum();
        let of = |logit: f32| (f64::from(logit - max) - sum.ln()) as f32;
        orders.clear();
        orders.extend((0..).zip(&*logits).map(|(id, &logit)| order(logit, id)));
        keep_first(orders, count);
        let top = orders.iter().map(|&order| id_of(order)).map(|id| (id, of(logits[id as usize]))).collect();
        TokenLogprobs { drawn: logits.get(drawn as usize).map_or(f32::NEG_INFINITY, |&l| of(l)), top }
    }

    /// The tokens that the options allow, by their logits. The temperature is above 0.
    pub(crate) fn distribution(&mut self, options: &SamplerOptions) -> Distribution<'_> {
        let LogitsRow { values: logits, orders, weights, .. } = self;
        let greatest = greatest(logits, |logit| logit <= f32::MAX);
        let exponent = |logit: f32| (logit - greatest) / options.temperature;
        // The range is a little too wide, so some candidates may have weight 0. They come after all others.
        let span = options.temperature * -EXPONENT_MIN;
        let weighted = greatest - span - 1e-5 * (greatest.abs() + span)..=greatest;
        let is_weighted = |(_, logit): &(u32, &f32)| weighted.contains(logit) && logit.is_finite();
        orders.clear();
        orders.extend((0..).zip(&*logits).filter(is_weighted).map(|(id, &logit)| order(logit, id)));
        keep_first(orders, if options.top_k == 0 { usize::MAX } else { options.top_k });
        let exponent_of = |order: u64| exponent(logits[id_of(order) as usize]);
        weights.clear();
        weights.extend(orders.iter().map(|&order| weight(exponent_of(order))));
        if options.top_p < 1.0 {
            let enough = enough(options.top_p, weights.iter().sum());
            let mut sum = 0;
            let last = weights.iter().position(|weight| {
                sum += weight;
                sum >= enough
            });
            orders.truncate(last.map_or(orders.len(), |last| last + 1));
        }
        let least = options.min_p.ln();
        orders.truncate(orders.partition_point(|&order| exponent_of(order) >= least));
        weights.truncate(orders.len());
        Distribution { total: weights.iter().sum(), orders, weights }
    }

    /// The distribution of one certain token.
    pub(crate) fn certain(&mut self, token: u32) -> Distribution<'_> {
        let LogitsRow { orders, weights, .. } = self;
        orders.clear();
        orders.push(order(0.0, token));
        weights.clear();
        weights.push(1);
        Distribution { orders, weights, total: 1 }
    }
}

/// Sorts the keys, the greatest first, and keeps the first `count`.
fn keep_first(orders: &mut Vec<u64>, count: usize) {
    if (1..orders.len()).contains(&count) {
        orders.select_nth_unstable_by_key(count - 1, |&order| Reverse(order));
    }
    orders.truncate(count);
    orders.sort_unstable_by_key(|&order| Reverse(order));
}

/// Tokens with their weights, most probable first. It lies in the memory of a [`LogitsRow`].
pub(crate) struct Distribution<'a> {
    orders: &'a [u64],
    weights: &'a mut [u64],
    /// The sum of the weights; 0 if there are no tokens.
    total: u64,
}

impl<'a> Distribution<'a> {
    /// The same among the first `count` tokens.
    pub fn first(self, count: usize) -> Distribution<'a> {
        let count = count.min(self.orders.len());
        let weights = &mut self.weights[..count];
        Distribution { orders: &self.orders[..count], total: weights.iter().sum(), weights }
    }

    /// The tokens with their probabilities.
    pub fn tokens(&self) -> impl Iterator<Item = (u32, f32)> {
        let share = |weight: u64| (weight as f64 / self.total as f64) as f32;
        self.orders.iter().zip(&*self.weights).map(move |(&order, &weight)| (id_of(order), share(weight)))
    }

    /// The token of this random number in `[0, 1)`; 0 if there are none.
    pub fn draw(&self, uniform: f32) -> u32 {
        let mut left = target(uniform, self.total);
        for (&order, &weight) in self.orders.iter().zip(&*self.weights) {
            if left < weight {
                return id_of(order);
            }
            left -= weight;
        }
        0
    }

    /// Rejection sampling: keeps `draft`, which was drawn from `q`, or draws another token. The result has this
    /// distribution, `p`. With probability `min(1, p(draft) / q(draft))` the draft stays; otherwise the token is drawn
    /// from `max(p - q, 0)`, normalised. `q` holds tokens with their probabilities, by token.
    pub fn judge(mut self, q: &[(u32, f32)], draft: u32, [keep, other]: [f32; 2]) -> u32 {
        let proposed = |token| q.binary_search_by_key(&token, |&(id, _)| id).map_or(0.0, |i| q[i].1);
        let allowed = self.tokens().find(|&(id, _)| id == draft).map_or(0.0, |(_, probability)| probability);
        if keep * proposed(draft) < allowed {
            return draft;
        }
        let total = self.total as f64;
        for (&order, weight) in self.orders.iter().zip(&mut *self.weights) {
            *weight = weight.saturating_sub((f64::from(proposed(id_of(order))) * total) as u64);
        }
        self.total = self.weights.iter().sum();
        // If p and q are equal up to rounding, nothing is left, and the draft is a draw from p.
        if self.total == 0 { draft } else { self.draw(other) }
    }
}

/// Index of the greatest logit; the first among equals. NaN never wins.
pub(crate) fn argmax(logits: &[f32]) -> u32 {
    let greatest = greatest(logits, |_| true);
    logits.iter().position(|&logit| logit == greatest).unwrap_or(0) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_probabilities_add_up_to_one() {
        let logits: Vec<f32> = (0..33).map(|i| ((i * 7) % 13) as f32 / 3.0).collect();
        let mut row = LogitsRow::from(logits);
        row.keep_raw();
        let all = row.logprobs(4, 33);
        let sum: f64 = all.top.iter().map(|&(_, p)| f64::from(p).exp()).sum();
        assert!((sum - 1.0).abs() < 1e-5, "{sum}");
        assert!(all.top.windows(2).all(|w| w[0].1 >= w[1].1));
        assert_eq!(all.drawn, all.top.iter().find(|t| t.0 == 4).expect("listed").1);
        assert_eq!(row.logprobs(4, 3).top, all.top[..3]);
        assert!(row.logprobs(4, 0).top.is_empty());
    }
}
