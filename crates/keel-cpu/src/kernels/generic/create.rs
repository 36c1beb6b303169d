//! Arrays without inputs: constants, progressions, random numbers.
//!
//! Random element `i` of seed `s` depends only on [`random_bits`]`(s, i)`, so any worker can compute any part.
//! A uniform number is the upper 24 bits over `2^24`; a normal one is `sqrt(-2 ln(1 - u)) cos(2 pi v)` in f64, from
//! the uniform numbers `2 i` and `2 i + 1`.

use super::GRAIN;
use super::scalar::Plain;
use crate::pool::Worker;
use crate::shared_slice::SharedMut;
use keel_array::random::random_bits;

/// `y[i] = f(i)`
pub fn generate<T: Plain>(y: SharedMut<'_, T>, worker: &Worker<'_>, f: impl Fn(usize) -> T) {
    for range in worker.claim(y.len(), GRAIN) {
        let start = range.start;
        // SAFETY: each range is claimed once.
        let y = unsafe { y.range(range) };
        y.iter_mut().enumerate().for_each(|(i, y)| *y = f(start + i));
    }
}

/// A number uniformly distributed in `[0, 1)`.
pub fn random_uniform(seed: u64, counter: u64) -> f32 {
    (random_bits(seed, counter) >> 40) as f32 / 16_777_216.0
}

/// A normally distributed number of mean 0 and deviation 1.
pub fn random_normal(seed: u64, counter: u64) -> f32 {
    let counter = counter.wrapping_mul(2);
    let u = f64::from(random_uniform(seed, counter));
    let v = f64::from(random_uniform(seed, counter.wrapping_add(1)));
    ((-2.0 * (1.0 - u).ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
}
