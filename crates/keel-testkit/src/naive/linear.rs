//! Products with affine weights, `w = scale * q + bias`, with one scale and bias for each group of inputs.

use super::matmul::matmul_transposed;

/// Affine weights `[N, K]`, unpacked.
#[derive(Clone, Debug)]
pub struct Affine {
    /// Inputs in a row.
    pub k: usize,
    /// Inputs in a group.
    pub group: usize,
    /// `[N, K]`
    pub quants: Vec<u8>,
    /// `[N, K / group]`
    pub scales: Vec<f32>,
    /// `[N, K / group]`
    pub biases: Vec<f32>,
}

impl Affine {
    /// The weights, computed in f64 and rounded to f32.
    pub fn weights(&self) -> Vec<f32> {
        let weight = |i: usize| {
            let g = i / self.group;
            (f64::from(self.scales[g]) * f64::from(self.quants[i]) + f64::from(self.biases[g])) as f32
        };
        (0..self.quants.len()).map(weight).collect()
    }

    /// The greatest magnitude that each row's scales and biases can express with codes of this number of bits.
    fn magnitudes(&self, bits: usize) -> Vec<f32> {
        let last = ((1 << bits) - 1) as f32;
        let pairs = self.scales.iter().zip(&self.biases);
        let of_group: Vec<f32> = pairs.map(|(s, b)| b.abs().max((s * last + b).abs())).collect();
        of_group
            .chunks_exact(self.k / self.group)
            .map(|row| row.iter().fold(0.0, |top, x| x.max(top)))
            .collect()
    }
}

/// `y[t, n] = sum over k of x[t, k] * w[n, k]`, with x `[T, K]`.
pub fn linear(x: &[f32], w: &Affine) -> Vec<f64> {
    matmul_transposed(x, &w.weights(), w.k)
}

/// `y[r] = x[r / fanout] w[experts[r]]^T`. `fanout` is the number of rows of y for each row of x. All experts have the
/// shape of the first.
pub fn gather_linear(x: &[f32], experts: &[Affine], choice: &[u32]) -> Vec<f64> {
    let k = experts[0].k;
    let fanout = choice.len() / (x.len() / k);
    let row = |r: usize| &x[r / fanout * k..(r / fanout + 1) * k];
    choice.iter().enumerate().flat_map(|(r, e)| linear(row(r), &experts[*e as usize])).collect()
}

/// As [`gather_linear`], with the weights of a stack `[E, N, K]` as they are.
pub fn gather_stack(x: &[f32], stack: &[f32], [experts, k]: [usize; 2], choice: &[u32]) -> Vec<f64> {
    let (all, n) = (matmul_transposed(x, stack, k), stack.len() / experts / k);
    let fanout = choice.len() / (x.len() / k);
    let row = |(r, e): (usize, &u32)| all[(r / fanout * experts + *e as usize) * n..][..n].to_vec();
    choice.iter().enumerate().flat_map(row).collect()
}

/// Values after rounding to 8-bit floats (e4m3: 3 bits of mantissa, exponents from -6, at most 448), ties to even. Each
/// row of `width` values has the scale `c = max |x| / 448`; codes are those of `x * (448 / max |x|)`.
pub fn e4m3_rows(x: &[f32], width: usize) -> Vec<f32> {
    let top = |row: &[f32]| row.iter().fold(0.0f32, |top, x| top.max(x.abs()));
    let tops: Vec<f32> = x.chunks_exact(width).map(top).collect();
    e4m3_below(x, width, &tops)
}

/// Weights of `bits` bits after the same rounding. A row's `max |x|` is the greatest magnitude that its scales and
/// biases can express, whether or not a code does so.
pub fn e4m3_weights(w: &Affine, bits: usize) -> Vec<f32> {
    e4m3_below(&w.weights(), w.k, &w.magnitudes(bits))
}

/// Values after rounding to 8-bit floats, with `max |x|` of each row given.
pub fn e4m3_below(x: &[f32], width: usize, tops: &[f32]) -> Vec<f32> {
    const MAX: f32 = 448.0;
    let code = |x: f32| {
        // The distance of neighbouring codes: an eighth of the power of 2 below x, and no less than 2^-9.
        let exponent = (x.abs().to_bits() >> 23) as i32 - 127;
        let step = 2f32.powi(exponent.max(-6) - 3);
        (x / step).round_ties_even() * step
    };
    let round = |(row, &top): (&[f32], &f32)| {
        let (scale, reciprocal) = if top > 0.0 { (top / MAX, MAX / top) } else { (1.0, 1.0) };
        row.iter().map(move |x| code((x * reciprocal).clamp(-MAX, MAX)) * scale).collect::<Vec<_>>()
    };
    x.chunks_exact(width).zip(tops).flat_map(round).collect()
}

/// Activations after quantisation to 8 bits in groups. For each group of `group` consecutive values: `c * p` with
/// `c = max |x| / 127` and `p = x * (127 / max |x|)`, rounded to the nearest, ties to even.
pub fn quantized_activations(x: &[f32], group: usize) -> Vec<f32> {
    let round = |group: &[f32]| {
        let top = group.iter().fold(0.0f32, |top, x| top.max(x.abs()));
        let (scale, reciprocal) = (top / 127.0, if top > 0.0 { 127.0 / top } else { 0.0 });
        group.iter().map(move |x| (x * reciprocal).round_ties_even() * scale).collect::<Vec<_>>()
    };
    x.chunks_exact(group).flat_map(round).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_of_eight_bits_are_the_nearest() {
        // 448 sets the scale to 1. 17 lies between 16 and 18, 19 between 18 and 20: ties go to the even mantissa.
        let row = [448.0, 17.0, 19.0, -16.9, 0.001, 0.0012, 300.0, 0.0];
        assert_eq!(e4m3_rows(&row, 8), [448.0, 16.0, 20.0, -16.0, 0.001953125, 0.001953125, 288.0, 0.0]);
    }

    #[test]
    fn a_row_of_a_stack_is_multiplied_by_its_expert() {
        let affine =
            |quants: Vec<u8>| Affine { k: 2, group: 2, quants, scales: vec![1.0; 2], biases: vec![0.0; 2] };
        let experts = [affine(vec![1, 2, 3, 0]), affine(vec![0, 1, 2, 2]), affine(vec![3, 3, 1, 0])];
        let stack: Vec<f32> = experts.iter().flat_map(Affine::weights).collect();
        let (x, choice) = ([1.0f32, 10.0, 100.0, 1000.0], [2u32, 0, 1, 1]);
        let want = gather_linear(&x, &experts, &choice);
        assert_eq!(want[..4], [33.0, 1.0, 21.0, 3.0]);
        assert_eq!(gather_stack(&x, &stack, [3, 2], &choice), want);
    }

    #[test]
    fn the_greatest_weight_that_could_be_has_the_greatest_code() {
        // Codes of 2 bits reach 2 * 3 - 4 = 2 and -4; 3 * 3 + 5 = 14. The scale is 14 / 448 = 1 / 32.
        let w = Affine {
            k: 4,
            group: 2,
            quants: vec![1, 2, 0, 1],
            scales: vec![2.0, 3.0],
            biases: vec![-4.0, 5.0],
        };
        assert_eq!((w.magnitudes(2), w.weights()), (vec![14.0], vec![-2.0, 0.0, 5.0, 8.0]));
        assert_eq!(e4m3_weights(&w, 2), [-2.0, 0.0, 5.0, 8.0]);
    }
}
