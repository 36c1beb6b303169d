//! Reductions of the last axis, softmax, running sums, layer norm.

use super::tensor::Tensor;

/// `f` of each row.
pub fn reduce(x: &Tensor, f: impl Fn(&[f64]) -> f64) -> Tensor {
    let shape = x.shape[..x.shape.len() - 1].to_vec();
    let values =
        if x.width() == 0 { vec![f(&[]); shape.iter().product()] } else { x.rows().map(f).collect() };
    Tensor { shape, values }
}

/// The largest element; NaN if any element is.
pub fn largest(row: &[f64]) -> f64 {
    row.iter().fold(f64::NEG_INFINITY, |a, &b| if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) })
}

/// The smallest element; NaN if any element is.
pub fn smallest(row: &[f64]) -> f64 {
    row.iter().fold(f64::INFINITY, |a, &b| if a.is_nan() || b.is_nan() { f64::NAN } else { a.min(b) })
}

/// `exp(x - max) / sum` of each row.
pub fn softmax(x: &Tensor) -> Tensor {
    let row = |row: &[f64]| {
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = row.iter().map(|x| (x - max).exp()).sum();
        row.iter().map(|x| (x - max).exp() / sum).collect::<Vec<_>>()
    };
    Tensor { shape: x.shape.clone(), values: x.rows().flat_map(row).collect() }
}

/// Running sums of each row.
pub fn cumsum(x: &Tensor, reverse: bool, exclusive: bool) -> Tensor {
    let row = |row: &[f64]| {
        let (mut sums, mut sum) = (vec![0.0; row.len()], 0.0);
        for i in 0..row.len() {
            let at = if reverse { row.len() - 1 - i } else { i };
            let next = sum + row[at];
            sums[at] = if exclusive { sum } else { next };
            sum = next;
        }
        sums
    };
    Tensor { shape: x.shape.clone(), values: x.rows().flat_map(row).collect() }
}

/// `(x - mean) / sqrt(var + eps) * w + b` of each row.
pub fn layer_norm(x: &Tensor, weight: &[f64], bias: &[f64], eps: f64) -> Tensor {
    let row = |row: &[f64]| {
        let mean = row.iter().sum::<f64>() / row.len() as f64;
        let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / row.len() as f64;
        let scale = 1.0 / (variance + eps).sqrt();
        row.iter().zip(weight).zip(bias).map(|((x, w), b)| (x - mean) * scale * w + b).collect::<Vec<_>>()
    };
    Tensor { shape: x.shape.clone(), values: x.rows().flat_map(row).collect() }
}
