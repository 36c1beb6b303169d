//! Oracles: plain loops in `f64`, correct by inspection, never optimised.

pub mod attention;
pub mod causal_conv;
pub mod elementwise;
pub mod exchange;
pub mod experts;
pub mod gated_delta;
pub mod indexing;
pub mod kv_coding;
pub mod linear;
pub mod matmul;
pub mod reduce;
pub mod rms_norm;
pub mod rope;
pub mod rotate_pairs;
pub mod sample;
pub mod tensor;

/// `x / (1 + e^-x)`
pub fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}
