//! f32 throughout, for every format.

use super::super::{Bound, Call, Geometry};
use super::{address, exact_split, packed, row_tiles, weight_key};
use crate::driver::Arguments;
use crate::kernels::EXACT_MATMUL;
use keel_array::{ArrayError, WeightSpec};

pub(super) fn exact_rows(
    weight: &WeightSpec,
    residual: Option<&Bound<'_>>,
    rows: usize,
    call: &Call<'_>,
) -> Result<(), ArrayError> {
    let split = exact_split(weight);
    let key = weight_key(EXACT_MATMUL, "exact_rows", weight).define("DIM_T", rows).define("SPLIT", split);
    let arguments = packed(Arguments::default(), weight, &call.inputs[1])
        .pointer(call.inputs[0].address)
        .pointer(address(residual))
        .pointer(call.outputs[0].address);
    call.launch(&key, Geometry::rows(row_tiles(weight), 32 * split), arguments)
}

pub(super) fn exact_tiled(
    weight: &WeightSpec,
    residual: Option<&Bound<'_>>,
    rows: usize,
    call: &Call<'_>,
) -> Result<(), ArrayError> {
    let arguments = packed(Arguments::default(), weight, &call.inputs[1])
        .pointer(call.inputs[0].address)
        .pointer(address(residual))
        .pointer(call.outputs[0].address)
        .u32(rows);
    let grid = (weight.rows.div_ceil(128), rows.div_ceil(64), 1);
    let geometry = Geometry { grid, block: (256, 1, 1), shared_bytes: 53_248 };
    call.launch(&weight_key(EXACT_MATMUL, "exact_tiled", weight), geometry, arguments)
}
