//! Rows that GGUF files keep in another order than Hugging Face checkpoints.

/// Where a row lies in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RowOrder {
    /// In its place.
    Same,
    /// Each head of `size` rows has the two halves of its rotary pairs side by side: row `2 i + j` of a head is its
    /// row `j size / 2 + i`. The `llama` architecture keeps queries and keys so.
    PairedHalves {
        /// Rows of a head.
        size: usize,
    },
    /// From row `first` on heads of `size` rows lie value by value instead of key head by key head: head `j Hk + h` is
    /// the `j`th value head of key head `h`. Recurrent layers of `qwen35` are kept so.
    TiledHeads {
        /// Rows in front that keep their place.
        first: usize,
        /// `Hk`.
        key_heads: usize,
        /// Value heads of a key head.
        ratio: usize,
        /// Rows of a head.
        size: usize,
    },
    /// Every other run of `ratio` rows of a tensor that holds two layers, beginning with run `from`.
    EveryOther {
        /// 0 or 1.
        from: usize,
        /// Rows of a run.
        ratio: usize,
    },
}

impl RowOrder {
    /// The file's row of row `row`.
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

    /// Rows of the tensor for each row of the layer.
    pub fn share(self) -> usize {
        if matches!(self, RowOrder::EveryOther { .. }) { 2 } else { 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(order: RowOrder, count: usize) -> Vec<usize> {
        (0..count).map(|row| order.row(row)).collect()
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
