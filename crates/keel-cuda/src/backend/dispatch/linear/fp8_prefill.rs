//! Products of many rows in 8-bit floats (e4m3) through cuBLASLt, for `Compute::PrefillFp8`. x and the widened W are
//! rounded with a scale for each row. Twice the rate of 16 bits and half the bytes of W; each factor is off by up to
//! 2^-4 of itself.

use super::super::{Call, Geometry};
use super::blas::{BLAS_ALIGN, is_widened};
use super::{pairs, row_tiles, weight_key};
use crate::driver::{FactorType, Product, ProductOperands, ScaleAddresses};
use crate::kernels::FP8_PREFILL;
use crate::parameters::{DequantizeToFp8, QuantizeFp8, Wide};
use keel_array::{ArrayError, Compute, Op, WeightSpec};

/// The library's rule for 8-bit factors.
const MULTIPLE: usize = 16;

/// Threads that round a row of x, at most.
const THREADS_MAX: usize = 1024;

/// Groups of four values that such a thread has in registers, unless a row takes more than [`THREADS_MAX`].
const FOURS_OF_THREAD: usize = 6;

/// Columns of the longest row that fits registers.
const COLS_MAX: usize = THREADS_MAX * 4 * 16;

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

/// A product in 8 bits, and where its factors go.
pub(super) struct Fp8Product<'a> {
    pub weight: &'a WeightSpec,
    pub rows: usize,
    pub accumulate: bool,
    pub scratch: &'a Fp8Scratch,
    /// The address for W.
    pub w: u64,
    /// The address of the workspace.
    pub own: u64,
}

/// What becomes x in 8 bits: rows of values, `stride` elements apart. The names are those of the kernel's constants.
struct Source {
    from: &'static str,
    x: u64,
    stride: usize,
    /// The norm's weight; 0 without a norm.
    norm: u64,
    eps: f32,
}

impl Fp8Product<'_> {
    fn product(&self) -> Product {
        let Fp8Product { weight, rows, accumulate, .. } = *self;
        let (cols, inner) = (weight.rows, weight.cols);
        Product { rows, cols, inner, alpha: 1, accumulate, bias: false, factors: FactorType::E4m3 }
    }

    fn operands(&self, call: &Call<'_>) -> ProductOperands {
        let at = |offset: usize| self.own + offset as u64;
        let scales = ScaleAddresses { x: at(self.scratch.x_scales), w: at(self.scratch.w_scales) };
        ProductOperands { x: at(self.scratch.x), w: self.w, y: call.outputs[0].address, bias: 0, scales }
    }

    /// Whether the library multiplies 8-bit floats on this device.
    pub fn is_possible(&self, call: &Call<'_>) -> bool {
        let possible = call.gpu.blas.takes(self.product(), &self.operands(call));
        possible.inspect_err(|error| tracing::debug!("{error}; multiplied in 16 bits")).is_ok()
    }

    /// Writes x in 8 bits, in one launch from what comes before the product. If that cannot be, `halve` first writes x in
    /// 16 bits to address `half`.
    pub fn round(
        &self,
        half: u64,
        halve: impl FnOnce() -> Result<(), ArrayError>,
        call: &Call<'_>,
    ) -> Result<(), ArrayError> {
        let cols = self.weight.cols;
        let source = match Source::before(self.weight, call) {
            Some(source) => source,
            None => {
                halve()?;
                Source { from: "FROM_F16", x: half, stride: cols, norm: 0, eps: 0.0 }
            }
        };
        let Source { from, x, stride, norm, eps } = source;
        let ProductOperands { x: y, scales, .. } = self.operands(call);
        let threads = cols.div_ceil(FOURS_OF_THREAD * 4).next_multiple_of(32).clamp(128, THREADS_MAX);
        let key = weight_key(FP8_PREFILL, "quantize_fp8", self.weight);
        let key = key.define("THREADS", threads).define("FROM", from);
        let parameters = QuantizeFp8 { x, stride: Wide(stride), w: norm, eps, y, scales: scales.x };
        call.launch(&key, Geometry::rows(self.rows, threads), &parameters)
    }

    /// Multiplies x with W, which it rounds first.
    pub fn multiply(&self, call: &Call<'_>) -> Result<(), ArrayError> {
        let (weight, operands) = (self.weight, self.operands(call));
        let parameters = DequantizeToFp8 {
            weight: call.inputs[1].address,
            pairs: pairs(weight, &call.inputs[1]),
            out: self.w,
            scales: operands.scales.w,
        };
        let key = weight_key(FP8_PREFILL, "dequantize_to_fp8", weight);
        call.launch(&key, Geometry::rows(row_tiles(weight), 256), &parameters)?;
        let multiplied = call.multiply(self.product(), operands, self.own);
        multiplied.map_err(|error| error.in_op(call.kernel.op.name()))
    }
}

impl Source {
    /// What comes before a product: x itself, a norm or SwiGLU. `None` if another kernel has to make x.
    fn before(weight: &WeightSpec, call: &Call<'_>) -> Option<Source> {
        let (from, kernel) = match call.producer(0) {
            None => ("FROM_F32", &call.bound),
            Some(producer) => match producer.kernel.op {
                Op::RmsNorm { .. } => ("FROM_NORM", producer),
                Op::SwiGlu => ("FROM_SWIGLU", producer),
                _ => return None,
            },
        };
        let x = &kernel.inputs[0];
        let (norm, eps) = match kernel.kernel.op {
            Op::RmsNorm { eps } => (kernel.inputs[1].address, eps.get()),
            _ => (0, 0.0),
        };
        let stride = if from == "FROM_F32" { weight.cols } else { x.row_stride(1) };
        let is_aligned = x.address.is_multiple_of(16) && stride.is_multiple_of(4);
        (is_aligned && weight.cols <= COLS_MAX).then_some(Source { from, x: x.address, stride, norm, eps })
    }
}
