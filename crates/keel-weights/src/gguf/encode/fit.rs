//! Searches for steps and offsets that leave a small rounding error.

/// Grids tried on each side of the plain grid.
const TRIES: i32 = 9;
/// Difference between the spans of neighbouring grids, in levels.
const STRIDE: f32 = 0.1;

/// A step `d` for which `d * q` with whole `q` in `low..=high` has a small mean square error; 0 if all values are zero.
///
/// The value of largest magnitude lies on the longer side of the levels, so `|low|` must be at least `|high|`. The
/// plain step and a few near it each give levels; the best step for each set of levels is computed, and the best of all
/// is taken.
pub(super) fn symmetric(values: &[f32], low: i32, high: i32) -> f32 {
    let extreme = values.iter().copied().fold(0.0f32, |a, b| if b.abs() > a.abs() { b } else { a });
    if extreme == 0.0 {
        return 0.0;
    }
    let (mut best, mut best_gain) = (extreme / low as f32, f32::NEG_INFINITY);
    for i in -TRIES..=TRIES {
        let inverse = (low as f32 + i as f32 * STRIDE) / extreme;
        let (mut xq, mut qq) = (0.0f32, 0.0f32);
        for x in values {
            let q = level(x * inverse, low, high);
            xq += x * q;
            qq += q * q;
        }
        // How much the best step for these levels reduces the sum of squares.
        let gain = xq * xq / qq;
        if gain > best_gain {
            (best, best_gain) = (xq / qq, gain);
        }
    }
    if best.is_finite() { best } else { extreme / low as f32 }
}

/// A value with level `q` is `step * q - offset`. Neither is negative.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Fit {
    pub step: f32,
    pub offset: f32,
}

/// The step and the offset for which whole levels in `0..=high` have a small mean square error.
pub(super) fn offset(values: &[f32], high: i32) -> Fit {
    let low = values.iter().copied().fold(0.0f32, f32::min);
    let top = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let span = top - low;
    if span <= 0.0 {
        return Fit { step: 0.0, offset: -low };
    }
    let plain = Fit { step: span / high as f32, offset: -low };
    let (mut best, mut best_error) = (plain, error(values, plain, high));
    for i in -TRIES..=TRIES {
        let inverse = (high as f32 + i as f32 * STRIDE) / span;
        let Some(found) = least_squares(values, |x| level((x - low) * inverse, 0, high)) else { continue };
        let left = error(values, found, high);
        if left < best_error {
            (best, best_error) = (found, left);
        }
    }
    best
}

/// The step and offset with the least squared error for these levels; `None` if no step above zero has.
fn least_squares(values: &[f32], level: impl Fn(f32) -> f32) -> Option<Fit> {
    let n = values.len() as f32;
    let (mut q1, mut q2, mut x1, mut xq) = (0.0f32, 0.0f32, 0.0f32, 0.0f32);
    for &x in values {
        let q = level(x);
        q1 += q;
        q2 += q * q;
        x1 += x;
        xq += x * q;
    }
    let step = (n * xq - x1 * q1) / (n * q2 - q1 * q1);
    let offset = (step * q1 - x1) / n;
    // An offset must not be negative. Instead, fit the step with offset 0.
    let (step, offset) = if offset < 0.0 { (xq / q2, 0.0) } else { (step, offset) };
    (step > 0.0 && step.is_finite() && offset.is_finite()).then_some(Fit { step, offset })
}

/// The sum of squared errors of a fit.
fn error(values: &[f32], Fit { step, offset }: Fit, high: i32) -> f32 {
    let left = |x: &f32| x - (step * level((x + offset) / step, 0, high) - offset);
    values.iter().map(|x| left(x).powi(2)).sum()
}

/// The nearest level.
pub(super) fn level(x: f32, low: i32, high: i32) -> f32 {
    x.round_ties_even().clamp(low as f32, high as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_on_a_grid_are_met() {
        let on_grid: Vec<f32> = (-8..8).map(|q| q as f32 * 0.3).collect();
        assert!((symmetric(&on_grid, -8, 7).abs() - 0.3).abs() < 1e-6);
        let turned: Vec<f32> = on_grid.iter().map(|x| -x).collect();
        assert!((symmetric(&turned, -8, 7) + 0.3).abs() < 1e-6, "the largest value takes the longer side");
        let shifted: Vec<f32> = (0..16).map(|q| q as f32 * 0.25 - 1.5).collect();
        let Fit { step, offset } = offset(&shifted, 15);
        assert!((step - 0.25).abs() < 1e-6 && (offset - 1.5).abs() < 1e-5, "{step} {offset}");
    }

    #[test]
    fn what_has_no_span_needs_no_step() {
        assert_eq!(symmetric(&[0.0; 4], -8, 7), 0.0);
        assert_eq!(offset(&[-2.0; 4], 15), Fit { step: 0.0, offset: 2.0 });
        // An offset is never negative, so the range of positive values is extended down to zero.
        let Fit { step, offset } = offset(&[3.0; 4], 15);
        assert_eq!(offset, 0.0);
        assert!((step * level(3.0 / step, 0, 15) - 3.0).abs() < 1e-6);
    }
}
