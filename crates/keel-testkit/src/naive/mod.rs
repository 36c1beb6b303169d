//! Oracles: plain loops in `f64`, correct by inspection, never optimised.

pub mod activation;
pub mod attention;
pub mod causal_conv;
pub mod create;
pub mod elementwise;
pub mod exchange;
pub mod experts;
pub mod gated_delta;
pub mod indexing;
pub mod kv_coded;
pub mod layout;
pub mod linear;
pub mod matmul;
pub mod reduce;
pub mod rms_norm;
pub mod rope;
pub mod rotate_pairs;
pub mod sample;
pub mod sort;
pub mod tensor;
