//! The tower of Gemma 3 (Gemma Team, 2025): SigLIP (Zhai et al., 2023) on pictures of one size, averaged to a fixed
//! number of rows.
//!
//! Reference: `modeling_siglip.py` and `modeling_gemma3.py` of transformers.

use keel_array::Array;

use super::layers::LayerNorm;
use super::tower::{TowerRows, block_order};
use crate::Result;
use crate::blocks::RmsNorm;
use crate::loading::Projection;

/// Turns the last block's output into rows of the text model's width.
#[derive(Debug)]
pub struct Projector {
    /// Norm of each patch.
    pub post_norm: LayerNorm,
    /// Number of patches averaged to a row. They are consecutive.
    pub patches: usize,
    /// Norm of each row.
    pub norm: RmsNorm,
    /// `[text hidden, hidden]`
    pub projection: Projection,
}

impl Projector {
    pub(super) fn apply(&self, x: &Array) -> Result<Array> {
        let (rows, width) = (x.shape()[0] / self.patches, x.shape()[1]);
        let normed = self.post_norm.apply(x)?.reshape([rows, self.patches, width])?;
        let mean = normed.mean(1)?;
        Ok(self.projection.apply_wide(&self.norm.apply(&mean)?)?)
    }
}

/// The positions of the patches, block by block. Each has the table's entry for its place in the picture.
pub(super) fn rows(side: usize, block: usize) -> TowerRows {
    let count = side * side;
    let mut rows = TowerRows {
        positions: vec![0; 3 * count],
        entries: vec![0; TowerRows::TAPS * count],
        shares: vec![0.0; TowerRows::TAPS * count],
    };
    for (i, (row, column)) in block_order(side, side, block).enumerate() {
        rows.entries[i] = (row * side + column) as u32;
        rows.shares[i] = 1.0;
    }
    rows
}

/// Patches, block by block, of a picture `[3, size, size]`: `[N, 3 patch patch]`.
pub fn patches(planes: &[f32], size: usize, patch: usize, block: usize) -> Vec<f32> {
    let side = size / patch;
    let mut rows = Vec::with_capacity(planes.len());
    for (row, column) in block_order(side, side, block) {
        for plane in planes.chunks_exact(size * size) {
            for y in 0..patch {
                let start = (row * patch + y) * size + column * patch;
                rows.extend_from_slice(&plane[start..start + patch]);
            }
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patches_lie_block_by_block() {
        let planes: Vec<f32> = (0..3 * 64).map(|i| i as f32).collect();
        let rows = patches(&planes, 8, 2, 2);
        // The second patch of the first block is to the right of the first, the third below it.
        assert_eq!(rows[..6], [0.0, 1.0, 8.0, 9.0, 64.0, 65.0]);
        assert_eq!((rows[12], rows[24], rows[48]), (2.0, 16.0, 4.0));
        let order = super::rows(4, 2);
        assert_eq!(order.entries[..5], [0, 1, 4, 5, 2]);
    }
}
