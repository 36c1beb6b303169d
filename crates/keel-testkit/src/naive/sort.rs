//! Sorting of the last axis.

use super::tensor::Tensor;
use std::cmp::Ordering;

/// Indices that sort a row: by value, then by index; NaN last.
pub fn argsort(row: &[f64], descending: bool) -> Vec<usize> {
    let mut indices: Vec<usize> = (0..row.len()).collect();
    indices.sort_by(|&i, &j| match (row[i].is_nan(), row[j].is_nan()) {
        (false, false) if descending => row[j].partial_cmp(&row[i]).unwrap_or(Ordering::Equal),
        (false, false) => row[i].partial_cmp(&row[j]).unwrap_or(Ordering::Equal),
        (a, b) => a.cmp(&b),
    });
    indices
}

/// The first `k` of each sorted row: values and indices.
pub fn sorted(x: &Tensor, descending: bool, k: usize) -> (Tensor, Tensor) {
    let mut shape = x.shape.clone();
    if let Some(last) = shape.last_mut() {
        *last = k;
    }
    let (mut values, mut indices) = (Vec::new(), Vec::new());
    for row in x.rows() {
        for i in argsort(row, descending).into_iter().take(k) {
            values.push(row[i]);
            indices.push(i as f64);
        }
    }
    (Tensor { shape: shape.clone(), values }, Tensor { shape, values: indices })
}
