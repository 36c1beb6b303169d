//! Element-wise functions.

use super::tensor::Tensor;

/// `1 / (1 + e^-x)`
pub fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// `x / (1 + e^-x)`
pub fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// `ln(1 + e^x)`
pub fn softplus(x: f64) -> f64 {
    if x > 700.0 { x } else { x.exp().ln_1p() }
}

/// `0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`
pub fn gelu_tanh(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
}

/// `0.5 x (1 + erf(x / sqrt 2))`, with `erf(z) = 2 / sqrt(pi) e^(-z^2) sum_n 2^n z^(2n+1) / (1 3 .. (2n+1))`.
pub fn gelu(x: f64) -> f64 {
    let z = x / 2f64.sqrt();
    if z.abs() > 6.0 {
        return 0.5 * x * (1.0 + z.signum()); // In f64, erf is 1 or -1 there.
    }
    let terms = (1..400).scan(z, |term, n| {
        let now = *term;
        *term *= 2.0 * z * z / f64::from(2 * n + 1);
        Some(now)
    });
    let erf = 2.0 / std::f64::consts::PI.sqrt() * (-z * z).exp() * terms.sum::<f64>();
    0.5 * x * (1.0 + erf)
}

/// `f(a, b)` of two tensors stretched to `shape`.
pub fn binary(a: &Tensor, b: &Tensor, shape: &[usize], f: impl Fn(f64, f64) -> f64) -> Tensor {
    let (a, b) = (a.broadcast(shape), b.broadcast(shape));
    Tensor { shape: shape.to_vec(), values: a.values.iter().zip(&b.values).map(|(&a, &b)| f(a, b)).collect() }
}

/// `if condition { a } else { b }`, all of one shape.
pub fn select(condition: &Tensor, a: &Tensor, b: &Tensor) -> Tensor {
    Tensor::from_fn(&condition.shape, |i| if condition.at(i) != 0.0 { a.at(i) } else { b.at(i) })
}
