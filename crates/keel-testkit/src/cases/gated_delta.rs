//! Shapes of the gated delta rule: Dk and Dv differ, except in one; one, several, or very many value heads for each key
//! head; sizes around tiles of 8, 16, 32 and 128.

use crate::naive::gated_delta::Shape;

/// Head shapes. The sizes of a shape all differ, except that Dk = Dv = 128 in one. Published models have these sizes. A
/// state that is transposed by mistake shows in the other shapes.
pub const SHAPES: &[Shape] = &[
    Shape { key_heads: 1, value_heads: 2, key_size: 16, value_size: 32 },
    Shape { key_heads: 3, value_heads: 3, key_size: 24, value_size: 40 },
    Shape { key_heads: 2, value_heads: 8, key_size: 33, value_size: 31 },
    Shape { key_heads: 1, value_heads: 4, key_size: 64, value_size: 48 },
    Shape { key_heads: 2, value_heads: 4, key_size: 96, value_size: 144 },
    Shape { key_heads: 2, value_heads: 6, key_size: 128, value_size: 128 },
    Shape { key_heads: 1, value_heads: 2, key_size: 256, value_size: 112 },
    Shape { key_heads: 5, value_heads: 5, key_size: 7, value_size: 3 },
    Shape { key_heads: 1, value_heads: 136, key_size: 9, value_size: 4 },
];

/// Rows of each sequence of a batch: one token, none, partial and whole chunks.
pub const BATCHES: &[&[usize]] = &[&[1], &[64], &[5, 0, 65, 1], &[128, 63], &[200]];
