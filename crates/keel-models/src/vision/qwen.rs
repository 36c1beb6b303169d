//! The tower of Qwen3-VL and Qwen3.5 (Qwen Team, 2025 and 2026). Positions are rotated by row and column. A table of
//! positions is stretched over the grid. Blocks of patches are merged into one row.
//!
//! Reference: `modeling_qwen3_vl.py` of transformers.

use keel_array::Array;

use super::layers::{LayerNorm, TwoLayers};
use super::tower::{TowerRows, block_order};
use crate::Result;

/// Joins the patches of a block, then applies two layers.
#[derive(Debug)]
pub struct Merger {
    /// Norm of each patch, or of the joined patches of a block.
    pub norm: LayerNorm,
    /// Whether the norm comes after the patches of a block are joined.
    pub norm_after: bool,
    /// Patches of a block.
    pub patches: usize,
    /// To the text model's width.
    pub layers: TwoLayers,
}

impl Merger {
    /// f32 `[N / patches, text hidden]` of x `[N, hidden]`.
    ///
    /// # Errors
    /// If x does not fit.
    pub fn apply(&self, x: &Array) -> Result<Array> {
        let (rows, width) = (x.shape()[0], x.shape()[1]);
        let together = [rows / self.patches, width * self.patches];
        let x = match self.norm_after {
            true => self.norm.apply(&x.reshape(together)?)?,
            false => self.norm.apply(x)?.reshape(together)?,
        };
        Ok(self.layers.apply(&x)?)
    }
}

/// Inverse frequencies for half a head: a quarter of the head size for rows, and the same for columns.
pub(super) fn frequencies(head_dim: usize, theta: f64) -> Vec<f32> {
    let quarter = head_dim / 4;
    let one = (0..quarter).map(|i| theta.powf(-((2 * i) as f64) / (head_dim / 2) as f64) as f32);
    one.clone().chain(one).collect()
}

/// The positions of a grid's patches. The table, `side` by `side`, is stretched over the grid from corner to corner.
pub(super) fn rows(h: usize, w: usize, merge: usize, side: usize) -> TowerRows {
    let count = h * w;
    let mut rows = TowerRows {
        positions: vec![0; 3 * count],
        entries: vec![0; TowerRows::TAPS * count],
        shares: vec![0.0; TowerRows::TAPS * count],
    };
    // Lower entry, upper entry, share of the upper one. As in the reference, the place in the table is computed in f32.
    let taps = |i: usize, n: usize| {
        let place = i as f32 * (side - 1) as f32 / n.saturating_sub(1).max(1) as f32;
        let low = (place.floor() as usize).min(side - 1);
        (low, (low + 1).min(side - 1), f64::from(place) - low as f64)
    };
    for (i, (row, column)) in block_order(h, w, merge).enumerate() {
        (rows.positions[i], rows.positions[count + i]) = (row as i32, column as i32);
        let ((r0, r1, down), (c0, c1, right)) = (taps(row, h), taps(column, w));
        let four = [
            (r0 * side + c0, (1.0 - down) * (1.0 - right)),
            (r0 * side + c1, (1.0 - down) * right),
            (r1 * side + c0, down * (1.0 - right)),
            (r1 * side + c1, down * right),
        ];
        for (tap, (entry, share)) in four.into_iter().enumerate() {
            rows.entries[tap * count + i] = entry as u32;
            rows.shares[tap * count + i] = share as f32;
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_stretched_corner_to_corner() {
        let rows = rows(4, 6, 2, 8);
        assert_eq!(rows.positions[..6], [0, 0, 1, 1, 0, 0]);
        assert_eq!(rows.positions[24..30], [0, 1, 0, 1, 2, 3]);
        // The last patch of the last block uses the last entry of the table.
        let taps = |i: usize| {
            (0..4).map(|t| (rows.entries[t * 24 + i], rows.shares[t * 24 + i])).collect::<Vec<_>>()
        };
        assert_eq!(taps(0)[0], (0, 1.0));
        assert_eq!(taps(23)[0], (63, 1.0));
        let sum: f32 = taps(9).iter().map(|tap| tap.1).sum();
        assert!((sum - 1.0).abs() < 1e-6);
    }

    #[test]
    fn one_row_of_blocks_does_not_divide_by_zero() {
        let one = rows(1, 1, 1, 8);
        assert_eq!((one.entries[0], one.shares[0]), (0, 1.0));
    }
}
