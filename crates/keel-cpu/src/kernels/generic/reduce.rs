//! Reductions of rows, and operations built on them: softmax, running sums, layer norm.
//!
//! Floats are summed in f32: each block of 256 in 16 lanes, then a tree; block sums are added in order. The order
//! depends only on the length of a row. Memory: rows are read once; softmax and layer norm read them again from cache.

use super::scalar::{Scalar, widen};
use super::{BLOCK, row_grain};
use crate::isa::Isa;
use crate::pool::Worker;
use crate::shared_slice::SharedMut;
use crate::simd::{self, LANES, Simd, VectorKernel, exp, lanes};
use keel_array::Reduction;
use keel_array::sampling::greatest;

/// Work on one row; a trait because closures cannot be generic.
trait RowFn<T> {
    fn row<S: Simd>(&self, s: S, x: &[T], y: &mut [T]);
}

/// Runs a [`RowFn`] on rows of `x_width` values and their results of `y_width`.
struct EachRow<'a, 'w, T, F> {
    x: &'a [T],
    x_width: usize,
    y: SharedMut<'a, T>,
    y_width: usize,
    f: F,
    worker: &'a Worker<'w>,
}

impl<T: Scalar, F: RowFn<T>> VectorKernel for EachRow<'_, '_, T, F> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let rows = self.y.len() / self.y_width.max(1);
        for row in self.worker.claim(rows, row_grain(self.x_width)).flatten() {
            // SAFETY: each row is claimed once.
            let y = unsafe { self.y.range(row * self.y_width..(row + 1) * self.y_width) };
            self.f.row(s, &self.x[row * self.x_width..(row + 1) * self.x_width], y);
        }
    }
}

/// Each row of `x`, `[.., width]`, becomes one value of `y`.
///
/// # Panics
/// If the lengths do not fit, or the reduction is not defined for the type.
pub fn reduce<T: Scalar>(
    reduction: Reduction,
    x: &[T],
    width: usize,
    y: SharedMut<'_, T>,
    isa: Isa,
    worker: &Worker<'_>,
) {
    assert_eq!(x.len(), y.len() * width);
    simd::run_at(isa, EachRow { x, x_width: width, y, y_width: 1, f: Reduce(reduction), worker });
}

struct Reduce(Reduction);

impl<T: Scalar> RowFn<T> for Reduce {
    #[inline(always)]
    fn row<S: Simd>(&self, s: S, x: &[T], y: &mut [T]) {
        y[0] = if T::IS_FLOAT { T::from_f32(reduce_float(s, self.0, x)) } else { reduce_integer(self.0, x) };
    }
}

#[inline(always)]
fn reduce_float<S: Simd, T: Scalar>(s: S, reduction: Reduction, x: &[T]) -> f32 {
    let values = || x.iter().map(|x| x.to_f32());
    match reduction {
        Reduction::Sum => sum(s, x, |x| x),
        Reduction::Mean => sum(s, x, |x| x) / x.len() as f32,
        Reduction::Max => values().fold(f32::NEG_INFINITY, |a, b| if a > b || a.is_nan() { a } else { b }),
        Reduction::Min => values().fold(f32::INFINITY, |a, b| if a < b || a.is_nan() { a } else { b }),
        Reduction::Prod => values().product(),
        Reduction::Any | Reduction::All => unreachable!("any and all are for flags"),
    }
}

fn reduce_integer<T: Scalar>(reduction: Reduction, x: &[T]) -> T {
    let mut values = x.iter().map(|x| x.to_i64());
    T::from_i64(match reduction {
        Reduction::Sum => values.fold(0, i64::wrapping_add),
        Reduction::Prod => values.fold(1, i64::wrapping_mul),
        Reduction::Max => values.fold(i64::MIN, i64::max),
        Reduction::Min => values.fold(i64::MAX, i64::min),
        Reduction::Any => i64::from(values.any(|x| x != 0)),
        Reduction::All => i64::from(values.all(|x| x != 0)),
        Reduction::Mean => unreachable!("the mean is for floats"),
    })
}

/// Sum of `f(x)`.
#[inline(always)]
fn sum<S: Simd, T: Scalar>(s: S, x: &[T], f: impl Fn(f32) -> f32) -> f32 {
    let (mut block, mut total) = ([0.0; BLOCK], 0.0);
    for x in x.chunks(BLOCK) {
        let block = &mut block[..x.len()];
        widen(x, block);
        block.iter_mut().for_each(|x| *x = f(*x));
        total += block_sum(s, block);
    }
    total
}

