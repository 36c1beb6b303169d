//! Compares a kernel's result with an oracle's.

/// Asserts that every element of `got` is within `tolerance` of `want`, relative to the largest element of `want`.
///
/// # Panics
/// If not, or if the lengths differ; the message names the worst element.
#[track_caller]
pub fn assert_close(what: &str, got: &[f32], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}: number of elements");
    let scale = want.iter().fold(f64::MIN_POSITIVE, |scale, x| scale.max(x.abs()));
    let error = |i: usize| (f64::from(got[i]) - want[i]).abs() / scale;
    let key = |i: usize| or_infinite(error(i));
    let Some(worst) = (0..got.len()).max_by(|&a, &b| key(a).total_cmp(&key(b))) else { return };
    assert!(
        key(worst) <= tolerance,
        "{what}: element {worst} of {} is {:e}, want {:e}: error {:.2e} of the largest ({scale:e}), tolerance {tolerance:.0e}",
        got.len(),
        got[worst],
        want[worst],
        error(worst),
    );
}

/// Asserts that every element of `got` is within `tolerance` of the same element of `want`, relative to that element,
/// or to `small` where the element is smaller. Infinity is near infinity alone.
///
/// # Panics
/// If not, or if the lengths differ; the message names the worst element.
#[track_caller]
pub fn assert_each_close(what: &str, got: &[f32], want: &[f64], tolerance: f64, small: f64) {
    assert_eq!(got.len(), want.len(), "{what}: number of elements");
    let error = |i: usize| {
        let (got, want) = (f64::from(got[i]), want[i]);
        let error = (got - want).abs() / want.abs().max(small);
        if got == want { 0.0 } else { or_infinite(error) }
    };
    let Some(worst) = (0..got.len()).max_by(|&a, &b| error(a).total_cmp(&error(b))) else { return };
    assert!(
        error(worst) <= tolerance,
        "{what}: element {worst} of {} is {:e}, want {:e}: error {:.2e} of the larger of it and {small:e}, tolerance {tolerance:.0e}",
        got.len(),
        got[worst],
        want[worst],
        error(worst),
    );
}

/// The largest distance between elements. One that is not a number is infinite.
pub fn largest_distance(got: &[f64], want: &[f64]) -> f64 {
    got.iter().zip(want).map(|(got, want)| or_infinite((got - want).abs())).fold(0.0, f64::max)
}

/// The square root of the mean square of the distances between elements. NaN if an element is not a number.
///
/// # Panics
/// If the lengths differ.
pub fn mean_distance(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let squares: f64 = got.iter().zip(want).map(|(got, want)| (got - want).powi(2)).sum();
    (squares / got.len() as f64).sqrt()
}

/// A NaN is worse than every number.
fn or_infinite(error: f64) -> f64 {
    if error.is_nan() { f64::INFINITY } else { error }
}

/// Asserts that two results have the same bits.
///
/// # Panics
/// If not; the message names the first element that differs.
#[track_caller]
pub fn assert_same_bits(what: &str, a: &[f32], b: &[f32]) {
    assert_eq!(a.len(), b.len(), "{what}: number of elements");
    if let Some(i) = (0..a.len()).find(|&i| a[i].to_bits() != b[i].to_bits()) {
        panic!("{what}: element {i} of {} is {:e} in one and {:e} in the other", a.len(), a[i], b[i]);
    }
}

/// Norm of the difference, divided by the norm of `want`.
///
/// # Panics
/// If the lengths differ.
pub fn relative_error(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let square = |x: f64| x * x;
    let difference: f64 = got.iter().zip(want).map(|(a, b)| square(f64::from(*a) - f64::from(*b))).sum();
    let size: f64 = want.iter().map(|b| square(f64::from(*b))).sum();
    (difference / size).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "element 1 of 3 is 2.1e0, want 2e0: error 2.50e-2 of the largest (4e0)")]
    fn a_wrong_element_is_named() {
        assert_close("planted", &[1.0, 2.1, 4.0], &[1.0, 2.0, 4.0], 1e-3);
    }

    #[test]
    #[should_panic(expected = "element 2 of 3")]
    fn not_a_number_is_never_close() {
        assert_close("planted", &[1.0, 2.1, f32::NAN], &[1.0, 2.0, 4.0], 1.0);
    }

    #[test]
    #[should_panic(expected = "element 0 of 2 is 1.1e-3, want 1e-3: error 1.00e-1 of the larger")]
    fn a_small_element_is_held_to_its_own_size() {
        assert_each_close("planted", &[1.1e-3, 1e3], &[1e-3, 1e3], 1e-3, 1e-6);
    }

    #[test]
    #[should_panic(expected = "element 2 of 3 is 3.4028235e38, want inf: error inf")]
    fn no_number_is_close_to_infinity() {
        let got = [0.0, f32::INFINITY, f32::MAX];
        assert_each_close("planted", &got, &[1e-9, f64::INFINITY, f64::INFINITY], 1e-3, 1e-6);
    }

    #[test]
    fn not_a_number_is_far_from_everything() {
        assert_eq!(largest_distance(&[1.0, f64::NAN, 2.0], &[1.0; 3]), f64::INFINITY);
        assert_eq!(largest_distance(&[1.0, 3.0, 2.0], &[1.0; 3]), 2.0);
    }

    #[test]
    fn large_distances_weigh_most_in_the_mean() {
        assert_eq!(mean_distance(&[1.0, 2.0, 3.0, 8.0], &[1.0, 2.0, 3.0, 4.0]), 2.0);
        assert!(mean_distance(&[1.0, f64::NAN], &[1.0, 2.0]).is_nan());
    }

    #[test]
    #[should_panic(expected = "element 1 of 2 is 0e0 in one and -0e0 in the other")]
    fn zeros_of_different_sign_differ() {
        assert_same_bits("planted", &[1.0, 0.0], &[1.0, -0.0]);
    }
}
