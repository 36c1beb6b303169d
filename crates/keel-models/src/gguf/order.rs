//! Rows whose order in GGUF files differs from Hugging Face checkpoints.

use crate::{HybridConfig, ModelError, Result};

/// The order of rows in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RowOrder {
    /// The same order.
    Same,
    /// The two halves of each head alternate: row `2 i + j` of a head in the file is its row `j size / 2 + i`. The
    /// `llama` architecture and similar ones store queries and keys so.
    PairedHalves {
        /// Rows of a head.
        size: usize,
    },
    /// From row `first` on, heads of `size` rows are ordered by value head, not by key head: head `j Hk + h` in the
    /// file is the `j`th value head of key head `h`. Recurrent layers of `qwen35` are stored so.
    TiledHeads {
        /// Rows at the start that keep their place.
        first: usize,
        /// `Hk`.
        key_heads: usize,
        /// Value heads of a key head.
        ratio: usize,
        /// Rows of a head.
        size: usize,
    },
    /// Every other run of `ratio` rows of a tensor that joins two layers, from run `from` on.
    EveryOther {
        /// 0 or 1.
        from: usize,
        /// Rows of a run.
        ratio: usize,
    },
}

impl RowOrder {
    /// The row in the file of the checkpoint's row `row`.
    pub fn row(self, row: usize) -> usize {
        match self {
            RowOrder::Same => row,
            RowOrder::PairedHalves { size } => {
                let (head, within) = (row / size, row % size);
                head * size + within % (size / 2) * 2 + within / (size / 2)
            }
            RowOrder::TiledHeads { first, .. } if row < first => row,
            RowOrder::TiledHeads { first, key_heads, ratio, size } => {
                let (head, within) = ((row - first) / size, (row - first) % size);
                first + (head % ratio * key_heads + head / ratio) * size + within
            }
            RowOrder::EveryOther { from, ratio } => (row / ratio * 2 + from) * ratio + row % ratio,
        }
    }

    /// The checkpoint's row of the file's row `stored`: the inverse of [`RowOrder::row`]. Not for tensors that join two
    /// layers.
    pub fn row_of(self, stored: usize) -> usize {
        match self {
            RowOrder::Same | RowOrder::EveryOther { .. } => stored,
            RowOrder::PairedHalves { size } => {
                let (head, within) = (stored / size, stored % size);
                head * size + within % 2 * (size / 2) + within / 2
            }
            RowOrder::TiledHeads { first, .. } if stored < first => stored,
            RowOrder::TiledHeads { first, key_heads, ratio, size } => {
                let (head, within) = ((stored - first) / size, (stored - first) % size);
                first + (head % key_heads * ratio + head / key_heads) * size + within
            }
        }
    }

    /// Refuses a tensor of the file whose number of rows is not one that the order is defined for.
    pub fn check(self, name: &str, rows: usize, shape: &[usize]) -> Result<()> {
        let expected = match self {
            RowOrder::Same => return Ok(()),
            RowOrder::PairedHalves { size } if size.is_multiple_of(2) && rows.is_multiple_of(size) => {
                return Ok(());
            }
            RowOrder::PairedHalves { size } => format!("heads of {size} rows"),
            RowOrder::TiledHeads { first, key_heads, ratio, size } => {
                match first + key_heads * ratio * size {
                    expected if expected == rows => return Ok(()),
                    expected => format!("{expected} rows"),
                }
            }
            RowOrder::EveryOther { ratio, .. } if rows.is_multiple_of(2 * ratio) => return Ok(()),
            RowOrder::EveryOther { ratio, .. } => format!("pairs of {ratio} rows"),
        };
        Err(ModelError::Shape { name: name.into(), expected, got: format!("{shape:?}") })
    }

    /// Rows of the tensor for each row of the layer.
    pub fn share(self) -> usize {
        if matches!(self, RowOrder::EveryOther { .. }) { 2 } else { 1 }
    }
}

