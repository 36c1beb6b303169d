//! Products of many rows through cuBLASLt. A quantised weight is widened to f16 in scratch, or to 8 bits
//! (`fp8.rs`). A dense one of bf16 or f16 is multiplied as stored; one of bf16 twice if x has to keep 16 bits.

use super::super::{Bound, Call, Geometry, elementwise};
use super::exact::exact_tiled;
use super::fp8::{self, Fp8Product, Fp8Scratch};
use super::half_operands::{
    HALF_ALIGN, alpha, factors, splits_x, to_half, weight_in_half, widened_bytes, x_bytes, x_parts,
};
use super::weight_key;
use crate::backend::weights::padded_rows;
use crate::driver::{BLAS_WORKSPACE_BYTES, Product, ProductOperands, ResultType, ScaleAddresses};
use crate::error::CudaError;
use crate::kernels::DEQUANTIZE;
use crate::parameters::LeavePadding;
use keel_array::{ArrayError, DType, WeightSpec};

/// Byte offsets of the scratch of a product through cuBLASLt, from a multiple of [`HALF_ALIGN`] on. In order:
///
/// - the library's scratch;
/// - x in 16 bits;
/// - W if it is widened;
/// - y if it is padded;
/// - the scratch of a product in 8 bits, if one is tried.
///
/// `end` includes the bytes that the alignment may take.
pub(super) struct BlasScratch {
    x: usize,
    w: usize,
    padded: usize,
    /// The further sections of scratch for a product in 8 bits.
    eight: Fp8Scratch,
    pub end: usize,
}

pub(super) fn blas_scratch(weight: &WeightSpec, rows: usize) -> BlasScratch {
    let x = BLAS_WORKSPACE_BYTES;
    let w = x + x_parts(weight) * x_bytes(weight, rows);
    let (cols, is_padded) = (padded_rows(weight.rows), padded_rows(weight.rows) != weight.rows);
    let padded = (w + widened_bytes(weight)).next_multiple_of(HALF_ALIGN);
    let end = padded + if is_padded { rows * cols * size_of::<f32>() } else { 0 };
    let eight = Fp8Scratch::new(weight, rows, w, end);
    let end = if fp8::is_tried(weight) { eight.end } else { end };
    BlasScratch { x, w, padded, eight, end: end + HALF_ALIGN }
}

pub(super) fn through_blas(
    weight: &WeightSpec,
    residual: Option<&Bound<'_>>,
    rows: usize,
    call: &Call<'_>,
) -> Result<(), ArrayError> {
    let scratch = blas_scratch(weight, rows);
    let own = call.scratch.next_multiple_of(HALF_ALIGN as u64);
    // The kernel before the product may have written x in 16 bits (see `fp8::narrows`).
    let is_half = call.inputs[0].dtype == DType::F16;
    let x = if is_half { call.inputs[0].address } else { own + scratch.x as u64 };
    let (y, accumulate) = (&call.outputs[0], residual.is_some());
    let halve = || if is_half { Ok(()) } else { to_half(weight, rows, x, call) };
    let in_fp8 = match fp8::is_tried(weight) {
        true => Fp8Product::of(weight, rows, accumulate, &scratch.eight, own, call),
        false => None,
    };
    match &in_fp8 {
        Some(product) => product.round(x, halve, call)?,
        None => halve()?,
    }
    // x in f32 has been read by now: it may lie where y does. In 16 bits it lies elsewhere.
    if let Some(residual) = residual {
        call.bring(residual, y)?;
    }
    if let Some(product) = in_fp8 {
        return product.multiply(call);
    }
    let w = weight_in_half(weight, own + scratch.w as u64, call)?;
    let cols = if accumulate { weight.rows } else { padded_rows(weight.rows) };
    let to = if cols == weight.rows { y.address } else { own + scratch.padded as u64 };
    let multiply = |x: u64, accumulate: bool| {
        let product = Product { cols, result: result_type(y), ..product_of(weight, rows, accumulate) };
        call.multiply(product, half_operands(x, w, to), own)
    };
    let in_op = |error: CudaError| error.in_op(call.kernel.op.name());
    match multiply(x, accumulate) {
        Ok(()) => {
            if splits_x(weight) {
                multiply(x + x_bytes(weight, rows) as u64, true).map_err(in_op)?;
            }
            if to == y.address {
                return Ok(());
            }
            let key = weight_key(DEQUANTIZE, "leave_padding", weight).define("ROW", cols);
            let parameters = LeavePadding { padded: to, y: y.address };
            call.launch(&key, Geometry::rows(rows, weight.rows.min(256).next_multiple_of(32)), &parameters)
        }
        // If the library refuses a product, our own kernel multiplies, more slowly. A launch that fails otherwise is
        // not repeated with another kernel: another thread may have ended this capture, which is then taken again.
        Err(refusal @ CudaError::NoProduct { .. })
            if call.producer(0).is_none() && !is_half && y.dtype != DType::F16 =>
        {
            tracing::debug!("{refusal}; multiplied without cuBLASLt");
            exact_tiled(weight, residual, rows, call)
        }
        Err(error) => Err(in_op(error)),
    }
}

/// `x W^T + bias`, onto a residual if there is one, for a product with a weight as it is
/// [stored](super::blas_takes_stored_weight).
pub(super) fn with_bias(
    weight: &WeightSpec,
    rows: usize,
    residual: Option<&Bound<'_>>,
    bias: &Bound<'_>,
    call: &Call<'_>,
) -> Result<(), ArrayError> {
    let scratch = blas_scratch(weight, rows);
    let own = call.scratch.next_multiple_of(HALF_ALIGN as u64);
    let (x, y) = (own + scratch.x as u64, &call.outputs[0]);
    to_half(weight, rows, x, call)?;
    if let Some(residual) = residual {
        call.bring(residual, y)?;
    }
    let product = product_of(weight, rows, residual.is_some());
    let operands = half_operands(x, call.inputs[1].address, y.address);
    let in_op = |error: CudaError| error.in_op(call.kernel.op.name());
    // The library documents no alignment of a bias, so it gets none that begins at an odd place.
    if bias.address.is_multiple_of(16) {
        let operands = ProductOperands { bias: bias.address, ..operands };
        match call.multiply(Product { bias: true, ..product }, operands, own) {
            Ok(()) => return Ok(()),
            Err(refusal @ CudaError::NoProduct { .. }) => {
                tracing::debug!("{refusal}; a kernel of its own adds the bias");
            }
            Err(error) => return Err(in_op(error)),
        }
    }
    call.multiply(product, operands, own).map_err(in_op)?;
    elementwise::add_row(y, bias, call)
}

fn half_operands(x: u64, w: u64, y: u64) -> ProductOperands {
    ProductOperands { x, w, y, bias: 0, scales: ScaleAddresses::default() }
}

fn product_of(weight: &WeightSpec, rows: usize, accumulate: bool) -> Product {
    let (alpha, factors) = (alpha(weight), factors(weight));
    let (cols, inner, result) = (weight.rows, weight.cols, ResultType::F32);
    Product { rows, cols, inner, alpha, accumulate, bias: false, factors, result }
}

/// A result of type f16 holds an eighth of each value (see `fp8::narrows`).
pub(super) fn result_type(y: &Bound<'_>) -> ResultType {
    if y.dtype == DType::F16 { ResultType::EighthF16 } else { ResultType::F32 }
}
