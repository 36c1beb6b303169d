//! Products of few rows with a weight in blocks: one pass over the weight, x rounded to 8 bits.

use super::super::{Bound, Call, Geometry};
use super::{address, weight_key};
use crate::driver::Arguments;
use crate::kernels::{BLOCK_MATMUL, KernelKey};
use keel_array::{ArrayError, WeightSpec};

/// Rows of the weight that a block of the kernel takes.
const ROWS: usize = 8;

/// Scratch: x in 8 bits, and a scale for each 32 columns.
pub(super) fn block_rows_bytes(weight: &WeightSpec, rows: usize) -> usize {
    rows * weight.cols + rows * (weight.cols / 32) * size_of::<f32>()
}

/// The product of up to [`super::FEW_ROWS`] rows, or, with `fanout` experts for each row of x, of any number.
pub(super) fn block_rows(
    weight: &WeightSpec,
    residual: Option<&Bound<'_>>,
    fanout: Option<usize>,
    call: &Call<'_>,
) -> Result<(), ArrayError> {
    let x = &call.inputs[0];
    let rows = x.len() / weight.cols;
    let (codes, scales) = (call.scratch, call.scratch + (rows * weight.cols) as u64);
    let arguments = Arguments::default().pointer(x.address).pointer(codes).pointer(scales).u64(x.len());
    let prepare = KernelKey::new(BLOCK_MATMUL, "prepare_rows");
    call.launch(&prepare, Geometry::rows(x.len().div_ceil(256), 256), arguments)?;
    let key = weight_key(BLOCK_MATMUL, "block_rows", weight)
        .define("DIM_T", if fanout.is_some() { 1 } else { rows })
        .define("GATHER", fanout.unwrap_or(0));
    let mut arguments = Arguments::default().pointer(call.inputs[1].address).pointer(codes).pointer(scales);
    let mut products = 1;
    if fanout.is_some() {
        let experts = &call.inputs[2];
        products = experts.len();
        arguments =
            arguments.pointer(experts.address).u32(weight.experts).pointer(call.fault).u32(call.index);
    }
    let arguments = arguments.pointer(address(residual)).pointer(call.outputs[0].address);
    let grid = (weight.rows.div_ceil(ROWS), products, 1);
    call.launch(&key, Geometry { grid, block: (32 * ROWS, 1, 1), shared_bytes: 0 }, arguments)
}
