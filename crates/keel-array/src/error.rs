//! Errors of building and evaluating arrays.

use crate::{Category, DType, Shape};

/// Errors of this crate. Messages name the operation, the shapes and the numbers.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArrayError {
    /// An operand has another shape than the operation needs.
    #[error("{op}: {operand} expected {expected}, got {got}")]
    Shape {
        /// Operation.
        op: &'static str,
        /// Which operand.
        operand: &'static str,
        /// The shape that would be right.
        expected: String,
        /// The shape that was given.
        got: Shape,
    },
    /// Two shapes cannot be stretched to a common one.
    #[error("{op}: shapes {lhs} and {rhs} do not broadcast")]
    Broadcast {
        /// Operation.
        op: &'static str,
        /// Left operand.
        lhs: Shape,
        /// Right operand.
        rhs: Shape,
    },
    /// An operand has another element type than the operation needs.
    #[error("{op}: {operand} expected {expected}, got {got}")]
    DType {
        /// Operation.
        op: &'static str,
        /// Which operand.
        operand: &'static str,
        /// The type that would be right.
        expected: &'static str,
        /// The type that was given.
        got: DType,
    },
    /// No such axis.
    #[error("{op}: axis {axis} is out of range for shape {shape}")]
    Axis {
        /// Operation.
        op: &'static str,
        /// The axis asked for.
        axis: isize,
        /// The operand's shape.
        shape: Shape,
    },
    /// An argument that is not an array is wrong.
    #[error("{op}: {reason}")]
    Argument {
        /// Operation.
        op: &'static str,
        /// The problem and what to do.
        reason: String,
    },
    /// The device cannot run the operation with these shapes.
    #[error("{backend} cannot run {op}: {reason}")]
    Unsupported {
        /// The device.
        backend: String,
        /// Operation.
        op: String,
        /// The unsupported shape, type or attribute, the supported ones, and what to do.
        reason: String,
    },
    /// The hard limit would be exceeded.
    #[error(
        "out of memory for {category}: requested {requested} bytes, {used} in use of a limit of {limit}; \
         lower the context, the batch or the prefill step, or raise the limit"
    )]
    Limit {
        /// The purpose of the memory.
        category: Category,
        /// Bytes asked for.
        requested: u64,
        /// Bytes in use under all categories.
        used: u64,
        /// The limit.
        limit: u64,
    },
    /// The plan is frozen and does not contain this allocation.
    #[error("{category}: an allocation of {requested} bytes is not in the memory plan, which is frozen")]
    Frozen {
        /// The purpose of the memory.
        category: Category,
        /// Bytes asked for.
        requested: u64,
    },
    /// The system has no memory left.
    #[error("{category}: the system refused {requested} bytes: {reason}")]
    Allocation {
        /// The purpose of the memory.
        category: Category,
        /// Bytes asked for.
        requested: u64,
        /// The system's answer.
        reason: String,
    },
    /// A kernel found something wrong while it ran.
    #[error("{op}: {reason}")]
    Kernel {
        /// Operation.
        op: String,
        /// The problem that it found.
        reason: String,
    },
    /// The device has failed for good: it runs nothing more, or nothing tells what its memory holds.
    #[error("{op}: {reason}; the device can no longer be used: start the program again")]
    DeviceLost {
        /// The operation that met it.
        op: String,
        /// The driver's message.
        reason: String,
    },
}

/// Result of this crate.
pub type Result<T, E = ArrayError> = std::result::Result<T, E>;

/// `Ok` if `operand` has this shape; otherwise an error with the expected shape.
pub(crate) fn expect_shape(
    op: &'static str,
    operand: &'static str,
    expected: &[usize],
    got: &Shape,
) -> Result<()> {
    if **got == *expected {
        return Ok(());
    }
    Err(wrong_shape(op, operand, Shape::from(expected).to_string(), got))
}

/// The error for `operand`, which has another shape than `expected`.
pub(crate) fn wrong_shape(
    op: &'static str,
    operand: &'static str,
    expected: impl Into<String>,
    got: &Shape,
) -> ArrayError {
    ArrayError::Shape { op, operand, expected: expected.into(), got: got.clone() }
}

/// `Ok` if the type of `operand` is right; otherwise an error with the expected types.
pub(crate) fn expect_dtype(
    op: &'static str,
    operand: &'static str,
    is_right: bool,
    expected: &'static str,
    got: DType,
) -> Result<()> {
    if is_right { Ok(()) } else { Err(ArrayError::DType { op, operand, expected, got }) }
}
