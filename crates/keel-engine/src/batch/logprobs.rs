//! Log probabilities of drawn tokens.

/// Log probabilities at one position, before penalties, temperature and constraints.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// Log probability of the token drawn.
    pub drawn: f32,
    /// The most probable tokens, most probable first.
    pub top: Vec<(u32, f32)>,
}

impl TokenLogprobs {
    /// Log softmax at the drawn token and at the `count` most probable ones, with sums in f64.
    pub(crate) fn of(logits: &[f32], drawn: u32, count: usize) -> TokenLogprobs {
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_probabilities_add_up_to_one() {
        let logits: Vec<f32> = (0..33).map(|i| ((i * 7) % 13) as f32 / 3.0).collect();
        let all = TokenLogprobs::of(&logits, 4, 33);
        let sum: f64 = all.top.iter().map(|&(_, p)| f64::from(p).exp()).sum();
        assert!((sum - 1.0).abs() < 1e-5, "{sum}");
        assert!(all.top.windows(2).all(|w| w[0].1 >= w[1].1));
        assert_eq!(all.drawn, all.top.iter().find(|t| t.0 == 4).expect("listed").1);
        assert_eq!(TokenLogprobs::of(&logits, 4, 3).top, all.top[..3]);
        assert!(TokenLogprobs::of(&logits, 4, 0).top.is_empty());
    }
}
