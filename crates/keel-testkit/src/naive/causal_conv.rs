//! Depthwise causal convolution with SiLU.

use super::elementwise::silu;

/// `y` `[T, C]` of `x` `[T, C]` with `weight` `[W, C]`. `window` `[W - 1, C]` holds the rows before, and is updated.
pub fn causal_conv(x: &[f32], weight: &[f32], channels: usize, window: &mut Vec<f32>) -> Vec<f64> {
    let (rows, width) = (x.len() / channels, weight.len() / channels);
    window.extend_from_slice(x);
    let mut y = Vec::with_capacity(x.len());
    for t in 0..rows {
        for c in 0..channels {
            let mut sum = 0.0;
            for j in 0..width {
                sum += f64::from(weight[j * channels + c]) * f64::from(window[(t + j) * channels + c]);
            }
            y.push(silu(sum));
        }
    }
    window.drain(..rows * channels);
    y
}
