//! Shapes of element-wise operations and reductions: sizes around vectors of 16, blocks of 256 and grains of 4096;
//! empty shapes. The extents of a shape all differ.

/// The shapes.
pub const SHAPES: &[&[usize]] = &[
    &[],
    &[1],
    &[15],
    &[33],
    &[0],
    &[3, 0],
    &[5, 31],
    &[2, 7, 33],
    &[257],
    &[3, 1, 5, 17],
    &[4099],
    &[67, 129],
];

/// Two shapes that broadcast, and their common shape.
pub const BROADCASTS: &[(&[usize], &[usize], &[usize])] = &[
    (&[5, 33], &[33], &[5, 33]),
    (&[5, 33], &[5, 1], &[5, 33]),
    (&[7, 1], &[31], &[7, 31]),
    (&[], &[2, 3], &[2, 3]),
    (&[2, 1, 17], &[1, 19, 1], &[2, 19, 17]),
    (&[3, 1, 257], &[2, 1, 5, 1], &[2, 3, 5, 257]),
];
