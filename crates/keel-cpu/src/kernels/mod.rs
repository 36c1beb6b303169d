//! Kernels by family: plain functions over slices that every worker of a pool calls at once.
//!
//! Inside a kernel the work is handed out among the workers; the caller places a barrier after it. A row's
//! bits never depend on how many rows, sequences or workers there are.

pub mod activation;
pub mod attention;
pub(crate) mod blocks;
pub mod causal_conv;
pub mod gated_delta;
pub mod gated_delta_chunked;
pub(crate) mod generic;
pub mod linear;
pub mod rms_norm;
pub mod rope;
pub mod rows;
pub(crate) mod sample;
mod small_gemm;
