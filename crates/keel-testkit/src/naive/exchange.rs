//! Exchanges between devices: `all_reduce`, `all_gather` and `reduce_scatter`.

use super::tensor::Tensor;

/// `y = x_0 + x_1 + ...` over the shares of all devices.
pub fn all_reduce(shares: &[Tensor]) -> Tensor {
    let sum = |i: usize| shares.iter().map(|share| share.values[i]).sum();
    Tensor { shape: shares[0].shape.clone(), values: (0..shares[0].values.len()).map(sum).collect() }
}

/// The shares of all devices along a new first axis.
pub fn all_gather(shares: &[Tensor]) -> Tensor {
    let shape = [&[shares.len()], &shares[0].shape[..]].concat();
    Tensor { shape, values: shares.iter().flat_map(|share| share.values.iter().copied()).collect() }
}

/// Part `r` of the sum over the shares of all devices: rows `r * n / count` up to `(r + 1) * n / count` of `n`.
pub fn reduce_scatter(shares: &[Tensor], r: usize) -> Tensor {
    let sum = all_reduce(shares);
    let mut shape = sum.shape;
    shape[0] /= shares.len();
    let len: usize = shape.iter().product();
    Tensor { values: sum.values[r * len..(r + 1) * len].to_vec(), shape }
}
