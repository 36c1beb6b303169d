//! Products of many rows through cuBLASLt. A quantised weight is widened to f16 in scratch, or to 8 bits
//! (`fp8_prefill.rs`). A dense one of bf16 or f16 is multiplied as stored; one of bf16 twice if x has to keep 16 bits.

use super::super::{Bound, Call, Geometry, elementwise};
use super::exact::exact_tiled;
use super::fp8_prefill::{self, Fp8Product, Fp8Scratch};
use super::half::absorbed_to_half;
use super::{at_row, col_tiles, pairs, row_tiles, weight_key};
use crate::backend::weights::padded_rows;
use crate::driver::{BLAS_WORKSPACE_BYTES, FactorType, Product, ProductOperands, ResultType, ScaleAddresses};
use crate::error::{CudaError, Result};
use crate::kernels::{DEQUANTIZE, HalfForm, KernelKey};
use crate::parameters::{Dequantize, LeavePadding, ToHalf, ToTwoBf16, Wide};
use keel_array::{ArrayError, Compute, DType, WeightFormat, WeightSpec};

/// Rows that cuBLASLt multiplies at a time in the deterministic mode. The number is constant, so the library always
/// chooses the same algorithm. It is small enough for one tile of that algorithm, so all rows share out their sums
/// alike.
const BLAS_BLOCK: usize = 64;

/// Alignment of the library's scratch, in bytes; the arena promises less.
pub(super) const BLAS_ALIGN: usize = 256;

/// Byte offsets of the scratch of a product through cuBLASLt, from a multiple of [`BLAS_ALIGN`] on. In order:
///
/// - the library's scratch;
/// - x in 16 bits;
/// - W if it is widened;
/// - the last block of y if rows are multiplied in blocks, or y if it is padded;
/// - the scratch of a product in 8 bits, if one is tried.
///
/// `end` includes the bytes that the alignment may take.
pub(super) struct BlasScratch {
    x: usize,
    w: usize,
    last: usize,
    /// What a product in 8 bits has in addition.
    eight: Fp8Scratch,
    pub end: usize,
}

pub(super) fn blas_scratch(weight: &WeightSpec, rows: usize, in_blocks: bool) -> BlasScratch {
    let x = BLAS_WORKSPACE_BYTES;
    let rows = if in_blocks { rows.next_multiple_of(BLAS_BLOCK) } else { rows };
    let w = x + x_parts(weight) * x_bytes(weight, rows);
    let (padded, is_padded) = (padded_rows(weight.rows), padded_rows(weight.rows) != weight.rows);
    let last = w + if is_widened(weight) { padded * weight.cols * size_of::<u16>() } else { 0 };
    let last = last.next_multiple_of(BLAS_ALIGN);
    let end = last
        + match in_blocks {
            true => BLAS_BLOCK * weight.rows * size_of::<f32>(),
            false if is_padded => rows * padded * size_of::<f32>(),
            false => 0,
        };
    let eight = Fp8Scratch::new(weight, rows, w, end);
    let end = if fp8_prefill::is_tried(weight, in_blocks) { eight.end } else { end };
    BlasScratch { x, w, last, eight, end: end + BLAS_ALIGN }
}

pub(super) fn factors(weight: &WeightSpec) -> FactorType {
    match weight.format {
        WeightFormat::Dense(DType::F16) => FactorType::F16,
        WeightFormat::Dense(_) => FactorType::Bf16,
        _ => FactorType::F16,
    }
}

/// Whether the weight is written to scratch in f16 first.
pub(super) fn is_widened(weight: &WeightSpec) -> bool {
    !matches!(weight.format, WeightFormat::Dense(_))
}

/// Whether x enters as the sum of two bf16, each of which is multiplied.
pub(super) fn splits_x(weight: &WeightSpec) -> bool {
    weight.compute == Compute::Bf16 && factors(weight) == FactorType::Bf16
}

fn x_parts(weight: &WeightSpec) -> usize {
    if splits_x(weight) { 2 } else { 1 }
}