/// Sums 16 lanes, then the lanes as a tree.
#[inline(always)]
fn block_sum<S: Simd>(s: S, x: &[f32]) -> f32 {
    let (chunks, tail) = x.as_chunks::<LANES>();
    let mut total = s.splat(0.0);
    for chunk in chunks {
        total = s.add(total, s.load(chunk));
    }
    if !tail.is_empty() {
        total = s.add(total, s.load_partial(tail));
    }
    s.sum(total)
}

/// `y = exp(x - max) / sum` for each row of `width` values.
///
/// # Panics
/// If the lengths differ.
pub fn softmax<T: Scalar>(x: &[T], width: usize, y: SharedMut<'_, T>, isa: Isa, worker: &Worker<'_>) {
    assert_eq!(x.len(), y.len());
    simd::run_at(isa, EachRow { x, x_width: width, y, y_width: width, f: Softmax, worker });
}

struct Softmax;

impl<T: Scalar> RowFn<T> for Softmax {
    #[inline(always)]
    fn row<S: Simd>(&self, s: S, x: &[T], y: &mut [T]) {
        let max = reduce_float(s, Reduction::Max, x);
        let (mut wide, mut powers, mut total) = ([0.0; BLOCK], [0.0; BLOCK], 0.0);
        for x in x.chunks(BLOCK) {
            exp_block(s, x, max, &mut wide, &mut powers);
            total += block_sum(s, &powers[..x.len()]);
        }
        for (x, y) in x.chunks(BLOCK).zip(y.chunks_mut(BLOCK)) {
            exp_block(s, x, max, &mut wide, &mut powers);
            y.iter_mut().zip(&powers).for_each(|(y, p)| *y = T::from_f32(p / total));
        }
    }
}

/// `powers = exp(x - max)`
#[inline(always)]
fn exp_block<S: Simd, T: Scalar>(
    s: S,
    x: &[T],
    max: f32,
    wide: &mut [f32; BLOCK],
    powers: &mut [f32; BLOCK],
) {
    widen(x, wide);
    lanes!(s, &mut powers[..x.len()], [x = &wide[..x.len()]] => exp(s, s.sub(x, s.splat(max))));
}

/// `y = (x - mean) / sqrt(var + eps) * weight + bias` for each row.
///
/// # Panics
/// If the lengths differ.
pub fn layer_norm<T: Scalar>(
    x: &[T],
    weight: &[T],
    bias: &[T],
    eps: f32,
    y: SharedMut<'_, T>,
    isa: Isa,
    worker: &Worker<'_>,
) {
    let width = weight.len();
    assert!(x.len() == y.len() && bias.len() == width);
    let f = LayerNorm { weight, bias, eps };
    simd::run_at(isa, EachRow { x, x_width: width, y, y_width: width, f, worker });
}

struct LayerNorm<'a, T> {
    weight: &'a [T],
    bias: &'a [T],
    eps: f32,
}

impl<T: Scalar> RowFn<T> for LayerNorm<'_, T> {
    #[inline(always)]
    fn row<S: Simd>(&self, s: S, x: &[T], y: &mut [T]) {
        let n = x.len() as f32;
        let mean = sum(s, x, |x| x) / n;
        let variance = sum(s, x, |x| (x - mean) * (x - mean)) / n;
        let scale = 1.0 / (variance + self.eps).sqrt();
        for (i, (x, y)) in x.iter().zip(y).enumerate() {
            *y = T::from_f32((x.to_f32() - mean) * scale * self.weight[i].to_f32() + self.bias[i].to_f32());
        }
    }
}

/// Running sums of each row: f32 for floats, wrapping for integers.
///
/// # Panics
/// If the lengths differ.
pub fn cumsum<T: Scalar>(
    x: &[T],
    width: usize,
    reverse: bool,
    exclusive: bool,
    y: SharedMut<'_, T>,
    worker: &Worker<'_>,
) {
    assert_eq!(x.len(), y.len());
    let rows = x.len() / width.max(1);
    for row in worker.claim(rows, row_grain(width)).flatten() {
        let x = &x[row * width..(row + 1) * width];
        // SAFETY: each row is claimed once.
        let y = unsafe { y.range(row * width..(row + 1) * width) };
        let (mut float, mut integer) = (0.0f32, 0i64);
        for i in 0..width {
            let i = if reverse { width - 1 - i } else { i };
            let before = (float, integer);
            float += x[i].to_f32();
            integer = integer.wrapping_add(x[i].to_i64());
            let (f, n) = if exclusive { before } else { (float, integer) };
            y[i] = if T::IS_FLOAT { T::from_f32(f) } else { T::from_i64(n) };
        }
    }
}

