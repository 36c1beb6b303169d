//! Shapes of the causal convolution: channels around vectors of 16 and blocks of 128; widths with and without special
//! code.

/// One shape.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// C
    pub channels: usize,
    /// W
    pub width: usize,
    /// Whether there is a bias.
    pub bias: bool,
}

/// The shapes.
pub const SHAPES: &[Shape] = &[
    Shape { channels: 1, width: 4, bias: true },
    Shape { channels: 15, width: 4, bias: false },
    Shape { channels: 33, width: 3, bias: true },
    Shape { channels: 160, width: 4, bias: false },
    Shape { channels: 129, width: 2, bias: false },
];

/// Rows of each sequence of a batch.
pub const BATCHES: &[&[usize]] = &[&[1], &[2, 0, 1], &[65, 3], &[31]];
