//! Products whose activations a backend may round to 8 bits or not. Each way has an oracle, and a result follows one.

use super::download;
use crate::compare::mean_distance;
use crate::naive::linear::quantized_activations;
use crate::tolerance;
use keel_array::Array;

/// Typical size of a sum of `k` products with random signs.
pub(super) fn typical_sum(x: &[f32], w: &[f32], k: usize) -> f64 {
    let mean_square = |x: &[f32]| x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / x.len() as f64;
    (k as f64 * mean_square(x) * mean_square(w)).sqrt()
}

/// Asserts that y follows one oracle in the mean: the product of x as it is, or of x rounded to 8 bits in groups of one
/// of these sizes. `typical` is the typical sum. A single element says little: rounding moves each by a different part
/// of a step.
#[track_caller]
pub(super) fn expect_nearest(
    what: &str,
    y: &Array,
    x: &[f32],
    groups: &[usize],
    typical: f64,
    product: impl Fn(&[f32]) -> Vec<f64>,
) {
    let y = download(y);
    let rounded =
        groups.iter().map(|&group| (format!("in groups of {group}"), quantized_activations(x, group)));
    let mut distances = Vec::new();
    // Oracles take long, so those after the first that fits are not asked.
    for (form, x) in rounded.chain([("not rounded".to_owned(), x.to_vec())]) {
        let distance = mean_distance(&y, &product(&x)) / typical;
        if distance <= tolerance::OF_THE_NEAREST {
            return;
        }
        distances.push(format!("{form} {distance:.1e}"));
    }
    panic!(
        "{what}: mean distance from the oracles in typical sums, by how they round activations: {}; {:.0e} allowed",
        distances.join(", "),
        tolerance::OF_THE_NEAREST
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::linear::weights;
    use crate::naive::linear::linear;
    use crate::random::Random;

    /// Activations of seven bits follow no oracle, those of eight and of 16 follow one.
    #[test]
    fn a_lost_bit_of_activations_is_far_from_every_oracle() {
        let mut random = Random::new(1);
        let (n, k, group) = (64, 512, 64);
        let (w, x) = (weights(&mut random, n, k, 4, group), random.uniforms(8 * k, -1.0, 1.0));
        let typical = typical_sum(&x, &w.weights(), k);
        let in_bits = |bits: i32| -> Vec<f32> {
            let steps = (1 << (bits - 1)) as f32 - 1.0;
            let round = |group: &[f32]| {
                let top = group.iter().fold(0.0f32, |top, x| top.max(x.abs()));
                group.iter().map(|x| (x * steps / top).round() * top / steps).collect::<Vec<_>>()
            };
            x.chunks_exact(group).flat_map(round).collect()
        };
        let oracles = [linear(&x, &w), linear(&quantized_activations(&x, group), &w)];
        let nearest = |x: &[f32]| {
            let y = linear(x, &w);
            oracles.iter().map(|want| mean_distance(&y, want) / typical).fold(f64::INFINITY, f64::min)
        };
        assert!(nearest(&in_bits(8)) <= tolerance::OF_THE_NEAREST / 10.0, "{}", nearest(&in_bits(8)));
        assert!(nearest(&in_bits(16)) <= tolerance::OF_THE_NEAREST / 10.0, "{}", nearest(&in_bits(16)));
        assert!(nearest(&in_bits(7)) >= 2.0 * tolerance::OF_THE_NEAREST, "{}", nearest(&in_bits(7)));
    }
}
