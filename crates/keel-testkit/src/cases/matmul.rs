//! Sizes of matrix products: around tiles of 16 and 32 columns, blocks of 8 rows (of x and of W) and chunks of 256
//! inputs.

/// `(T, N, K)` of `x w^T` with `x [T, K]` and `w [N, K]`.
pub const SHAPES: &[(usize, usize, usize)] = &[
    (1, 15, 2),
    (2, 1, 33),
    (3, 17, 1),
    (7, 16, 65),
    (8, 31, 127),
    (9, 63, 64),
    (16, 33, 128),
    (17, 65, 129),
    (33, 67, 72),
    (64, 127, 31),
    (65, 129, 257),
    (130, 64, 15),
    (1, 64, 513),
];

/// The same with few rows of x and long rows of W, K a multiple of 8: devices may multiply these on tensor cores. They
/// may refuse an x that does not begin at a multiple of 16 bytes.
pub const FEW_ROWS: &[(usize, usize, usize)] = &[(1, 67, 1032), (5, 130, 648), (16, 96, 2568)];

/// `[batch, M, N, K]` of products of two activations.
pub const BATCHED: &[[usize; 4]] =
    &[[1, 1, 2, 3], [3, 2, 33, 5], [2, 9, 16, 7], [5, 17, 31, 65], [1, 130, 129, 64], [2, 65, 15, 300]];
