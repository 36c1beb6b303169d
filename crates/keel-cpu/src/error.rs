//! Errors of requests to the CPU backend.

use crate::kernels::linear::WeightFormat;

/// An input that the CPU backend cannot take.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Weights of a shape or format that does not exist.
    #[error("weights [{matrices}, {n}, {k}] as {format:?}: {reason}")]
    WeightFormat {
        /// Matrices of the stack.
        matrices: usize,
        /// Rows of a matrix.
        n: usize,
        /// Inputs of a row.
        k: usize,
        /// The format asked for.
        format: WeightFormat,
        /// The part that does not fit.
        reason: &'static str,
    },
}
