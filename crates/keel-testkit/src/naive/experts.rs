//! Routing of a mixture of experts, and the sum of the experts' outputs.

use super::elementwise::sigmoid;
use super::sort::argsort;

/// Probabilities and indices of the `k` most probable of each row of `experts` logits. NaN comes last and has the
/// probability of negative infinity, which is 0.
pub fn route_top_k(logits: &[f32], experts: usize, k: usize, normalise: bool) -> (Vec<f64>, Vec<u32>) {
    let (mut weights, mut chosen) = (Vec::new(), Vec::new());
    for row in logits.chunks_exact(experts) {
        let row: Vec<f64> = row.iter().map(|&x| f64::from(x)).collect();
        let power = |x: f64| if x.is_nan() { 0.0 } else { x.exp() };
        let total: f64 = row.iter().map(|&x| power(x)).sum();
        let best = &argsort(&row, true)[..k];
        let kept: f64 = best.iter().map(|&e| power(row[e])).sum();
        weights.extend(best.iter().map(|&e| power(row[e]) / if normalise { kept } else { total }));
        chosen.extend(best.iter().map(|&e| e as u32));
    }
    (weights, chosen)
}

/// `sum_j weights[t, j] y[t, j] + sigmoid(gate[t]) shared[t] + residual[t]`, with rows of `width` values.
pub fn combine(
    y: &[f32],
    weights: &[f32],
    shared: Option<(&[f32], &[f32])>,
    residual: &[f32],
    width: usize,
) -> Vec<f64> {
    let choices = y.len() / residual.len();
    let element = |i: usize| {
        let (t, column) = (i / width, i % width);
        let experts: f64 = (t * choices..(t + 1) * choices)
            .map(|j| f64::from(weights[j]) * f64::from(y[j * width + column]))
            .sum();
        let shared = shared.map_or(0.0, |(x, gate)| sigmoid(f64::from(gate[t])) * f64::from(x[i]));
        experts + shared + f64::from(residual[i])
    };
    (0..residual.len()).map(element).collect()
}
