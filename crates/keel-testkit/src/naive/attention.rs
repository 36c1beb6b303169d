//! Causal attention with grouped heads over one sequence's keys and values.

use crate::remembered::{Inputs, remembered};

/// Sizes, scale and window.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// H
    pub heads: usize,
    /// KV
    pub kv_heads: usize,
    /// D
    pub head_dim: usize,
    /// Factor on the scores.
    pub scale: f32,
    /// Positions that a row sees, its own included; `None` for all before it.
    pub window: Option<usize>,
}

/// `y` `[T, H, D]` of the queries `q` `[T, H, D]` at positions `first..`, over `k` and `v` `[L, KV, D]`.
pub fn attention(shape: Shape, q: &[f32], first: usize, k: &[f32], v: &[f32]) -> Vec<f64> {
    let rows = q.len() / (shape.heads * shape.head_dim);
    attention_until(shape, q, first, k, v, &(first..first + rows).collect::<Vec<_>>())
}

/// The same, but row `t` also sees later keys, up to position `until[t]`.
pub fn attention_until(
    shape: Shape,
    q: &[f32],
    first: usize,
    k: &[f32],
    v: &[f32],
    until: &[usize],
) -> Vec<f64> {
    let Shape { heads, kv_heads, head_dim, scale, window } = shape;
    let sizes = [heads, kv_heads, head_dim, usize::from(window.is_some()), window.unwrap_or(0), first];
    let inputs = Inputs::of("attention").sizes(&sizes).sizes(until).floats(&[scale]);
    let inputs = inputs.floats(q).floats(k).floats(v);
    remembered(inputs, || each_row(shape, q, first, k, v, until))
}

fn each_row(shape: Shape, q: &[f32], first: usize, k: &[f32], v: &[f32], until: &[usize]) -> Vec<f64> {
    let Shape { heads, kv_heads, head_dim, scale, window } = shape;
    let rows = q.len() / (heads * head_dim);
    let mut y = vec![0.0; q.len()];
    for t in 0..rows {
        for h in 0..heads {
            let kv = h / (heads / kv_heads);
            let position = first + t;
            let from = window.map_or(0, |window| (position + 1).saturating_sub(window));
            let query = &q[(t * heads + h) * head_dim..][..head_dim];
            let last = position.max(until[t]);
            let scores: Vec<f64> = (from..=last)
                .map(|j| f64::from(scale) * dot(query, &k[(j * kv_heads + kv) * head_dim..][..head_dim]))
                .collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|score| (score - largest).exp()).sum();
            for (j, score) in (from..=last).zip(&scores) {
                let weight = (score - largest).exp() / sum;
                for d in 0..head_dim {
                    y[(t * heads + h) * head_dim + d] +=
                        weight * f64::from(v[(j * kv_heads + kv) * head_dim + d]);
                }
            }
        }
    }
    y
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}
