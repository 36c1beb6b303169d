//! Some columns of a layer's rows, as a checkpoint stores them.

use std::ops::Range;

use keel_array::{RowData, WeightFormat};

use crate::Result;
use crate::loading::RowSink;

/// Columns that are coded together.
pub(crate) fn columns_together(format: WeightFormat) -> usize {
    match format {
        WeightFormat::Dense(_) => 1,
        WeightFormat::Affine { group_size, .. } => group_size.into(),
        WeightFormat::Blocks(format) => format.values(),
    }
}

/// One of the even shares of a layer's columns: the same range of each tile.
pub(crate) struct Columns {
    /// Tiles of the layer's columns, see [`Parameters::column_tiles`](crate::loading::Parameters::column_tiles).
    pub tiles: usize,
    /// The share's number.
    pub index: usize,
    /// How many shares there are.
    pub count: usize,
}

impl Columns {
    /// The share's ranges of a row of `entries` entries, which each stand for as many columns.
    fn ranges(&self, entries: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let tile = entries / self.tiles;
        let own = tile * self.index / self.count..tile * (self.index + 1) / self.count;
        (0..self.tiles).map(move |i| i * tile + own.start..i * tile + own.end)
    }

    /// The share's entries of each of `rows` rows.
    fn pick<T: Copy>(&self, rows: usize, data: &[T]) -> Vec<T> {
        let row = data.len() / rows.max(1);
        let mut own = Vec::with_capacity(data.len() / self.count);
        for row in data.chunks_exact(row.max(1)) {
            self.ranges(row.len()).for_each(|range| own.extend_from_slice(&row[range]));
        }
        own
    }
}

/// Passes the columns of `rows` rows to `sink`. The borders of the columns are borders of their groups or blocks.
pub(crate) fn pick_columns(
    rows: usize,
    data: RowData<'_>,
    columns: &Columns,
    sink: &mut RowSink<'_>,
) -> Result<()> {
    match data {
        RowData::Dense(bytes) => sink(rows, RowData::Dense(&columns.pick(rows, bytes))),
        RowData::Affine { codes, scales, biases } => {
            let codes = columns.pick(rows, codes);
            let (scales, biases) = (columns.pick(rows, scales), columns.pick(rows, biases));
            sink(rows, RowData::Affine { codes: &codes, scales: &scales, biases: &biases })
        }
        RowData::Blocks(bytes) => sink(rows, RowData::Blocks(&columns.pick(rows, bytes))),
    }
}
