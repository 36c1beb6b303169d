//! Scales columns, then rotates pairs of columns, round by round. ParoQuant does this before a quantised layer.
//!
//! `x[c] *= scales[c]`, then `(x[a], x[b]) = (x[a] cos + x[b] sin, x[b] cos - x[a] sin)` for each pair.
//!
//! A unit of work is a row: it stays in the first-level cache through all rounds. Floor: the pairs and angles of all
//! rounds are read once for each row, `8 R K` bytes.

use crate::kernels::rows::{Rows, RowsMut};
use crate::pool::Worker;

/// The columns and rotations of all rounds, two entries for each pair.
#[derive(Clone, Copy)]
pub struct Rounds<'a> {
    /// `[K]`
    pub scales: &'a [f32],
    /// `[R, K]`
    pub pairs: &'a [u32],
    /// Cosine and sine, `[R, K]`
    pub cos_sin: &'a [f32],
}

impl Rounds<'_> {
    /// The first column index that is out of range.
    pub fn astray(&self) -> Option<u32> {
        self.pairs.iter().copied().find(|&column| column as usize >= self.scales.len())
    }
}

/// Rotates every row of x.
///
/// # Panics
/// If the shapes disagree or a column does not exist.
pub fn rotate_pairs(x: Rows<'_>, rounds: Rounds<'_>, y: RowsMut<'_>, worker: &Worker<'_>) {
    assert!(x.width() == rounds.scales.len() && y.width() == x.width() && y.len() == x.len());
    assert_eq!(rounds.pairs.len(), rounds.cos_sin.len());
    for t in worker.claim(x.len(), 1).flatten() {
        // SAFETY: each row is claimed once.
        let y = unsafe { y.row(t) };
        for ((y, x), scale) in y.iter_mut().zip(x.row(t)).zip(rounds.scales) {
            *y = x * scale;
        }
        for (pair, turn) in rounds.pairs.chunks_exact(2).zip(rounds.cos_sin.chunks_exact(2)) {
            let (a, b) = (y[pair[0] as usize], y[pair[1] as usize]);
            y[pair[0] as usize] = a * turn[0] + b * turn[1];
            y[pair[1] as usize] = b * turn[0] - a * turn[1];
        }
    }
}
