//! Root-mean-square norm of each group of `weight.len()` values.

use super::elementwise::silu;

/// `x / sqrt(mean(x^2) + eps) * weight`
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f64> {
    x.chunks_exact(weight.len())
        .flat_map(|row| {
            let mean = row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / row.len() as f64;
            let scale = 1.0 / (mean + f64::from(eps)).sqrt();
            row.iter().zip(weight).map(move |(&x, &w)| f64::from(x) * scale * f64::from(w))
        })
        .collect()
}

/// `rms_norm(x) * silu(gate)`
pub fn gated_rms_norm(x: &[f32], gate: &[f32], weight: &[f32], eps: f32) -> Vec<f64> {
    let normed = rms_norm(x, weight, eps);
    normed.iter().zip(gate).map(|(x, &gate)| x * silu(f64::from(gate))).collect()
}
