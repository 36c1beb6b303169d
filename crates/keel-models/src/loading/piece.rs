//! Which rows of the checkpoint make a weight.

use std::ops::Range;

/// Rows of a linear layer of the checkpoint.
#[derive(Clone, Debug)]
pub struct Piece {
    /// The layer.
    pub module: String,
    /// The number of the expert, if the layer is a stack.
    pub expert: Option<usize>,
    /// The layer's numbers of experts and of rows in the checkpoint.
    pub extents: (Option<usize>, usize),
    /// The selected rows, in their order in the weight.
    pub rows: Vec<Range<usize>>,
}

impl Piece {
    /// All rows of a plain layer.
    pub fn whole(module: impl Into<String>, rows: usize) -> Piece {
        Piece {
            module: module.into(),
            expert: None,
            extents: (None, rows),
            rows: vec![Range { start: 0, end: rows }],
        }
    }

    /// Some rows of a plain layer of `total` rows, in the order given.
    pub fn rows(module: impl Into<String>, total: usize, rows: Vec<Range<usize>>) -> Piece {
        Piece { module: module.into(), expert: None, extents: (None, total), rows }
    }

    /// Some rows of one expert of a stack.
    pub fn expert(
        module: impl Into<String>,
        stack: (usize, usize),
        expert: usize,
        rows: Range<usize>,
    ) -> Piece {
        Piece {
            module: module.into(),
            expert: Some(expert),
            extents: (Some(stack.0), stack.1),
            rows: vec![rows],
        }
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.rows.iter().map(Range::len).sum()
    }

    /// True without rows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
