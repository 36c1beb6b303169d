//! Chains of element-wise float operations in one pass.
//!
//! This is an interpreter: each step works on a block of 256 elements before the next step starts. So the cost of a
//! step's dispatch is spread over 256 elements, and values between steps stay in the first-level cache. A single
//! operation is a chain of one step, so fusing never changes a bit. Chains of f16 and bf16 have one step each, rounded
//! as they are stored.
//!
//! Memory: each input is read once and the output written once.

use super::scalar::{Scalar, widen};
use super::strided::Strided;
use super::{BLOCK, GRAIN};
use crate::isa::Isa;
use crate::pool::Worker;
use crate::shared_slice::SharedMut;
use crate::simd::{self, Simd, VectorKernel, exp, lanes, sigmoid, silu};
use keel_array::{Binary, Fused, FusedStep, Source, Unary};
use std::cell::RefCell;

/// Most values of a chain: the inputs and steps of the longest chain that programs build.
const VALUES_MAX: usize = Fused::INPUTS_MAX + Fused::STEPS_MAX;

thread_local! {
    /// A block of every value.
    static VALUES: RefCell<[[f32; BLOCK]; VALUES_MAX]> = const { RefCell::new([[0.0; BLOCK]; VALUES_MAX]) };
}

/// `y = steps(inputs)`: the last step's value.
///
/// # Panics
/// If the lengths differ, or there are more inputs or steps than programs build.
pub fn chain<T: Scalar>(
    steps: &[FusedStep],
    inputs: &[Strided<'_, T>],
    y: SharedMut<'_, T>,
    isa: Isa,
    worker: &Worker<'_>,
) {
    assert!(!steps.is_empty() && inputs.iter().all(|x| x.len() == y.len()));
    VALUES.with_borrow_mut(|values| {
        simd::run_at(
            isa,
            Chain { steps, inputs, y, values: &mut values[..inputs.len() + steps.len()], worker },
        );
    });
}

struct Chain<'a, 'w, T> {
    steps: &'a [FusedStep],
    inputs: &'a [Strided<'a, T>],
    y: SharedMut<'a, T>,
    values: &'a mut [[f32; BLOCK]],
    worker: &'a Worker<'w>,
}

impl<T: Scalar> VectorKernel for Chain<'_, '_, T> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let count = self.inputs.len();
        let mut narrow = [T::default(); BLOCK];
        for range in self.worker.claim(self.y.len(), GRAIN) {
            for start in range.clone().step_by(BLOCK) {
                let len = BLOCK.min(range.end - start);
                for (x, value) in self.inputs.iter().zip(&mut *self.values) {
                    x.read(start, &mut narrow[..len]);
                    widen(&narrow[..len], value);
                }
                for (i, step) in self.steps.iter().enumerate() {
                    let (earlier, later) = self.values.split_at_mut(count + i);
                    let value = |source: Source| match source {
                        Source::Input(i) => &earlier[i][..len],
                        Source::Step(i) => &earlier[count + i][..len],
                    };
                    match *step {
                        FusedStep::Unary(op, a) => unary(s, op, value(a), &mut later[0][..len]),
                        FusedStep::Binary(op, a, b) => binary(op, value(a), value(b), &mut later[0][..len]),
                    }
                }
                // SAFETY: each range is claimed once.
                let y = unsafe { self.y.range(start..start + len) };
                let result = &self.values[count + self.steps.len() - 1];
                y.iter_mut().zip(result).for_each(|(y, x)| *y = T::from_f32(*x));
            }
        }
    }
}

#[inline(always)]
fn map(x: &[f32], y: &mut [f32], f: impl Fn(f32) -> f32) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y = f(*x));
}