/// The row orders of parameters in the files of an architecture.
#[derive(Clone, Copy, Debug)]
pub(super) struct Orders {
    /// True if the halves of query and key heads alternate.
    paired_halves: bool,
    /// True if a and b of recurrent layers are in one tensor.
    joint_alpha_beta: bool,
    /// True if heads are ordered by value head, not by key head.
    tiled: bool,
    head_dim: usize,
    key_heads: usize,
    ratio: usize,
    key_dim: usize,
    value_dim: usize,
}

impl Orders {
    /// The row orders for a model in the files of an architecture.
    pub fn new(arch: &str, config: &HybridConfig) -> Orders {
        let recurrent = config.recurrent.unwrap_or_default();
        Orders {
            paired_halves: matches!(arch, "llama" | "mistral3" | "smollm3"),
            joint_alpha_beta: arch == "qwen3next",
            tiled: matches!(arch, "qwen35" | "qwen35moe") && recurrent.key_heads != recurrent.value_heads,
            head_dim: config.head_dim,
            key_heads: recurrent.key_heads,
            ratio: recurrent.value_heads.checked_div(recurrent.key_heads).unwrap_or(1),
            key_dim: recurrent.key_dim,
            value_dim: recurrent.value_dim,
        }
    }

    /// The order of the rows of a parameter.
    pub fn rows(&self, name: &str) -> RowOrder {
        let ratio = self.ratio;
        match part_of(name) {
            "q_proj" | "k_proj" if self.paired_halves => RowOrder::PairedHalves { size: self.head_dim },
            "in_proj_b" if self.joint_alpha_beta => RowOrder::EveryOther { from: 0, ratio },
            "in_proj_a" if self.joint_alpha_beta => RowOrder::EveryOther { from: 1, ratio },
            "in_proj_qkv" | "conv1d" if self.tiled => {
                self.heads(2 * self.key_heads * self.key_dim, self.value_dim)
            }
            "in_proj_z" if self.tiled => self.heads(0, self.value_dim),
            "in_proj_a" | "in_proj_b" | "A_log" | "dt_bias" if self.tiled => self.heads(0, 1),
            _ => RowOrder::Same,
        }
    }

    /// The order of the columns of a parameter.
    pub fn cols(&self, name: &str) -> RowOrder {
        match part_of(name) {
            "out_proj" if self.tiled => self.heads(0, self.value_dim),
            _ => RowOrder::Same,
        }
    }

    fn heads(&self, first: usize, size: usize) -> RowOrder {
        RowOrder::TiledHeads { first, key_heads: self.key_heads, ratio: self.ratio, size }
    }
}

/// The last part of a parameter's name, without `weight` or `bias`.
fn part_of(name: &str) -> &str {
    super::names::split(name).0.rsplit('.').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(order: RowOrder, count: usize) -> Vec<usize> {
        (0..count).map(|row| order.row(row)).collect()
    }

    #[test]
    fn rows_go_back_where_they_came_from() {
        let tiled = RowOrder::TiledHeads { first: 5, key_heads: 3, ratio: 2, size: 4 };
        for order in [RowOrder::Same, RowOrder::PairedHalves { size: 8 }, tiled] {
            for row in 0..5 + 3 * 2 * 4 {
                assert_eq!(order.row_of(order.row(row)), row, "{order:?}");
            }
        }
    }

    #[test]
    fn rows_are_found_where_converters_put_them() {
        assert_eq!(rows(RowOrder::PairedHalves { size: 6 }, 8), [0, 2, 4, 1, 3, 5, 6, 8]);
        let tiled = RowOrder::TiledHeads { first: 3, key_heads: 2, ratio: 3, size: 2 };
        // Heads in the file: h0v0 h1v0 h0v1 h1v1 h0v2 h1v2.
        assert_eq!(rows(tiled, 15), [0, 1, 2, 3, 4, 7, 8, 11, 12, 5, 6, 9, 10, 13, 14]);
        assert_eq!(rows(RowOrder::EveryOther { from: 1, ratio: 2 }, 6), [2, 3, 6, 7, 10, 11]);
    }
}
