//! Shapes that every backend is tested on.

pub mod attention;
pub mod causal_conv;
pub mod elementwise;
pub mod gated_delta;
pub mod linear;
pub mod matmul;
pub mod rows;
