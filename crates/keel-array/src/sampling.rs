//! Definition of drawing a token, to the bit.
//!
//! Candidates are the finite logits `l` of a row, the greatest first; among equals the lower id first. The weight of
//! each is `2^40 e^((l - max) / temperature)`, rounded; 0 if the exponent is below -27.75. Weights are whole numbers,
//! so their sums do not depend on the order of summation. `e^x` consists of operations that all devices round alike. So
//! all devices draw the same token from the same logits.
//!
//! 1. `mass` = the weight of the first `top_k` candidates together; of all if `top_k` is 0.
//! 2. `kept` = the weight of the shortest run of first candidates with at least `top_p * mass`; `mass` if `top_p` is 1.
//! 3. `kept` becomes the weight of the candidates with `(l - max) / temperature >= ln(min_p)`, if that is less.
//! 4. The token is the first candidate whose weight, added to those before it, exceeds `floor(uniform * kept)`.
//!
//! A row without a candidate gives 0. At temperature 0 the token has the greatest logit, infinities included, the first
//! among equals; NaN counts as less than every number.

/// How a token is drawn from a row of logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// Divides the logits; at least 0. 0 takes the greatest logit.
    pub temperature: f32,
    /// Number of candidates to keep; 0 keeps all.
    pub top_k: usize,
    /// Keeps the first candidates that have this share of the weight, above 0; 1 keeps all.
    pub top_p: f32,
    /// Keeps candidates at least this many times as probable as the first, at most 1; 0 keeps all.
    pub min_p: f32,
    /// The random number, in `[0, 1)`.
    pub uniform: f32,
}

impl Draw {
    /// Takes the greatest logit.
    pub const GREATEST: Draw = Draw { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, uniform: 0.0 };

    /// Words of a row of the second operand of [`crate::Array::sample`].
    pub const WORDS: usize = 5;

    /// The words of a row from which nothing is drawn.
    pub const NOTHING: [f32; Draw::WORDS] = [-1.0, 0.0, 1.0, f32::NEG_INFINITY, 0.0];

    /// Widest row. Sums of its weights fit into 64 bits, and f32 holds any smaller `top_k` exactly.
    pub const WIDTH_MAX: usize = 1 << 22;

    /// Temperature, top-k, top-p, `ln(min_p)`, and the uniform number.
    pub fn words(&self) -> [f32; Draw::WORDS] {
        let top_k = self.top_k.min(Draw::WIDTH_MAX) as f32;
        [self.temperature, top_k, self.top_p, self.min_p.ln(), self.uniform]
    }
}

/// The greatest of the numbers that count, or negative infinity. NaN does not count.
#[inline(always)]
pub fn greatest(x: &[f32], counts: impl Fn(f32) -> bool) -> f32 {
    // 32 independent maxima, which the compiler turns into vectors. With an index in each comparison it
    // would not.
    let mut greatest = [f32::NEG_INFINITY; 32];
    for chunk in x.chunks(greatest.len()) {
        for (greatest, &x) in greatest.iter_mut().zip(chunk) {
            *greatest = if x > *greatest && counts(x) { x } else { *greatest };
        }
    }
    greatest.into_iter().fold(f32::NEG_INFINITY, f32::max)
}

/// The least `(l - max) / temperature` with a weight above 0: `2^40 e^-27.75` is 0.98.
pub const EXPONENT_MIN: f32 = -27.75;

/// The weight of a candidate whose `(l - max) / temperature` is `x`, which is at most 0.
#[inline]
pub fn weight(x: f32) -> u64 {
    // Adding this rounds to the nearest whole number (to even on a tie) and leaves it in the low bits.
    const ROUND: f64 = (1u64 << 52) as f64;
    let rounded = (f64::from(exp(x)) * (1u64 << 40) as f64 + ROUND).to_bits() & ((1 << 52) - 1);
    if x >= EXPONENT_MIN { rounded } else { 0 }
}

/// `e^x` for x from [`EXPONENT_MIN`] to 0, to three units in the last place. Each product and sum is rounded
/// separately.
#[inline]
pub fn exp(x: f32) -> f32 {
    // Adding this rounds to a whole number and leaves it in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts. The first has few bits, so its product with a small whole number is exact.
    const LN2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    // (e^r - 1 - r) / r^2 for |r| <= ln 2 / 2.
    const TAIL: [f32; 5] = [0.001_381_46, 0.008_368_72, 0.041_668_39, 0.166_665_21, 0.499_999_94];
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN2[0]) - n * LN2[1];
    let tail = (((TAIL[0] * r + TAIL[1]) * r + TAIL[2]) * r + TAIL[3]) * r + TAIL[4];
    let power = 1.0 + (r + (r * r) * tail);
    f32::from_bits(power.to_bits().wrapping_add(shifted.to_bits() << 23))
}

/// Sort key: greater for an earlier candidate. -0 equals 0; NaN comes last.
#[inline]
pub fn order(logit: f32, id: u32) -> u64 {
    let bits = (logit + 0.0).to_bits();
    let key = match () {
        () if logit.is_nan() => 0,
        () if bits >> 31 == 1 => !bits,
        () => bits | 1 << 31,
    };
    u64::from(key) << 32 | u64::from(!id)
}

/// The id within an [`order`].
pub fn id_of(order: u64) -> u32 {
    !(order as u32)
}

/// The least weight that is the share `top_p` of `mass`; at least 1.
pub fn enough(top_p: f32, mass: u64) -> u64 {
    ((f64::from(top_p) * mass as f64).ceil() as u64).clamp(1, mass.max(1))
}

/// The weight that candidates up to the drawn one must exceed; less than `kept`.
pub fn target(uniform: f32, kept: u64) -> u64 {
    ((f64::from(uniform) * kept as f64) as u64).min(kept.saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_follow_the_exponential() {
        let mut worst = 0.0f64;
        for i in 0..=2_775_000 {
            let x = i as f32 * -1e-5;
            let exact = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) / exact - 1.0).abs());
            assert!((weight(x) as f64 - exact * 2f64.powi(40)).abs() <= 1.0 + exact * 2f64.powi(18), "{x}");
        }
        assert!(worst < 3.0 * 2f64.powi(-23), "{worst}");
        assert_eq!([weight(0.0), weight(-0.0)], [1 << 40; 2]);
        assert_eq!([weight(-27.8), weight(f32::NEG_INFINITY), weight(f32::NAN)], [0; 3]);
        assert_eq!(weight(EXPONENT_MIN), 1);
    }

    #[test]
    fn order_is_by_value_then_by_id() {
        let ascending = [f32::NAN, f32::NEG_INFINITY, -2.0, -1e-40, 0.0, 1e-40, 2.0, f32::INFINITY];
        for pair in ascending.windows(2) {
            assert!(order(pair[0], 0) < order(pair[1], 9), "{pair:?}");
            assert!(order(pair[0], 1) < order(pair[0], 0));
        }
        assert_eq!(order(-0.0, 7), order(0.0, 7));
        assert_eq!(id_of(order(-3.5, 77)), 77);
    }

    #[test]
    fn shares_stay_within_the_mass() {
        assert_eq!([enough(1e-30, 5), enough(0.5, 5), enough(1.0, 5), enough(1.0, 0)], [1, 3, 5, 1]);
        let last = 1.0 - f32::EPSILON / 2.0;
        assert_eq!(
            [target(0.0, 5), target(0.5, 5), target(last, 1), target(last, u64::MAX >> 2)][..3],
            [0, 2, 0]
        );
        assert!(target(last, 3) == 2 && target(0.0, 0) == 0);
    }
}
