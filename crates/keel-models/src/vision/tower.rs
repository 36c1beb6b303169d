//! A complete tower.

use std::ops::Range;

use keel_array::{Array, Batch, KvPool, Runtime};

use super::config::{TowerKind, VisionConfig, level_of};
use super::layers::{TowerBlock, TowerPass, TowerRope};
use super::qwen::{self, Merger};
use super::siglip::Projector;
use crate::Result;
use crate::loading::Projection;

/// The layers after the blocks.
#[derive(Debug)]
pub enum TowerEnd {
    /// Qwen: joins the patches of a block, then two layers. The same for each further level.
    Merged {
        /// For the last block.
        merger: Merger,
        /// For earlier blocks, in the order of their features.
        deepstack: Vec<Merger>,
        /// f32 `[D / 2]`: frequencies of the rows, then of the columns.
        frequencies: Array,
    },
    /// Gemma 3: norm, average, norm, one product.
    Averaged(Projector),
}

/// A tower in memory.
#[derive(Debug)]
pub struct Tower {
    /// Its numbers.
    pub config: VisionConfig,
    /// Layer on a patch's values.
    pub patch: Projection,
    /// f32 `[positions, hidden]`
    pub positions: Array,
    /// The blocks.
    pub blocks: Vec<TowerBlock>,
    /// The layers after them.
    pub head: TowerEnd,
}

/// Host data for a run: the position of each patch.
#[derive(Clone, Debug, PartialEq)]
pub struct TowerRows {
    /// Row and column of each patch, and a third axis that is not used: `[3, N]`.
    pub positions: Vec<i32>,
    /// Entries of the table of positions, `[TAPS, N]`.
    pub entries: Vec<u32>,
    /// The weight of each entry, `[TAPS, N]`.
    pub shares: Vec<f32>,
}

impl TowerRows {
    /// Number of table entries that are interpolated for a patch's position.
    pub const TAPS: usize = 4;
}

/// The arrays of a run of `N` patches.
pub struct TowerInput<'a> {
    /// f32 `[N, values]`
    pub patches: &'a Array,
    /// i32 `[3, N]`
    pub positions: &'a Array,
    /// u32 `[TAPS, N]`
    pub entries: &'a Array,
    /// f32 `[TAPS, N]`
    pub shares: &'a Array,
    /// u32 `[N]`, all `N - 1`.
    pub until: &'a Array,
    /// The rows as one sequence at position 0.
    pub batch: &'a Batch,
    /// Room for the keys and values of one layer, with heads of [`Tower::padded_head`].
    pub pool: &'a KvPool,
}

/// A piece of a pass.
pub struct PassPiece<'a> {
    /// The blocks that it runs.
    pub blocks: Range<usize>,
    /// The output of the block before, f32 `[N, hidden]`; `None` for the first piece, which begins with the patches.
    pub state: Option<&'a Array>,
}

/// The results of a piece of a pass.
pub struct PieceResult {
    /// The output of its last block, if the pass goes on.
    pub state: Option<Array>,
    /// Rows for the text model.
    pub features: Vec<LevelFeatures>,
}

/// Features of one level.
pub struct LevelFeatures {
    /// The number of the level.
    pub level: usize,
    /// f32 `[rows, text hidden]`.
    pub features: Array,
}

impl Tower {
    /// The size of a head in pages.
    pub fn padded_head(config: &VisionConfig) -> usize {
        super::layers::TowerAttention::padded(config.head_dim())
    }

    /// The positions of the patches of an `h` by `w` grid, block by block.
    pub fn rows(config: &VisionConfig, h: usize, w: usize) -> TowerRows {
        match config.kind {
            TowerKind::Qwen { merge, table_side, .. } => qwen::rows(h, w, merge, table_side),
            TowerKind::Siglip { .. } => super::siglip::rows(config.grid_side(), config.block_side()),
        }
    }

    /// A piece of a pass: some blocks after each other, over all patches.
    ///
    /// # Errors
    /// If the operands do not fit.
    pub fn piece(&self, input: &TowerInput<'_>, piece: PassPiece<'_>) -> Result<PieceResult> {
        let PassPiece { blocks, state } = piece;
        let mut x = match state {
            Some(state) => state.clone(),
            None => self.patch.apply_wide(input.patches)?.add(&self.position(input)?)?,
        };
        let turn = match &self.head {
            TowerEnd::Merged { frequencies, .. } => {
                Some(TowerRope { positions: input.positions, frequencies })
            }
            TowerEnd::Averaged(_) => None,
        };
        let pass = TowerPass { pool: input.pool, batch: input.batch, until: input.until, turn };
        let taken: &[usize] = match &self.config.kind {
            TowerKind::Qwen { deepstack, .. } => deepstack,
            TowerKind::Siglip { .. } => &[],
        };
        let mut features = Vec::new();
        for i in blocks.clone() {
            x = self.blocks[i].apply(&x, &pass)?;
            if let (TowerEnd::Merged { deepstack, .. }, Some(k)) =
                (&self.head, taken.iter().position(|&taken| taken == i))
            {
                let level = level_of(taken, i).unwrap_or(0);
                features.push(LevelFeatures { level, features: deepstack[k].apply(&x)? });
            }
        }
        if blocks.end < self.blocks.len() {
            return Ok(PieceResult { state: Some(x), features });
        }
        let last = match &self.head {
            TowerEnd::Merged { merger, .. } => merger.apply(&x)?,
            TowerEnd::Averaged(projector) => projector.apply(&x)?,
        };
        features.push(LevelFeatures { level: 0, features: last });
        Ok(PieceResult { state: None, features })
    }

    /// The interpolated entries of the table of positions, f32 `[N, hidden]`.
    fn position(&self, input: &TowerInput<'_>) -> Result<Array> {
        let rows = input.patches.shape()[0];
        let tap = |i: usize| -> Result<Array> {
            let entries = input.entries.slice_axis(0, i, i + 1)?.reshape([rows])?;
            let share = input.shares.slice_axis(0, i, i + 1)?.reshape([rows, 1])?;
            Ok(self.positions.take(&entries)?.mul(&share)?)
        };
        if matches!(self.config.kind, TowerKind::Siglip { .. }) {
            return Ok(self.positions.take(&input.entries.slice_axis(0, 0, 1)?.reshape([rows])?)?);
        }
        let mut sum = tap(0)?;
        for i in 1..TowerRows::TAPS {
            sum = sum.add(&tap(i)?)?;
        }
        Ok(sum)
    }

    /// The runtime that holds the tower.
    pub fn runtime(&self) -> &Runtime {
        self.positions.runtime()
    }
}

/// `(row, column)` of each patch of an `h` by `w` grid, one block of `side` by `side` after the other.
pub(super) fn block_order(h: usize, w: usize, side: usize) -> impl Iterator<Item = (usize, usize)> {
    let blocks = (0..h / side).flat_map(move |r| (0..w / side).map(move |c| (r * side, c * side)));
    blocks.flat_map(move |(r, c)| (0..side * side).map(move |i| (r + i / side, c + i % side)))
}
