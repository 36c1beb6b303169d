//! SwiGLU and the sigmoid gate.

use super::elementwise::{sigmoid, silu};

/// `silu(x[:, :width]) * x[:, width:]`
pub fn swiglu(x: &[f64], width: usize) -> Vec<f64> {
    let row = |row: &[f64]| (0..width).map(|i| silu(row[i]) * row[width + i]).collect::<Vec<_>>();
    x.chunks_exact(2 * width).flat_map(row).collect()
}

/// `x * sigmoid(gate)`
pub fn sigmoid_gate(x: &[f64], gate: &[f64]) -> Vec<f64> {
    x.iter().zip(gate).map(|(x, &gate)| x * sigmoid(gate)).collect()
}
