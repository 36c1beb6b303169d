//! Products of few rows: one pass over the weight, x rounded to 8 bits for affine codes.

use super::super::{Bound, Call, Geometry};
use super::{BLOCKS_WANTED, address, col_tiles, packed, row_tiles, split, weight_key};
use crate::driver::Arguments;
use crate::kernels::{KernelKey, QUANTIZED_MATMUL};
use keel_array::{ArrayError, WeightFormat, WeightSpec};

/// Elements of x up to which each block rounds x for itself instead of reading what another kernel has prepared.
const FUSED_MAX: usize = 1 << 15;

/// The kernel for few rows, and what it takes.
pub(super) struct FewRows {
    pub key: KernelKey,
    pub split: usize,
    pub passes: usize,
    pub fused: bool,
    pub prepared_bytes: usize,
    pub shared_bytes: usize,
}

/// `gather` is the rows of y for each row of x where experts are chosen, 0 where there is one weight.
pub(super) fn few_rows_kernel(weight: &WeightSpec, rows: usize, gather: usize) -> FewRows {
    let dense = matches!(weight.format, WeightFormat::Dense(_));
    let (group, bits) = match weight.format {
        WeightFormat::Affine { group_size, bits, .. } => (usize::from(group_size), bits),
        _ => (0, 0),
    };
    // Tiles that a warp loads at once: the kernel's own choice.
    let long = weight.cols > 8192 && weight.rows < 5000;
    let unit = if dense || bits == 8 || long { 2 } else { 4 };
    let split = split(weight, unit);
    let fused = gather > 0 || rows * weight.cols <= FUSED_MAX;
    let (row_bytes, parts) = if dense { (256, 0) } else { (64, if group == 32 { 2 } else { 1 }) };
    let prepared_bytes = col_tiles(weight) * rows * (row_bytes + 8 * parts);
    // Several row tiles for a block, one after the other, where there are many: its start is paid once.
    let passes = if gather == 0 { (row_tiles(weight) / (8 * BLOCKS_WANTED)).clamp(1, 4) } else { 1 };
    let partial_bytes = split * rows * 17 * size_of::<f32>() * if passes > 1 { 2 } else { 1 };
    let key = weight_key(QUANTIZED_MATMUL, "linear_rows", weight)
        .define("DENSE", u8::from(dense))
        .define("DIM_T", rows)
        .define("SPLIT", split)
        .define("UNIT", unit)
        .define("PASSES", passes)
        .define("FUSED", u8::from(fused))
        .define("GATHER", gather);
    let shared_bytes = partial_bytes + if fused { prepared_bytes } else { 0 };
    FewRows { key, split, passes, fused, prepared_bytes, shared_bytes }
}

pub(super) fn few_rows(
    weight: &WeightSpec,
    residual: Option<&Bound<'_>>,
    rows: usize,
    call: &Call<'_>,
) -> Result<(), ArrayError> {
    let kernel = few_rows_kernel(weight, rows, 0);
    let mut x = call.inputs[0].address;
    if !kernel.fused {
        let tiles = 4 * col_tiles(weight);
        let block = if col_tiles(weight) >= 256 { 1024 } else { tiles.next_multiple_of(32) };
        let key = KernelKey { entry: "prepare_rows", ..kernel.key.clone() };
        call.launch(
            &key,
            Geometry::rows(rows, block),
            Arguments::default().pointer(x).pointer(call.scratch),
        )?;
        x = call.scratch;
    }
    let arguments = packed(Arguments::default(), weight, &call.inputs[1])
        .pointer(x)
        .pointer(address(residual))
        .pointer(call.outputs[0].address);
    let geometry = Geometry {
        grid: (row_tiles(weight).div_ceil(kernel.passes), 1, 1),
        block: (32 * kernel.split, 1, 1),
        shared_bytes: kernel.shared_bytes,
    };
    call.launch(&kernel.key, geometry, arguments)
}