/// Bytes of x in 16 bits.
fn x_bytes(weight: &WeightSpec, rows: usize) -> usize {
    (rows * weight.cols * size_of::<u16>()).next_multiple_of(BLAS_ALIGN)
}

/// Writes x in 16 bits, after the absorbed operation if there is one. If x is split, its two parts are `part_bytes`
/// apart.
fn to_half(
    weight: &WeightSpec,
    rows: usize,
    to: u64,
    part_bytes: usize,
    call: &Call<'_>,
) -> Result<(), ArrayError> {
    let form = HalfForm::Rows { is_bf16: factors(weight) == FactorType::Bf16 };
    if let Some(producer) = call.producer(0) {
        return absorbed_to_half(producer, weight, rows, to, form, call);
    }
    // Two columns at a time. If the number of columns is odd, a pair may straddle two rows, which does no harm.
    let (x, pairs) = (call.inputs[0].address, (rows * weight.cols).div_ceil(2));
    if splits_x(weight) {
        let key = weight_key(DEQUANTIZE, "to_two_bf16", weight);
        let parameters = ToTwoBf16 { x, hi: to, lo: to + part_bytes as u64, pairs: Wide(pairs) };
        return call.launch(&key, Geometry::rows(pairs.div_ceil(256), 256), &parameters);
    }
    let key = form.define(KernelKey::new(DEQUANTIZE, "to_half"));
    let key = key.define("DIM_N", weight.rows).define("DIM_K", weight.cols);
    let parameters = ToHalf { x, y: to, pairs: Wide(pairs) };
    call.launch(&key, Geometry::rows(pairs.div_ceil(1024), 256), &parameters)
}

