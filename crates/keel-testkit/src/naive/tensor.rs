//! An array of `f64` with a shape, for the oracles of general operations.

use crate::random::Random;

/// Elements in row-major order.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Extents.
    pub shape: Vec<usize>,
    /// Elements.
    pub values: Vec<f64>,
}

impl Tensor {
    /// A tensor whose elements are a function of their index.
    pub fn from_fn(shape: &[usize], f: impl Fn(&[usize]) -> f64) -> Tensor {
        let values = (0..shape.iter().product()).map(|i| f(&index_of(shape, i))).collect();
        Tensor { shape: shape.to_vec(), values }
    }

    /// Random elements in `low..high`.
    pub fn random(random: &mut Random, shape: &[usize], low: f32, high: f32) -> Tensor {
        let values = (0..shape.iter().product()).map(|_| f64::from(random.uniform(low, high))).collect();
        Tensor { shape: shape.to_vec(), values }
    }

    /// Random whole numbers in `low..high`.
    pub fn integers(random: &mut Random, shape: &[usize], low: i64, high: i64) -> Tensor {
        let value = |random: &mut Random| (low + random.below((high - low) as usize) as i64) as f64;
        Tensor { shape: shape.to_vec(), values: (0..shape.iter().product()).map(|_| value(random)).collect() }
    }

    /// The element at an index.
    ///
    /// # Panics
    /// If there is no such element.
    pub fn at(&self, index: &[usize]) -> f64 {
        assert!(index.iter().zip(&self.shape).all(|(i, n)| i < n) && index.len() == self.shape.len());
        self.values[index.iter().zip(&self.shape).fold(0, |at, (i, n)| at * n + i)]
    }

    /// Applies `f` to every element.
    pub fn map(&self, f: impl Fn(f64) -> f64) -> Tensor {
        Tensor { shape: self.shape.clone(), values: self.values.iter().map(|&x| f(x)).collect() }
    }

    /// Axes in another order: axis `i` of the result is axis `axes[i]`.
    pub fn permute(&self, axes: &[usize]) -> Tensor {
        let shape: Vec<usize> = axes.iter().map(|&a| self.shape[a]).collect();
        Tensor::from_fn(&shape, |index| {
            let mut from = vec![0; axes.len()];
            axes.iter().zip(index).for_each(|(&axis, &i)| from[axis] = i);
            self.at(&from)
        })
    }

    /// Stretched to `shape`.
    pub fn broadcast(&self, shape: &[usize]) -> Tensor {
        let lead = shape.len() - self.shape.len();
        Tensor::from_fn(shape, |index| {
            let from: Vec<usize> =
                index[lead..].iter().zip(&self.shape).map(|(&i, &n)| if n == 1 { 0 } else { i }).collect();
            self.at(&from)
        })
    }

    /// Length of the last axis.
    pub fn width(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// The rows of the last axis.
    pub fn rows(&self) -> impl Iterator<Item = &[f64]> {
        self.values.chunks_exact(self.width().max(1))
    }
}

/// The index of element `i` in row-major order.
pub fn index_of(shape: &[usize], mut i: usize) -> Vec<usize> {
    let mut index = vec![0; shape.len()];
    for axis in (0..shape.len()).rev() {
        index[axis] = i % shape[axis];
        i /= shape[axis];
    }
    index
}
