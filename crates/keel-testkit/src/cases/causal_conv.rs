//! Shapes of the causal convolution: channels around vectors of 16 and blocks of 128; widths with and without special
//! code.

/// One shape.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// C
    pub channels: usize,
    /// W
    pub width: usize,
}

/// The shapes.
pub const SHAPES: &[Shape] = &[
    Shape { channels: 1, width: 4 },
    Shape { channels: 15, width: 4 },
    Shape { channels: 33, width: 3 },
    Shape { channels: 160, width: 4 },
    Shape { channels: 129, width: 2 },
];

/// Rows of each sequence of a batch.
pub const BATCHES: &[&[usize]] = &[&[1], &[2, 0, 1], &[65, 3], &[31]];
