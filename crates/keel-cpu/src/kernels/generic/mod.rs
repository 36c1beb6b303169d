//! Kernels of the general operations: for all element types and strides, parallel over blocks.
//!
//! Element-wise kernels read a block of each operand into a buffer before they write, so the result may take the
//! place of an operand. Reductions work on whole rows: their order never depends on the number of workers.

pub mod chain;
pub mod create;
pub mod elementwise;
pub mod experts;
pub mod indexing;
pub mod layout;
pub mod matmul;
pub mod reduce;
pub mod rotate_pairs;
pub mod scalar;
pub mod sort;
pub mod strided;

/// Elements that a kernel works on at a time: 2 KB of the largest type, well inside the first-level cache.
pub const BLOCK: usize = 256;

/// Elements that a worker takes at a time.
const GRAIN: usize = 16 * BLOCK;

/// Rows of `width` elements that a worker takes at a time.
fn row_grain(width: usize) -> usize {
    (GRAIN / width.max(1)).max(1)
}
