//! Draws a token from a row of logits: sorts all candidates, then applies one limit after the other.

use keel_array::sampling::{Draw, enough, target, weight};

/// The token of a row.
pub fn sample(logits: &[f32], draw: &Draw) -> u32 {
    let is_candidate = |logit: f32| if draw.temperature == 0.0 { !logit.is_nan() } else { logit.is_finite() };
    let mut candidates: Vec<(f32, u32)> =
        logits.iter().copied().zip(0..).filter(|&(logit, _)| is_candidate(logit)).collect();
    // The sort is stable, so the lower id comes first among equals.
    candidates.sort_by(|a, b| b.0.partial_cmp(&a.0).expect("no candidate is NaN"));
    let Some(&(max, first)) = candidates.first() else { return 0 };
    if draw.temperature == 0.0 {
        return first;
    }
    let exponent = |logit: f32| (logit - max) / draw.temperature;
    let weights: Vec<u64> = candidates.iter().map(|&(logit, _)| weight(exponent(logit))).collect();
    let first_k = if draw.top_k == 0 { weights.len() } else { draw.top_k.min(weights.len()) };
    let mass: u64 = weights[..first_k].iter().sum();
    let through = |n: usize| weights[..n].iter().sum::<u64>();
    let mut kept = mass;
    if draw.top_p < 1.0 {
        let n = (1..=weights.len()).find(|&n| through(n) >= enough(draw.top_p, mass));
        kept = through(n.expect("all of them have the share"));
    }
    let probable = candidates.iter().take_while(|&&(logit, _)| exponent(logit) >= draw.min_p.ln()).count();
    kept = kept.min(through(probable));
    let at = (1..=weights.len()).find(|&n| through(n) > target(draw.uniform, kept));
    candidates[at.expect("the target is less than the sum") - 1].1
}
