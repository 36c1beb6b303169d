//! Joins, block replacement.

use super::tensor::Tensor;

/// Tensors one after the other along `axis`.
pub fn concatenate(parts: &[Tensor], axis: usize) -> Tensor {
    let mut shape = parts[0].shape.clone();
    shape[axis] = parts.iter().map(|p| p.shape[axis]).sum();
    Tensor::from_fn(&shape, |index| {
        let (mut index, mut part) = (index.to_vec(), 0);
        while index[axis] >= parts[part].shape[axis] {
            index[axis] -= parts[part].shape[axis];
            part += 1;
        }
        parts[part].at(&index)
    })
}

/// `x` with the block at `starts` replaced.
pub fn slice_update(x: &Tensor, update: &Tensor, starts: &[usize]) -> Tensor {
    Tensor::from_fn(&x.shape, |index| {
        let inner: Option<Vec<usize>> = index
            .iter()
            .zip(starts)
            .zip(&update.shape)
            .map(|((i, s), n)| i.checked_sub(*s).filter(|i| i < n))
            .collect();
        inner.map_or_else(|| x.at(index), |inner| update.at(&inner))
    })
}