/// Index of the largest, or smallest, element of each row: the first among equals. NaN is never chosen over a
/// number.
///
/// # Panics
/// If the lengths do not fit.
pub fn arg_reduce<T: Scalar>(
    largest: bool,
    x: &[T],
    width: usize,
    y: SharedMut<'_, u32>,
    worker: &Worker<'_>,
) {
    assert_eq!(x.len(), y.len() * width);
    for row in worker.claim(y.len(), row_grain(width)).flatten() {
        let x = &x[row * width..(row + 1) * width];
        let order = super::sort::Order { descending: largest };
        let best = (1..width).fold(0, |best, i| if order.strictly_before(x, i, best) { i } else { best });
        // SAFETY: each row is claimed once.
        unsafe { y.range(row..row + 1).fill(best as u32) };
    }
}

/// Most rows for which [`argmax_divided`] divides the columns: enough for a step of decoding.
pub const DIVIDED_ROWS_MAX: usize = 32;

/// The index of the largest element, as [`arg_reduce`] gives it, for a few long rows. Each worker searches its share of
/// the columns. For logits that is mostly the share that it has just computed.
///
/// # Panics
/// If the lengths do not fit, or `scratch` has fewer than two words for each row and worker.
pub fn argmax_divided(
    x: &[f32],
    width: usize,
    y: SharedMut<'_, u32>,
    scratch: SharedMut<'_, u32>,
    worker: &Worker<'_>,
) {
    let rows = y.len();
    assert!(x.len() == rows * width && scratch.len() >= 2 * rows * worker.count);
    let (share, words) = (worker.split(width, 64), 2 * rows * worker.index);
    // SAFETY: each worker has its own words.
    let own = unsafe { scratch.range(words..words + 2 * rows) };
    for (row, own) in own.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        let (value, at) = first_greatest(&x[row * width..][share.clone()]);
        *own = [value.to_bits(), (share.start + at) as u32];
    }
    worker.barrier();
    if worker.index > 0 {
        return;
    }
    // SAFETY: after the barrier no worker writes the words, and only worker 0 comes here.
    let (words, y) = unsafe { (scratch.range(0..2 * rows * worker.count), y.range(0..rows)) };
    for (row, y) in y.iter_mut().enumerate() {
        let of = |worker: usize| {
            let at = 2 * (rows * worker + row);
            (f32::from_bits(words[at]), words[at + 1])
        };
        let best = (1..worker.count).map(of).fold(of(0), |best, other| {
            let is_better = other.0 > best.0 || best.0.is_nan() && !other.0.is_nan();
            if is_better { other } else { best }
        });
        *y = best.1;
    }
}

/// Value and index of the first of the greatest numbers; NaN and 0 if there is no number.
fn first_greatest(x: &[f32]) -> (f32, usize) {
    let greatest = greatest(x, |_| true);
    x.iter().position(|&x| x == greatest).map_or((f32::NAN, 0), |at| (greatest, at))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::ThreadPool;

    #[test]
    fn a_divided_search_finds_what_one_worker_finds() {
        let (nan, none) = (f32::NAN, f32::NEG_INFINITY);
        let mut rows: Vec<Vec<f32>> = (0..5)
            .map(|row| (0..200).map(|i| ((i * 37 + row * 11) % 101) as f32 * 0.5 - 20.0).collect())
            .collect();
        rows.push(vec![nan; 200]);
        rows.push(vec![none; 200]);
        rows.push((0..200).map(|i| if i == 150 { none } else { nan }).collect());
        rows.push((0..200).map(|i| if i % 70 == 69 { 0.0 } else { -0.0 }).collect());
        let x = rows.concat();
        let (mut want, mut got) = (vec![u32::MAX; 9], vec![u32::MAX; 9]);
        for workers in [1, 2, 3] {
            let pool = ThreadPool::new(workers);
            let y = SharedMut::new(&mut want);
            pool.run(|worker| arg_reduce(true, &x, 200, y, worker));
            let mut scratch = vec![u32::MAX; 2 * 9 * workers];
            let (y, scratch) = (SharedMut::new(&mut got), SharedMut::new(&mut scratch));
            pool.run(|worker| argmax_divided(&x, 200, y, scratch, worker));
            assert_eq!(got, want, "{workers} workers");
        }
    }
}
