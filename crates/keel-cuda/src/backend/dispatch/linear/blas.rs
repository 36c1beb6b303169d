//! Products of many rows through cuBLASLt, an affine weight widened to bf16 in scratch.

use super::super::{Bound, Call, Geometry};
use super::exact::exact_tiled;
use super::{col_tiles, packed, row_tiles, weight_key};
use crate::driver::{Arguments, BLAS_WORKSPACE_BYTES, Product};
use crate::kernels::{DEQUANTIZE, KernelKey};
use keel_array::{ArrayError, WeightFormat, WeightSpec};

/// Bytes that the library's scratch is aligned to; the arena promises less.
const BLAS_ALIGN: usize = 256;

/// Where the scratch of a product through cuBLASLt lies, from a multiple of [`BLAS_ALIGN`] on: the library's own, x as
/// bf16, W as bf16. `end` includes what the alignment may take.
pub(super) struct BlasScratch {
    x: usize,
    w: usize,
    pub end: usize,
}

pub(super) fn blas_scratch(weight: &WeightSpec, rows: usize) -> BlasScratch {
    let x = BLAS_WORKSPACE_BYTES;
    let w = x + (rows * weight.cols * size_of::<u16>()).next_multiple_of(BLAS_ALIGN);
    let widened = matches!(weight.format, WeightFormat::Affine { .. });
    let end = w + if widened { weight.rows * weight.cols * size_of::<u16>() } else { 0 };
    BlasScratch { x, w, end: end + BLAS_ALIGN }
}

pub(super) fn through_blas(
    weight: &WeightSpec,
    residual: Option<&Bound<'_>>,
    rows: usize,
    call: &Call<'_>,
) -> Result<(), ArrayError> {
    let scratch = blas_scratch(weight, rows);
    let own = call.scratch.next_multiple_of(BLAS_ALIGN as u64);
    let (x, mut w) = (own + scratch.x as u64, call.inputs[1].address);
    // Two columns at a time: with an odd number of columns there is no pair to end a row, nor does it matter.
    let pairs = (rows * weight.cols).div_ceil(2);
    let arguments = Arguments::default().pointer(call.inputs[0].address).pointer(x).u64(pairs);
    let key = KernelKey::new(DEQUANTIZE, "to_bf16").define("DIM_N", weight.rows).define("DIM_K", weight.cols);
    call.launch(&key, Geometry::rows(pairs.div_ceil(1024), 256), arguments)?;
    if let WeightFormat::Affine { .. } = weight.format {
        w = own + scratch.w as u64;
        let tiles = row_tiles(weight) * col_tiles(weight);
        let arguments = packed(Arguments::default(), weight, &call.inputs[1]).pointer(w).u32(1);
        call.launch(
            &weight_key(DEQUANTIZE, "dequantize", weight),
            Geometry::rows(tiles.div_ceil(8), 256),
            arguments,
        )?;
    }
    let y = &call.outputs[0];
    if let Some(residual) = residual {
        call.bring(residual, y)?;
    }
    let product = Product { rows, cols: weight.rows, inner: weight.cols, accumulate: residual.is_some() };
    // What the library refuses, our own kernel multiplies, more slowly.
    match call.multiply(product, (x, w, y.address), own) {
        Ok(()) => Ok(()),
        Err(error) => {
            tracing::debug!("{error}; multiplied without cuBLASLt");
            exact_tiled(weight, residual, rows, call)
        }
    }
}
