//! f32 throughout, for every format.

use super::super::{Bound, Call, Geometry};
use super::{FEW_ROWS, address, at_row, exact_split, pairs, row_tiles, weight_key};
use crate::kernels::LINEAR_EXACT;
use crate::parameters::{ExactRows, ExactTiled};
use keel_array::{ArrayError, WeightSpec};

/// `EXACT_SHARED` of the source: 64 columns of 128 rows of W and of 64 rows of x, with 8 more to each column.
const EXACT_SHARED: usize = 64 * (128 + 8 + 64 + 8) * size_of::<f32>();

/// [`FEW_ROWS`] at a time: a row's bits do not depend on the other rows.
pub(super) fn exact_rows(
    weight: &WeightSpec,
    residual: Option<&Bound<'_>>,
    rows: usize,
    call: &Call<'_>,
) -> Result<(), ArrayError> {
    expect_readable(weight, call)?;
    let split = exact_split(weight, call.select_by());
    for first in (0..rows).step_by(FEW_ROWS) {
        let count = FEW_ROWS.min(rows - first);
        let key =
            weight_key(LINEAR_EXACT, "exact_rows", weight).define("DIM_T", count).define("SPLIT", split);
        let parameters = ExactRows {
            weight: call.inputs[1].address,
            pairs: pairs(weight, &call.inputs[1]),
            x: at_row(call.inputs[0].address, first, weight.cols),
            experts: None,
            stack: None,
            fault: None,
            kernel: None,
            residual: at_row(address(residual), first, weight.rows),
            y: at_row(call.outputs[0].address, first, weight.rows),
        };
        call.launch(&key, Geometry::rows(row_tiles(weight), 32 * split), &parameters)?;
    }
    Ok(())
}

/// Refuses x where `exact_rows` would read four columns at a time from a place that is no multiple of 16 bytes.
pub(super) fn expect_readable(weight: &WeightSpec, call: &Call<'_>) -> Result<(), ArrayError> {
    if weight.cols.is_multiple_of(4) { call.expect_aligned(&call.inputs[0], 16) } else { Ok(()) }
}

pub(super) fn exact_tiled(
    weight: &WeightSpec,
    residual: Option<&Bound<'_>>,
    rows: usize,
    call: &Call<'_>,
) -> Result<(), ArrayError> {
    let parameters = ExactTiled {
        weight: call.inputs[1].address,
        pairs: pairs(weight, &call.inputs[1]),
        x: call.inputs[0].address,
        residual: address(residual),
        y: call.outputs[0].address,
        rows,
    };
    let grid = (weight.rows.div_ceil(128), rows.div_ceil(64), 1);
    let geometry = Geometry { grid, block: (256, 1, 1), shared_bytes: EXACT_SHARED };
    call.launch(&weight_key(LINEAR_EXACT, "exact_tiled", weight), geometry, &parameters)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agreement::assert_values;
    use keel_array::{Compute, DType, WeightFormat};

    #[test]
    fn the_source_has_the_same_tiles() {
        let format = WeightFormat::Dense(DType::BF16);
        let weight = WeightSpec { experts: 1, rows: 96, cols: 384, format, compute: Compute::F32 };
        let key = weight_key(LINEAR_EXACT, "exact_tiled", &weight);
        assert_values(key, &[("EXACT_SHARED", EXACT_SHARED)]);
    }
}
