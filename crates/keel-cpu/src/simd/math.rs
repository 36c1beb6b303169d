//! The exponential and functions built on it: the same polynomial, with the same rounding, at every level.

use super::Simd;

/// Adding this to a float below 2^22 in size rounds it to an integer, which then stands in the low bits.
const ROUND: f32 = 12_582_912.0;
/// ln 2 in two parts; the first has few enough bits that `n * LN2_HIGH` is exact.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// Below this the result is not a normal number: it is flushed to zero.
const UNDERFLOW: f32 = -87.336_5;
/// From here on the result is infinite.
const OVERFLOW: f32 = 88.722_84;
/// Coefficients of `(e^r - 1 - r) / r^2` for |r| <= ln 2 / 2. The largest relative error of `e^r` is the least: 3.1e-9.
const TAIL: [f32; 5] = [0.499_999_94, 0.166_665_21, 0.041_668_39, 0.008_368_72, 0.001_381_46];

/// `e^x` to two units in the last place. Results below 2^-126 are zero; NaN stays NaN.
///
/// `x = n ln 2 + r` with an integer `n` and |r| <= ln 2 / 2; then `n` is added to the exponent of `e^r`.
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    let shifted = s.fma(x, s.splat(std::f32::consts::LOG2_E), s.splat(ROUND));
    let n = s.sub(shifted, s.splat(ROUND));
    let r = s.fnma(n, s.splat(LN2_LOW), s.fnma(n, s.splat(LN2_HIGH), x));
    let mut tail = s.splat(TAIL[4]);
    for c in [TAIL[3], TAIL[2], TAIL[1], TAIL[0]] {
        tail = s.fma(tail, r, s.splat(c));
    }
    let p = s.fma(s.mul(r, r), tail, s.add(r, s.splat(1.0)));
    let result = s.add_to_exponent(p, shifted);
    // Infinity times a positive x is infinite; a NaN stays one.
    let result = s.select_lt(x, s.splat(OVERFLOW), result, s.mul(x, s.splat(f32::INFINITY)));
    s.select_lt(x, s.splat(UNDERFLOW), s.splat(0.0), result)
}

/// `1 / (1 + e^-x)`
#[inline(always)]
pub(crate) fn sigmoid<S: Simd>(s: S, x: S::V) -> S::V {
    let e = exp(s, s.sub(s.splat(0.0), x));
    s.div(s.splat(1.0), s.add(s.splat(1.0), e))
}

/// `x / (1 + e^-x)`
#[inline(always)]
pub(crate) fn silu<S: Simd>(s: S, x: S::V) -> S::V {
    let e = exp(s, s.sub(s.splat(0.0), x));
    s.div(x, s.add(s.splat(1.0), e))
}

#[cfg(test)]
mod tests {
    use super::super::{LANES, VectorKernel, run_at};
    use super::*;
    use crate::isa::Isa;

    struct Map<'a, F>(&'a [f32], &'a mut [f32], F);

    /// A function to map; a trait of our own because closures cannot be generic.
    trait Function {
        fn of<S: Simd>(&self, s: S, x: S::V) -> S::V;
    }
    struct Exp;
    impl Function for Exp {
        #[inline(always)]
        fn of<S: Simd>(&self, s: S, x: S::V) -> S::V {
            exp(s, x)
        }
    }
    struct Silu;
    impl Function for Silu {
        #[inline(always)]
        fn of<S: Simd>(&self, s: S, x: S::V) -> S::V {
            silu(s, x)
        }
    }
    impl<F: Function> VectorKernel for Map<'_, F> {
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            super::super::lanes!(s, self.1, [x = self.0] => self.2.of(s, x));
        }
    }

    fn exp_at(isa: Isa, x: &[f32]) -> Vec<f32> {
        let mut y = vec![0.0; x.len()];
        run_at(isa, Map(x, &mut y, Exp));
        y
    }

    #[test]
    fn exp_is_within_two_units_in_the_last_place_over_its_range() {
        // Every 97th float of both signs whose exponential is a normal number.
        let x: Vec<f32> = (0..0x42b1_7218u32)
            .step_by(97)
            .flat_map(|bits| [f32::from_bits(bits), -f32::from_bits(bits)])
            .filter(|x| (UNDERFLOW..OVERFLOW).contains(x))
            .collect();
        assert!(x.len() > 20_000_000);
        let mut worst = (0.0, 0.0);
        for (x, y) in x.iter().zip(exp_at(Isa::best(), &x)) {
            let exact = f64::from(*x).exp();
            let ulp = f64::from(f32::from_bits((exact as f32).to_bits() + 1)) - f64::from(exact as f32);
            let error = ((f64::from(y) - exact) / ulp).abs();
            // A NaN is worse than every number.
            let error = if error.is_nan() { f64::INFINITY } else { error };
            worst = if error > worst.0 { (error, *x) } else { worst };
        }
        assert!(worst.0 <= 2.0, "{} ulp at {}", worst.0, worst.1);
    }

    #[test]
    fn exp_of_the_special_values() {
        let x = [f32::NEG_INFINITY, -1e30, -87.4, 0.0, -0.0, 88.73, f32::INFINITY, f32::NAN];
        for isa in Isa::available() {
            let y = exp_at(isa, &x);
            assert_eq!(y[..7], [0.0, 0.0, 0.0, 1.0, 1.0, f32::INFINITY, f32::INFINITY], "{isa}");
            assert!(y[7].is_nan());
        }
    }

    #[test]
    fn all_levels_and_lanes_give_the_same_bits() {
        let x: Vec<f32> = (0..4001).map(|i| (i as f32 - 2000.0) * 0.0441).collect();
        let whole = exp_at(Isa::Portable, &x);
        for isa in Isa::available() {
            assert_eq!(exp_at(isa, &x), whole, "{isa}");
            // Shifted by one, so that each value sits in another lane.
            assert_eq!(exp_at(isa, &x[1..]), whole[1..], "{isa}");
        }
    }

    #[test]
    fn silu_follows_its_formula_and_keeps_its_limits() {
        let x: [f32; LANES + 2] = std::array::from_fn(|i| (i as f32 - 9.0) * 1.9);
        let mut y = [0.0; LANES + 2];
        run_at(Isa::best(), Map(&x, &mut y, Silu));
        for (x, y) in x.iter().zip(y) {
            let exact = f64::from(*x) / (1.0 + (-f64::from(*x)).exp());
            assert!((f64::from(y) - exact).abs() <= 4e-7 * exact.abs(), "silu({x}) = {y}, want {exact}");
        }
        let mut limits = [1.0; 3];
        run_at(Isa::best(), Map(&[-200.0, 200.0, 0.0], &mut limits, Silu));
        assert_eq!(limits, [0.0, 200.0, 0.0]);
    }
}
