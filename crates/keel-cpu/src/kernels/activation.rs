//! Element-wise products with an activation: SwiGLU and the sigmoid gate of attention's output.
//!
//! `swiglu`: `y = silu(a) * b` over rows `[T, 2F]` that hold `a`, then `b`.
//! `sigmoid_gate`: `y = x * sigmoid(gate)`.
//!
//! Memory: two values read and one written per result.

use super::rows::{Rows, RowsMut};
use crate::pool::Worker;
use crate::simd::{self, LANES, Simd, VectorKernel, lanes, sigmoid, silu};

/// Columns that a worker takes at a time: decode has one row, so rows alone would leave workers idle.
const GRAIN_COLUMNS: usize = 64 * LANES;

/// `y = silu(a) * b` with `a = x[.., ..F]` and `b = x[.., F..]`; `x` is `[T, 2F]`, `y` is `[T, F]`.
///
/// # Panics
/// If the shapes disagree.
pub fn swiglu(x: Rows<'_>, y: RowsMut<'_>, worker: &Worker<'_>) {
    let width = y.width();
    assert!(x.width() == 2 * width && x.len() == y.len());
    let (a, b) = (x.columns(0..width), x.columns(width..2 * width));
    simd::run_at(worker.isa, Product { a, b, y, kind: Kind::Swiglu, worker });
}

/// `y = x * sigmoid(gate)`, all `[T, N]`.
///
/// # Panics
/// If the shapes disagree.
pub fn sigmoid_gate(x: Rows<'_>, gate: Rows<'_>, y: RowsMut<'_>, worker: &Worker<'_>) {
    assert!(
        x.width() == y.width() && gate.width() == y.width() && x.len() == y.len() && gate.len() == y.len()
    );
    simd::run_at(worker.isa, Product { a: gate, b: x, y, kind: Kind::SigmoidGate, worker });
}

#[derive(Clone, Copy)]
enum Kind {
    Swiglu,
    SigmoidGate,
}

/// `y = activation(a) * b`
struct Product<'a, 'w> {
    a: Rows<'a>,
    b: Rows<'a>,
    y: RowsMut<'a>,
    kind: Kind,
    worker: &'a Worker<'w>,
}

impl VectorKernel for Product<'_, '_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let blocks = self.y.width().div_ceil(GRAIN_COLUMNS);
        for unit in self.worker.claim(self.y.len() * blocks, 1).flatten() {
            let (t, block) = (unit / blocks, unit % blocks);
            let columns = block * GRAIN_COLUMNS..((block + 1) * GRAIN_COLUMNS).min(self.y.width());
            let (a, b) = (&self.a.row(t)[columns.clone()], &self.b.row(t)[columns.clone()]);
            // SAFETY: each block of each row is claimed once.
            let y = unsafe { self.y.part(t, columns) };
            match self.kind {
                Kind::Swiglu => lanes!(s, y, [a = a, b = b] => s.mul(silu(s, a), b)),
                Kind::SigmoidGate => lanes!(s, y, [a = a, b = b] => s.mul(sigmoid(s, a), b)),
            }
        }
    }
}
