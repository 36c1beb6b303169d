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

/// Some columns of a layer.
pub(crate) struct Columns {
    pub format: WeightFormat,
    /// Columns of the whole layer.
    pub whole: usize,
    /// Those that are wanted.
    pub own: Range<usize>,
}

/// These entries of each row of `row` entries.
fn pick<T: Copy>(data: &[T], row: usize, columns: Range<usize>) -> Vec<T> {
    data.chunks_exact(row).flat_map(|row| &row[columns.clone()]).copied().collect()
}

/// Passes the columns of `rows` rows to `sink`.
pub(crate) fn pick_columns(
    rows: usize,
    data: RowData<'_>,
    columns: &Columns,
    sink: &mut RowSink<'_>,
) -> Result<()> {
    let &Columns { format, whole: cols, own: ref columns } = columns;
    let together = columns_together(format);
    let units = columns.start / together..columns.end / together;
    let of_bytes = |unit: usize| units.start * unit..units.end * unit;
    match data {
        RowData::Dense(bytes) => {
            let unit = bytes.len() / (rows * cols).max(1);
            sink(rows, RowData::Dense(&pick(bytes, cols * unit, of_bytes(unit))))
        }
        RowData::Affine { codes, scales, biases } => {
            let groups = cols / together;
            let codes = pick(codes, cols, columns.clone());
            let (scales, biases) = (pick(scales, groups, units.clone()), pick(biases, groups, units));
            sink(rows, RowData::Affine { codes: &codes, scales: &scales, biases: &biases })
        }
        RowData::Blocks(bytes) => {
            let unit = bytes.len() / (rows * cols / together).max(1);
            sink(rows, RowData::Blocks(&pick(bytes, cols / together * unit, of_bytes(unit))))
        }
    }
}
