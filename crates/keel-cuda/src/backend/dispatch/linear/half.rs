//! Products of 16-bit factors by a kernel of our own. Each element is summed over the columns in one order, which no
//! shape changes, so that a share of a weight's rows has the bits of the whole. cuBLASLt does not promise that.

use super::super::{BLOCKS_WANTED, Bound, Call, Geometry};
use super::address;
use super::half_operands::{HALF_ALIGN, alpha, factors, splits_x, to_half, x_bytes, x_parts};
use crate::driver::FactorType;
use crate::kernels::{HalfForm, KernelKey, LINEAR_HALF};
use crate::parameters::LinearHalf;
use keel_array::{ArrayError, WeightSpec};

/// Bytes of a row of a tile in a stage: 64 columns.
const LINE_BYTES: usize = 128;

/// Stages of copies at most.
const STAGES_MAX: usize = 4;

/// Bytes of scratch: x in 16 bits. W is multiplied as it is stored.
pub(super) fn half_bytes(weight: &WeightSpec, rows: usize) -> usize {
    x_parts(weight) * x_bytes(weight, rows) + HALF_ALIGN
}

/// Rows of x, and of W, of a block's tile: large tiles read less, small ones fill the device with fewer rows. The tile
/// does not change the bits of the result.
fn tile_of(weight: &WeightSpec, rows: usize) -> usize {
    if rows.div_ceil(128) * weight.rows.div_ceil(128) >= BLOCKS_WANTED { 128 } else { 64 }
}

/// `STAGE_BYTES` of the source: 64 columns of the rows of x and of W.
fn stage_bytes(tile: usize) -> usize {
    2 * tile * LINE_BYTES
}

/// `y = x W^T`, plus a residual if there is one.
pub(super) fn linear_half(
    weight: &WeightSpec,
    residual: Option<&Bound<'_>>,
    rows: usize,
    call: &Call<'_>,
) -> Result<(), ArrayError> {
    let x = call.scratch.next_multiple_of(HALF_ALIGN as u64);
    to_half(weight, rows, x, call)?;
    let w = call.inputs[1].address;
    let tile = tile_of(weight, rows);
    let stage_bytes = stage_bytes(tile);
    let stages = (call.gpu.device.shared_bytes_max / stage_bytes).min(STAGES_MAX);
    let form = HalfForm::Rows { is_bf16: factors(weight) == FactorType::Bf16 };
    let key = form.define(KernelKey::new(LINEAR_HALF, "linear_half"));
    let key = key.define("DIM_N", weight.rows).define("DIM_K", weight.cols).define("ALPHA", alpha(weight));
    let key = key.define("X_PARTS", x_parts(weight)).define("TILE", tile).define("STAGES", stages);
    let lo = splits_x(weight).then_some(x + x_bytes(weight, rows) as u64);
    let parameters = LinearHalf { x, lo, w, residual: address(residual), y: call.outputs[0].address, rows };
    let grid = (rows.div_ceil(tile), weight.rows.div_ceil(tile), 1);
    call.launch(&key, Geometry { grid, block: (256, 1, 1), shared_bytes: stages * stage_bytes }, &parameters)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agreement::{assert_values, key_of};

    #[test]
    fn the_source_has_the_same_stages() {
        for tile in [64, 128] {
            let shape = [("DIM_N", 96), ("DIM_K", 384), ("ALPHA", 1), ("X_PARTS", 1)];
            let cut = [("TILE", tile), ("STAGES", 3), ("HALF_BF16", 0)];
            let key = key_of(LINEAR_HALF, "linear_half", &[&shape[..], &cut].concat());
            assert_values(key, &[("STAGE_BYTES", stage_bytes(tile))]);
        }
    }
}
