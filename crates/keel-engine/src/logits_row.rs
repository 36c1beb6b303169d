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
        list_first(logits, f32::NEG_INFINITY, count, orders);
        let top = orders.iter().map(|&order| id_of(order)).map(|id| (id, of(logits[id as usize]))).collect();
        TokenLogprobs { drawn: logits.get(drawn as usize).map_or(f32::NEG_INFINITY, |&l| of(l)), top }
    }

    /// The tokens that the options allow, by their logits. The temperature is above 0.
    pub(crate) fn distribution(&mut self, options: &SamplerOptions) -> Distribution<'_> {
        let LogitsRow { values: logits, orders, weights, .. } = self;
        let softmax = Softmax::of(logits, options.temperature);
        let count = if options.top_k == 0 { usize::MAX } else { options.top_k };
        list_first(logits, softmax.bound(EXPONENT_MIN), count, orders);
        let exponent_of = |order: u64| softmax.exponent(logits[id_of(order) as usize]);
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

    /// The token that [`LogitsRow::distribution`] has for this random number in `[0, 1)`. Where top-k does not bound
    /// their number, only as many candidates are sorted as the draw depends on.
    pub(crate) fn draw(&mut self, options: &SamplerOptions, uniform: f32) -> u32 {
        if options.top_k > 0 {
            return self.distribution(options).draw(uniform);
        }
        let LogitsRow { values: logits, orders, .. } = self;
        let softmax = Softmax::of(logits, options.temperature);
        let possible = softmax.sum(logits, options.min_p.ln());
        let weight_of = |order: u64| weight(softmax.exponent(logits[id_of(order) as usize]));
        if options.top_p == 1.0 {
            let target = target(uniform, possible);
            let (token, _) = softmax.walk(logits, orders, target + 1);
            return token;
        }
        let mass = if options.min_p == 0.0 { possible } else { softmax.sum(logits, EXPONENT_MIN) };
        let (_, kept) = softmax.walk(logits, orders, enough(options.top_p, mass).min(possible));
        let mut left = target(uniform, kept);
        let passes = |&&order: &&u64| {
            let weight = weight_of(order);
            let is_drawn = left < weight;
            left = left.saturating_sub(weight);
            is_drawn
        };
        orders.iter().find(passes).map_or(0, |&order| id_of(order))
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

/// The weights of a row of logits at a temperature. The greatest finite logit has exponent 0.
struct Softmax {
    greatest: f32,
    temperature: f32,
}

impl Softmax {
    fn of(logits: &[f32], temperature: f32) -> Softmax {
        Softmax { greatest: greatest_finite(logits), temperature }
    }

    fn exponent(&self, logit: f32) -> f32 {
        (logit - self.greatest) / self.temperature
    }

    /// A logit below which exponents are less than this one. Some above are so, too: it is a little too low.
    fn bound(&self, exponent: f32) -> f32 {
        let span = self.temperature * -exponent;
        self.greatest - span - 1e-5 * (self.greatest.abs() + span)
    }

    /// The sum of the weights of exponents from `least` on.
    fn sum(&self, logits: &[f32], least: f32) -> u64 {
        let least = least.max(EXPONENT_MIN);
        let bound = self.bound(least);
        let weight_of = |&logit: &f32| {
            let exponent = self.exponent(logit);
            if exponent >= least && exponent <= 0.0 { weight(exponent) } else { 0 }
        };
        let chunks = logits.chunks(CHUNK).filter(|chunk| reaches(chunk, bound));
        chunks.map(|chunk| chunk.iter().map(weight_of).sum::<u64>()).sum()
    }

    /// The first token, by probability, up to which the weights add up to `needed`, and that sum; token 0 if they are
    /// fewer. `orders` holds the keys of the tokens up to it or more, the greatest first.
    fn walk(&self, logits: &[f32], orders: &mut Vec<u64>, needed: u64) -> (u32, u64) {
        /// They have nearly all weight in most rows of a language model.
        const FIRST: usize = 256;
        let reach = |orders: &[u64], sum: &mut u64| {
            orders.iter().map(|&order| id_of(order)).find(|&id| {
                *sum += weight(self.exponent(logits[id as usize]));
                *sum >= needed
            })
        };
        let mut sum = 0;
        let least = self.bound(EXPONENT_MIN);
        list_first(logits, least, FIRST, orders);
        if let Some(token) = reach(orders, &mut sum) {
            return (token, sum);
        }
        list(logits, least, orders);
        let mut sorted = 0;
        sum = 0;
        while sorted < orders.len() {
            let rest = &mut orders[sorted..];
            let next = (7 * sorted).max(8 * FIRST).min(rest.len());
            if next < rest.len() {
                rest.select_nth_unstable_by_key(next - 1, |&order| Reverse(order));
            }
            rest[..next].sort_unstable_by_key(|&order| Reverse(order));
            if let Some(token) = reach(&rest[..next], &mut sum) {
                return (token, sum);
            }
            sorted += next;
        }
        (0, sum)
    }
}

/// Logits that are passed over together if none of them counts.
const CHUNK: usize = 64;

/// Whether a logit of the chunk is at least `bound`. It looks at all of them, which the compiler turns into vectors.
fn reaches(chunk: &[f32], bound: f32) -> bool {
    chunk.iter().fold(false, |any, &logit| any | (logit >= bound))
}

fn greatest_finite(logits: &[f32]) -> f32 {
    greatest(logits, |logit| logit <= f32::MAX)
}

/// Lists the keys of the logits from `least` on.
fn list(logits: &[f32], least: f32, orders: &mut Vec<u64>) {
    orders.clear();
    let candidates = (0..).zip(logits).filter(|(_, logit)| is_candidate(**logit, least));
    orders.extend(candidates.map(|(id, &logit)| order(logit, id)));
}

/// Lists the greatest `count` of these keys, the greatest first.
fn list_first(logits: &[f32], least: f32, count: usize, orders: &mut Vec<u64>) {
    orders.clear();
    if count == 0 {
        return;
    }
    let by_rank = |&order: &u64| Reverse(order);
    let (mut bound, room) = (least, count.saturating_mul(2));
    for (first, chunk) in (0..).step_by(CHUNK).zip(logits.chunks(CHUNK)) {
        if !reaches(chunk, bound) {
            continue;
        }
        for (id, &logit) in (first..).zip(chunk) {
            if !is_candidate(logit, bound) {
                continue;
            }
            orders.push(order(logit, id));
            if orders.len() == room {
                let (_, last, _) = orders.select_nth_unstable_by_key(count - 1, by_rank);
                bound = logits[id_of(*last) as usize];
                orders.truncate(count);
            }
        }
    }
    if count < orders.len() {
        orders.select_nth_unstable_by_key(count - 1, by_rank);
        orders.truncate(count);
    }
    orders.sort_unstable_by_key(by_rank);
}

fn is_candidate(logit: f32, least: f32) -> bool {
    logit >= least && logit.is_finite()
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
    use std::collections::BTreeSet;

    use keel_array::random::SplitMix64;

    use super::*;

    /// Drawing sorts a part of the tokens; the distribution has all of them.
    #[test]
    fn a_draw_is_that_of_the_whole_distribution() {
        let mut random = SplitMix64(5);
        let mut uniform = move || (random.bits() >> 40) as f32 / (1u64 << 24) as f32;
        let mut tokens = BTreeSet::new();
        for vocab in [1, 2, 63, 300, 5_000] {
            for width in [0.0, 0.5, 8.0, 300.0] {
                let mut logits: Vec<f32> = (0..vocab).map(|_| width * (uniform() - 0.5)).collect();
                for odd in [f32::NAN, f32::NEG_INFINITY, f32::INFINITY, logits[0]] {
                    logits[(uniform() * vocab as f32) as usize] = odd;
                }
                let mut row = LogitsRow::from(&logits);
                for case in 0..60 {
                    let options = SamplerOptions {
                        temperature: [0.3, 1.0, 2.5][case % 3],
                        top_k: [0, 0, 7, 900][case % 4],
                        top_p: [1.0, 0.9, 0.3, 1e-6, 0.999][case % 5],
                        min_p: [0.0, 0.05, 1.0, 0.0][case / 15],
                        ..SamplerOptions::default()
                    };
                    let uniform = [uniform(), 0.0, 1.0 - f32::EPSILON][case % 7 % 3];
                    let drawn = row.draw(&options, uniform);
                    assert_eq!(
                        drawn,
                        row.distribution(&options).draw(uniform),
                        "{vocab}, {width}, {options:?}"
                    );
                    tokens.insert(drawn);
                }
            }
        }
        assert!(tokens.len() > 150, "{} different tokens", tokens.len());
        assert_eq!(
            LogitsRow::from([f32::NAN; 9])
                .draw(&SamplerOptions { temperature: 1.0, ..Default::default() }, 0.5),
            0
        );
    }

    /// The greatest keys, as sorting all of them gives them.
    #[test]
    fn the_first_tokens_are_those_of_the_whole_order() {
        let mut random = SplitMix64(9);
        let mut logits: Vec<f32> = (0..1_000).map(|_| (random.bits() >> 58) as f32).collect();
        (logits[3], logits[640], logits[999]) = (f32::NAN, f32::INFINITY, f32::NEG_INFINITY);
        let (mut all, mut first) = (Vec::new(), Vec::new());
        for least in [f32::NEG_INFINITY, 20.0, 99.0] {
            list(&logits, least, &mut all);
            all.sort_unstable_by_key(|&order| Reverse(order));
            for count in [0, 1, 2, 31, 499, 500, 997, 998, 5_000, usize::MAX] {
                list_first(&logits, least, count, &mut first);
                assert_eq!(first, all[..count.min(all.len())], "{count} from {least} on");
            }
        }
    }

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
