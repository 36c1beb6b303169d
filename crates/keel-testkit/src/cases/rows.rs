//! Sizes of row-wise operations: rows and widths around vectors of 16 and blocks of 64.

/// (rows, width) pairs.
pub const SHAPES: &[(usize, usize)] =
    &[(1, 1), (3, 15), (2, 16), (5, 33), (1, 1024), (7, 64), (33, 129), (2, 1040)];
