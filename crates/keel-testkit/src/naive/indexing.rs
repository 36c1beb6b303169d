//! Gathering by index.

use super::tensor::Tensor;

/// Blocks of `x` along its first axis.
pub fn take(x: &Tensor, indices: &Tensor) -> Tensor {
    let shape: Vec<usize> = indices.shape.iter().chain(&x.shape[1..]).copied().collect();
    let split = indices.shape.len();
    Tensor::from_fn(&shape, |index| {
        x.at(&[&[indices.at(&index[..split]) as usize], &index[split..]].concat())
    })
}

/// Elements of the last axis.
pub fn take_along(x: &Tensor, indices: &Tensor) -> Tensor {
    Tensor::from_fn(&indices.shape, |index| {
        x.at(&[&index[..index.len() - 1], &[indices.at(index) as usize]].concat())
    })
}
