//! Matrix products.

use crate::remembered::{Inputs, remembered};

/// `y[t, n] = sum over k of x[t, k] * w[n, k]`, with x `[T, K]` and w `[N, K]`.
pub fn matmul_transposed(x: &[f32], w: &[f32], k: usize) -> Vec<f64> {
    let compute = || x.chunks_exact(k).flat_map(|x| w.chunks_exact(k).map(|w| dot(x, w))).collect();
    // With few rows a product takes no longer than finding it.
    if x.len().min(w.len()) < 8 * k {
        return compute();
    }
    remembered(Inputs::of("matmul_transposed").sizes(&[k]).floats(x).floats(w), compute)
}

/// `c[b, m, n] = sum over k of a[b, m, k] * b[b, k, n]`, both operands contiguous.
pub fn matmul(a: &[f32], b: &[f32], [batch, m, n, k]: [usize; 4]) -> Vec<f64> {
    let mut c = vec![0.0; batch * m * n];
    for i in 0..batch {
        for row in 0..m {
            for column in 0..n {
                c[(i * m + row) * n + column] = (0..k)
                    .map(|j| f64::from(a[(i * m + row) * k + j]) * f64::from(b[(i * k + j) * n + column]))
                    .sum();
            }
        }
    }
    c
}

/// Sum of `a[i] * b[i]`.
pub fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}
