//! Root-mean-square norm, alone, after a residual sum, and gated by a second input.
//!
//! `y = x / sqrt(mean(x^2) + eps) * w`, over rows of `[T, N]`.
//!
//! Weights are effective weights: for a zero-centred checkpoint (`1 + w`), the 1 is added at load. Sums are 64 partial
//! sums of `f32`, then a tree. The order depends only on N.
//!
//! Memory: each input is read once and each output written once; the second touch of a row hits L1.

use super::rows::{Rows, RowsMut};
use crate::pool::Worker;
use crate::simd::{self, LANES, Simd, VectorKernel, lanes, silu};

/// Values that a worker takes at a time: small enough to balance, large enough to hide the cost of a claim.
const GRAIN_VALUES: usize = 4096;

/// `y = rms_norm(x) * weight`.
///
/// # Panics
/// If the shapes disagree.
pub fn rms_norm(x: Rows<'_>, weight: &[f32], eps: f32, y: RowsMut<'_>, worker: &Worker<'_>) {
    assert!(x.width() == weight.len() && y.width() == weight.len() && x.len() == y.len());
    simd::run_at(worker.isa, Norm { x, weight, eps, y, worker });
}

/// `residual += x`, then `y = rms_norm(residual) * weight`; `residual` is `[T, N]`, updated in place.
///
/// # Panics
/// If the shapes disagree.
pub fn add_rms_norm(
    x: Rows<'_>,
    residual: RowsMut<'_>,
    weight: &[f32],
    eps: f32,
    y: RowsMut<'_>,
    worker: &Worker<'_>,
) {
    let width = weight.len();
    assert!(x.width() == width && y.width() == width && residual.width() == width);
    assert!(x.len() == y.len() && x.len() == residual.len());
    simd::run_at(worker.isa, AddNorm { x, residual, weight, eps, y, worker });
}

/// `y = rms_norm(x per head) * weight * silu(gate)`: rows hold heads of `weight.len()` values each.
///
/// # Panics
/// If the shapes disagree.
pub fn gated_rms_norm(
    x: Rows<'_>,
    gate: Rows<'_>,
    weight: &[f32],
    eps: f32,
    y: RowsMut<'_>,
    worker: &Worker<'_>,
) {
    assert!(x.width().is_multiple_of(weight.len()), "rows of {} in heads of {}", x.width(), weight.len());
    assert!(
        gate.width() == x.width() && y.width() == x.width() && gate.len() == x.len() && y.len() == x.len()
    );
    simd::run_at(worker.isa, GatedNorm { x, gate, weight, eps, y, worker });
}

/// `1 / sqrt(mean(x^2) + eps)`
#[inline(always)]
pub(super) fn inverse_rms<S: Simd>(s: S, x: &[f32], eps: f32) -> f32 {
    1.0 / (s.dot(x, x) / x.len() as f32 + eps).sqrt()
}

/// `y = x * scale * weight`
#[inline(always)]
pub(super) fn scale_by_weight<S: Simd>(s: S, x: &[f32], scale: f32, weight: &[f32], y: &mut [f32]) {
    let scale = s.splat(scale);
    lanes!(s, y, [x = x, w = weight] => s.mul(s.mul(x, scale), w));
}

/// Rows that a worker takes at a time, of `rows` rows. Where rows are few, this is an even share.
fn grain(width: usize, rows: usize, worker: &Worker<'_>) -> usize {
    (GRAIN_VALUES / width.max(1)).clamp(1, rows.div_ceil(worker.count).max(1))
}

struct Norm<'a, 'w> {
    x: Rows<'a>,
    weight: &'a [f32],
    eps: f32,
    y: RowsMut<'a>,
    worker: &'a Worker<'w>,
}

impl VectorKernel for Norm<'_, '_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (rows, width) = (self.x.len(), self.x.width());
        for t in self.worker.claim(rows, grain(width, rows, self.worker)).flatten() {
            let x = self.x.row(t);
            // SAFETY: each row is claimed once.
            let y = unsafe { self.y.row(t) };
            scale_by_weight(s, x, inverse_rms(s, x, self.eps), self.weight, y);
        }
    }
}

struct AddNorm<'a, 'w> {
    x: Rows<'a>,
    residual: RowsMut<'a>,
    weight: &'a [f32],
    eps: f32,
    y: RowsMut<'a>,
    worker: &'a Worker<'w>,
}

impl VectorKernel for AddNorm<'_, '_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (rows, width) = (self.x.len(), self.x.width());
        for t in self.worker.claim(rows, grain(width, rows, self.worker)).flatten() {
            // SAFETY: each row is claimed once.
            let (residual, y) = unsafe { (self.residual.row(t), self.y.row(t)) };
            add_in_place(s, self.x.row(t), residual);
            scale_by_weight(s, residual, inverse_rms(s, residual, self.eps), self.weight, y);
        }
    }
}

/// `y += x`
#[inline(always)]
fn add_in_place<S: Simd>(s: S, x: &[f32], y: &mut [f32]) {
    let (xs, x_tail) = x.as_chunks::<LANES>();
    let (ys, y_tail) = y.as_chunks_mut::<LANES>();
    for (x, y) in xs.iter().zip(ys) {
        let sum = s.add(s.load(x), s.load(y));
        s.store(sum, y);
    }
    for (x, y) in x_tail.iter().zip(y_tail) {
        *y += x;
    }
}

struct GatedNorm<'a, 'w> {
    x: Rows<'a>,
    gate: Rows<'a>,
    weight: &'a [f32],
    eps: f32,
    y: RowsMut<'a>,
    worker: &'a Worker<'w>,
}

impl VectorKernel for GatedNorm<'_, '_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let size = self.weight.len();
        let heads = self.x.width() / size;
        let units = self.x.len() * heads;
        for unit in self.worker.claim(units, grain(size, units, self.worker)).flatten() {
            let (t, head) = (unit / heads, unit % heads);
            let columns = head * size..(head + 1) * size;
            let (x, gate) = (&self.x.row(t)[columns.clone()], &self.gate.row(t)[columns.clone()]);
            // SAFETY: each head of each row is claimed once.
            let y = unsafe { self.y.part(t, columns) };
            scale_by_weight(s, x, inverse_rms(s, x, self.eps), self.weight, y);
            let (ys, y_tail) = y.as_chunks_mut::<LANES>();
            let (gates, gate_tail) = gate.as_chunks::<LANES>();
            for (y, gate) in ys.iter_mut().zip(gates) {
                let product = s.mul(s.load(y), silu(s, s.load(gate)));
                s.store(product, y);
            }
            if !y_tail.is_empty() {
                let product = s.mul(s.load_partial(y_tail), silu(s, s.load_partial(gate_tail)));
                s.store_partial(product, y_tail);
            }
        }
    }
}
