//! Shapes of attention: every supported head size, grouped and ungrouped heads, windows around a tile and a page.

use crate::naive::attention::Shape;

/// Head shapes.
pub const SHAPES: &[Shape] = &[
    Shape { heads: 1, kv_heads: 1, head_dim: 32, scale: 0.177, window: None },
    Shape { heads: 6, kv_heads: 2, head_dim: 64, scale: 0.125, window: Some(16) },
    Shape { heads: 9, kv_heads: 3, head_dim: 64, scale: 0.13, window: None },
    Shape { heads: 8, kv_heads: 2, head_dim: 80, scale: 0.11, window: None },
    Shape { heads: 5, kv_heads: 1, head_dim: 96, scale: 0.1, window: Some(65) },
    Shape { heads: 4, kv_heads: 4, head_dim: 128, scale: 0.3, window: None },
    Shape { heads: 2, kv_heads: 1, head_dim: 256, scale: 0.0625, window: Some(257) },
    Shape { heads: 8, kv_heads: 2, head_dim: 256, scale: 0.0625, window: None },
];

/// (first position, rows) of each sequence of a batch. Sizes lie around tiles of 64, pages of 256 and the first long
/// segment.
pub const BATCHES: &[&[(usize, usize)]] = &[
    &[(0, 1)],
    &[(255, 3), (0, 2), (70, 0), (300, 1)],
    &[(0, 64), (64, 37)],
    &[(192, 130)],
    &[(512, 65), (31, 33)],
    &[(4607, 2)],
    // More pairs of row and grouped head than a block takes, after keys that end within a tile.
    &[(300, 197), (0, 0), (90, 45)],
];

/// Head shapes for [`many_sequences`]. The last one has more pairs in two rows than a tile of 16, and a window.
pub const SHAPES_OF_MANY: &[Shape] = &[
    Shape { heads: 8, kv_heads: 2, head_dim: 128, scale: 0.09, window: None },
    Shape { heads: 6, kv_heads: 2, head_dim: 256, scale: 0.0625, window: None },
    Shape { heads: 16, kv_heads: 4, head_dim: 64, scale: 0.125, window: None },
    Shape { heads: 12, kv_heads: 4, head_dim: 96, scale: 0.1, window: None },
    Shape { heads: 40, kv_heads: 4, head_dim: 32, scale: 0.177, window: Some(65) },
];

/// (first position, rows) of each of 150 sequences: mostly short ones with one row, some with none or with drafts, some
/// that end around a chunk of 16 keys, 8 such chunks, or a page.
pub fn many_sequences() -> Vec<(usize, usize)> {
    let sequence = |b: usize| match b % 15 {
        3 => (b, 0),
        5 => (127 + b % 2, 1),
        7 => (254 + b % 4, 2),
        9 => (b % 50, 5),
        11 => (300 + b, 1),
        _ => ([0, 1, 14, 15, 16, 17, 70, 100][b % 8], 1),
    };
    (0..150).map(sequence).collect()
}