#[inline(always)]
fn unary<S: Simd>(s: S, op: Unary, x: &[f32], y: &mut [f32]) {
    match op {
        Unary::Neg => map(x, y, |x| -x),
        Unary::Abs => map(x, y, f32::abs),
        Unary::Sqrt => map(x, y, f32::sqrt),
        Unary::Rsqrt => map(x, y, |x| 1.0 / x.sqrt()),
        Unary::Exp => lanes!(s, y, [x = x] => exp(s, x)),
        Unary::Sigmoid => lanes!(s, y, [x = x] => sigmoid(s, x)),
        Unary::Silu => lanes!(s, y, [x = x] => silu(s, x)),
        // 0.5 (1 + tanh u) = sigmoid(2 u)
        Unary::GeluTanh => lanes!(s, y, [x = x] => {
            let cube = s.mul(s.mul(x, x), s.mul(x, s.splat(0.044_715)));
            s.mul(x, sigmoid(s, s.mul(s.add(x, cube), s.splat(2.0 * 0.797_884_6))))
        }),
        Unary::Gelu => lanes!(s, y, [x = x] => gelu(s, x)),
        Unary::Log => map(x, y, f32::ln),
        Unary::Sin => map(x, y, f32::sin),
        Unary::Cos => map(x, y, f32::cos),
        Unary::Tanh => map(x, y, f32::tanh),
        Unary::Softplus => map(x, y, softplus),
        Unary::Not => unreachable!("not is for flags"),
    }
}

/// `0.5 x (1 + erf(x / sqrt 2))`. erf is the quotient of two polynomials that Eigen uses for f32: within a few units in
/// the last place for arguments up to 4 in size. Larger arguments are clamped to that size, where |erf| is 1 in f32.
/// The quotient there is not quite -1. That error would grow with x, so the result below is zero.
#[inline(always)]
fn gelu<S: Simd>(s: S, x: S::V) -> S::V {
    const ABOVE: [f32; 7] = [
        -2.726_142_3e-10,
        2.770_681_4e-8,
        -2.101_024e-6,
        -5.692_506e-5,
        -7.349_906e-4,
        -2.954_6e-3,
        -1.609_603_3e-2,
    ];
    const BELOW: [f32; 5] = [-1.456_607_2e-5, -2.133_740_5e-4, -1.682_827e-3, -7.373_329e-3, -1.426_473_9e-2];
    let z = s.mul(x, s.splat(std::f32::consts::FRAC_1_SQRT_2));
    // A minimum, as a maximum between two negations.
    let zero = s.splat(0.0);
    let top = s.sub(zero, s.max(s.sub(zero, z), s.splat(-4.0)));
    let clamped = s.max(top, s.splat(-4.0));
    let square = s.mul(clamped, clamped);
    let of = |coefficients: &[f32]| {
        coefficients[1..]
            .iter()
            .fold(s.splat(coefficients[0]), |sum, c| s.add(s.mul(sum, square), s.splat(*c)))
    };
    let erf = s.div(s.mul(clamped, of(&ABOVE)), of(&BELOW));
    let y = s.mul(s.mul(s.splat(0.5), x), s.add(s.splat(1.0), erf));
    s.select_lt(z, s.splat(-4.0), zero, y)
}

/// `ln(1 + e^x)`; above 20 it equals x in f32.
fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

#[inline(always)]
fn zip(a: &[f32], b: &[f32], y: &mut [f32], f: impl Fn(f32, f32) -> f32) {
    y.iter_mut().zip(a.iter().zip(b)).for_each(|(y, (a, b))| *y = f(*a, *b));
}

#[inline(always)]
fn binary(op: Binary, a: &[f32], b: &[f32], y: &mut [f32]) {
    match op {
        Binary::Add => zip(a, b, y, |a, b| a + b),
        Binary::Sub => zip(a, b, y, |a, b| a - b),
        Binary::Mul => zip(a, b, y, |a, b| a * b),
        Binary::Div => zip(a, b, y, |a, b| a / b),
        // NaN on the left is tested for. With NaN on the right the comparison is false, so NaN is the result, too.
        Binary::Max => zip(a, b, y, |a, b| if a > b || a.is_nan() { a } else { b }),
        Binary::Min => zip(a, b, y, |a, b| if a < b || a.is_nan() { a } else { b }),
        Binary::Pow => zip(a, b, y, f32::powf),
        other => unreachable!("{} does not give a float", other.name()),
    }
}
