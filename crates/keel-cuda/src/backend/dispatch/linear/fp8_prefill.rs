//! Products of many rows in 8-bit floats (e4m3) through cuBLASLt, for `Compute::PrefillFp8`. x and the widened W are
//! rounded with a scale for each row. Twice the rate of 16 bits and half the bytes of W; each factor is off by up to
//! 2^-4 of itself.

use super::super::{Call, Geometry};
use super::blas::{BLAS_ALIGN, is_widened};
use super::{pairs, row_tiles, weight_key};
use crate::driver::{FactorType, Product, ProductOperands, ScaleAddresses};
use crate::kernels::FP8_PREFILL;
use crate::parameters::{DequantizeToFp8, QuantizeFp8};
use keel_array::{ArrayError, Compute, WeightSpec};

/// The library's rule for 8-bit factors.
const MULTIPLE: usize = 16;

/// Whether a product that goes through cuBLASLt is tried in 8 bits. The library decides when it sees the device.
pub(super) fn is_tried(weight: &WeightSpec, in_blocks: bool) -> bool {
    weight.compute == Compute::PrefillFp8
        && !in_blocks
        && is_widened(weight)
        && weight.rows.is_multiple_of(MULTIPLE)
        && weight.cols.is_multiple_of(MULTIPLE)
}

/// Where x in 8 bits and the scales lie in the scratch, from a multiple of [`BLAS_ALIGN`] on. W takes the place that
/// it has in 16 bits.
pub(super) struct Fp8Scratch {
    x: usize,
    x_scales: usize,
    w_scales: usize,
    pub end: usize,
}

impl Fp8Scratch {
    pub fn new(weight: &WeightSpec, rows: usize, first: usize) -> Fp8Scratch {
        let x = first.next_multiple_of(BLAS_ALIGN);
        let x_scales = (x + rows * weight.cols).next_multiple_of(BLAS_ALIGN);
        let w_scales = (x_scales + rows * size_of::<f32>()).next_multiple_of(BLAS_ALIGN);
        Fp8Scratch { x, x_scales, w_scales, end: w_scales + weight.rows * size_of::<f32>() }
    }
}

/// The address of x in 16 bits, the address that W is written to, and the places within the workspace.
pub(super) struct Fp8Places<'a> {
    pub half: u64,
    pub w: u64,
    pub scratch: &'a Fp8Scratch,
}

/// The product of x with W. False if the library refuses it; y is then as before.
pub(super) fn multiply(
    weight: &WeightSpec,
    rows: usize,
    accumulate: bool,
    Fp8Places { half, w, scratch }: Fp8Places<'_>,
    own: u64,
    call: &Call<'_>,
) -> Result<bool, ArrayError> {
    let at = |offset: usize| own + offset as u64;
    let (x, scales) = (at(scratch.x), ScaleAddresses { x: at(scratch.x_scales), w: at(scratch.w_scales) });
    let parameters = QuantizeFp8 { x: half, y: x, scales: scales.x };
    call.launch(&weight_key(FP8_PREFILL, "quantize_fp8", weight), Geometry::rows(rows, 256), &parameters)?;
    let parameters = DequantizeToFp8 {
        weight: call.inputs[1].address,
        pairs: pairs(weight, &call.inputs[1]),
        out: w,
        scales: scales.w,
    };
    let key = weight_key(FP8_PREFILL, "dequantize_to_fp8", weight);
    call.launch(&key, Geometry::rows(row_tiles(weight), 256), &parameters)?;
    let (cols, inner) = (weight.rows, weight.cols);
    let product = Product { rows, cols, inner, alpha: 1, accumulate, bias: false, factors: FactorType::E4m3 };
    let operands = ProductOperands { x, w, y: call.outputs[0].address, bias: 0, scales };
    match call.multiply(product, operands, own) {
        Ok(()) => Ok(true),
        Err(error) => {
            tracing::debug!("{error}; multiplied in 16 bits");
            Ok(false)
        }
    }
}
