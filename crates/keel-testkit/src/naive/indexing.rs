//! Gathering, joining, replacing blocks, random numbers.

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

/// Element `i` of a seed's random bits: SplitMix64 of seed and position.
pub fn random_bits(seed: u64, i: u64) -> u64 {
    let mut z = seed.wrapping_add(i.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Uniform in `[0, 1)`, from the upper 24 bits.
pub fn random_uniform(seed: u64, i: u64) -> f64 {
    (random_bits(seed, i) >> 40) as f64 / f64::from(1 << 24)
}

/// Mean 0 and deviation 1, from the uniform numbers `2 i` and `2 i + 1`.
pub fn random_normal(seed: u64, i: u64) -> f64 {
    let (u, v) = (random_uniform(seed, 2 * i), random_uniform(seed, 2 * i + 1));
    (-2.0 * (1.0 - u).ln()).sqrt() * (std::f64::consts::TAU * v).cos()
}