pub(super) fn through_blas(
    weight: &WeightSpec,
    residual: Option<&Bound<'_>>,
    rows: usize,
    in_blocks: bool,
    call: &Call<'_>,
) -> Result<(), ArrayError> {
    let scratch = blas_scratch(weight, rows, in_blocks);
    let own = call.scratch.next_multiple_of(BLAS_ALIGN as u64);
    // What comes before the product may have written x in 16 bits (see `fp8_prefill::narrows`).
    let is_half = call.inputs[0].dtype == DType::F16;
    let x = if is_half { call.inputs[0].address } else { own + scratch.x as u64 };
    let mut w = call.inputs[1].address;
    let part_bytes = (scratch.w - scratch.x) / x_parts(weight);
    let (y, accumulate) = (&call.outputs[0], residual.is_some());
    let halve = || if is_half { Ok(()) } else { to_half(weight, rows, x, part_bytes, call) };
    let in_fp8 = match fp8_prefill::is_tried(weight, in_blocks) {
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
    if is_widened(weight) {
        w = own + scratch.w as u64;
        let tiles = row_tiles(weight) * col_tiles(weight);
        let key = weight_key(DEQUANTIZE, "dequantize", weight);
        let pairs = pairs(weight, &call.inputs[1]);
        let parameters = Dequantize { weight: call.inputs[1].address, pairs, out: w, experts: 1 };
        call.launch(&key, Geometry::rows(tiles.div_ceil(8), 256), &parameters)?;
    }
    let cols = if accumulate || in_blocks { weight.rows } else { padded_rows(weight.rows) };
    let to = if cols == weight.rows { y.address } else { own + scratch.last as u64 };
    let multiply = |x: u64, accumulate: bool| match in_blocks {
        false => {
            let product = Product { cols, result: result_type(y), ..product_of(weight, rows, accumulate) };
            call.multiply(product, half_operands(x, w, to), own)
        }
        true => multiply_blocks(weight, accumulate, x, w, own + scratch.last as u64, own, call),
    };
    let in_op = |error: CudaError| error.in_op(call.kernel.op.name());
    match multiply(x, accumulate) {
        Ok(()) => {
            if splits_x(weight) {
                multiply(x + part_bytes as u64, true).map_err(in_op)?;
            }
            if to == y.address {
                return Ok(());
            }
            let key = weight_key(DEQUANTIZE, "leave_padding", weight).define("ROW", cols);
            let parameters = LeavePadding { padded: to, y: y.address };
            call.launch(&key, Geometry::rows(rows, weight.rows.min(256).next_multiple_of(32)), &parameters)
        }
        Err(error) if call.producer(0).is_some() || is_half || y.dtype == DType::F16 => Err(in_op(error)),
        // If the library refuses a product, our own kernel multiplies, more slowly.
        Err(error) => {
            tracing::debug!("{error}; multiplied without cuBLASLt");
            exact_tiled(weight, residual, rows, call)
        }
    }
}

/// `x W^T + bias`, onto a residual if there is one, for a product with a weight as it is
/// [stored](super::surely_as_stored).
pub(super) fn with_bias(
    weight: &WeightSpec,
    rows: usize,
    residual: Option<&Bound<'_>>,
    bias: &Bound<'_>,
    call: &Call<'_>,
) -> Result<(), ArrayError> {
    let scratch = blas_scratch(weight, rows, false);
    let own = call.scratch.next_multiple_of(BLAS_ALIGN as u64);
    let (x, y) = (own + scratch.x as u64, &call.outputs[0]);
    to_half(weight, rows, x, 0, call)?;
    if let Some(residual) = residual {
        call.bring(residual, y)?;
    }
    let product = product_of(weight, rows, residual.is_some());
    let operands = half_operands(x, call.inputs[1].address, y.address);
    // The library documents no alignment of a bias, so it gets none that begins at an odd place.
    if bias.address.is_multiple_of(16) {
        let operands = ProductOperands { bias: bias.address, ..operands };
        match call.multiply(Product { bias: true, ..product }, operands, own) {
            Ok(()) => return Ok(()),
            Err(error) => tracing::debug!("{error}; a kernel of its own adds the bias"),
        }
    }
    call.multiply(product, operands, own).map_err(|error| error.in_op(call.kernel.op.name()))?;
    elementwise::add_row(y, bias, call)
}

fn half_operands(x: u64, w: u64, y: u64) -> ProductOperands {
    ProductOperands { x, w, y, bias: 0, scales: ScaleAddresses::default() }
}

fn product_of(weight: &WeightSpec, rows: usize, accumulate: bool) -> Product {
    let factors = factors(weight);
    // In f16, x is an eighth (`half.cuh`). A widened weight makes up for it, and one as stored does not.
    let alpha = if factors == FactorType::F16 && !is_widened(weight) { 8 } else { 1 };
    let (cols, inner, result) = (weight.rows, weight.cols, ResultType::F32);
    Product { rows, cols, inner, alpha, accumulate, bias: false, factors, result }
}

/// A result of type f16 holds an eighth of each value (see `fp8_prefill::narrows`).
pub(super) fn result_type(y: &Bound<'_>) -> ResultType {
    if y.dtype == DType::F16 { ResultType::EighthF16 } else { ResultType::F32 }
}

/// y in blocks of [`BLAS_BLOCK`] rows. The last block is computed in `last`; its rows after those of x are not used.
fn multiply_blocks(
    weight: &WeightSpec,
    accumulate: bool,
    x: u64,
    w: u64,
    last: u64,
    own: u64,
    call: &Call<'_>,
) -> Result<()> {
    let product = product_of(weight, BLAS_BLOCK, accumulate);
    let rows = call.outputs[0].len() / weight.rows;
    for first in (0..rows).step_by(BLAS_BLOCK) {
        let y = at_row(call.outputs[0].address, first, weight.rows);
        let x = x + (first * weight.cols * size_of::<u16>()) as u64;
        let bytes = BLAS_BLOCK.min(rows - first) * weight.rows * size_of::<f32>();
        if first + BLAS_BLOCK <= rows {
            call.multiply(product, half_operands(x, w, y), own)?;
            continue;
        }
        if accumulate {
            call.copy(y, last, bytes)?;
        }
        call.multiply(product, half_operands(x, w, last), own)?;
        call.copy(last, y, bytes)?;
    }
    Ok(())
}
