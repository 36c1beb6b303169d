//! Which rows of the checkpoint make a weight.

use std::ops::Range;

/// How large a linear layer of the checkpoint is.
#[derive(Clone, Copy, Debug)]
pub struct Stored {
    /// Number of experts, if the layer is a stack.
    pub experts: Option<usize>,
    /// Number of rows, of each expert if there are any.
    pub rows: usize,
}

/// Rows of a linear layer of the checkpoint.
#[derive(Clone, Debug)]
pub struct SourceRows {
    /// The layer.
    pub module: String,
    /// The number of the expert, if the layer is a stack.
    pub expert: Option<usize>,
    /// The layer in the checkpoint.
    pub stored: Stored,
    /// The selected rows, in their order in the weight.
    pub rows: Vec<Range<usize>>,
}

impl SourceRows {
    /// All rows of a plain layer.
    pub fn whole(module: impl Into<String>, rows: usize) -> SourceRows {
        SourceRows::rows(module, rows, vec![Range { start: 0, end: rows }])
    }

    /// Some rows of a plain layer of `total` rows, in the order given.
    pub fn rows(module: impl Into<String>, total: usize, rows: Vec<Range<usize>>) -> SourceRows {
        let stored = Stored { experts: None, rows: total };
        SourceRows { module: module.into(), expert: None, stored, rows }
    }

    /// All rows of one of `experts` experts, each of `rows` rows.
    pub fn expert(module: impl Into<String>, expert: usize, experts: usize, rows: usize) -> SourceRows {
        let stored = Stored { experts: Some(experts), rows };
        SourceRows {
            module: module.into(),
            expert: Some(expert),
            stored,
            rows: vec![Range { start: 0, end: rows }],
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
