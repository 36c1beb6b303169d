//! Products of many rows in 8-bit floats (e4m3) through cuBLASLt, for `Compute::PrefillFp8` and `Compute::Fp8`. x and W
//! are rounded with a scale for each row: W for each product, or once, when it is loaded. Twice the rate of 16 bits and
//! half the bytes of W; each factor is off by up to 2^-4 of itself.

use super::super::attention::leaves_half;
use super::super::{Bound, Call, Geometry};
use super::blas::result_type;
use super::half_operands::HALF_ALIGN;
use super::selection::{LinearKernel, SelectBy, linear_kernel, takes_x_in_half};
use super::{col_tiles, pairs, weight_key};
use crate::backend::Mode;
use crate::backend::weights::{Layout as WeightLayout, TILE_ROWS, keeps_fp8, suits_fp8};
use crate::driver::{FactorType, Product, ProductOperands, ScaleAddresses};
use crate::kernels::{FP8, KernelKey};
use crate::parameters::{DequantizeToFp8, QuantizeFp8, Wide};
use keel_array::{ArrayError, Compute, DType, Kernel, Layout, Op, Operand, WeightSpec};

/// Threads that round a row of x, at most.
const THREADS_MAX: usize = 1024;

/// Groups of four values that such a thread has in registers, unless a row takes more than [`THREADS_MAX`].
const FOURS_OF_THREAD: usize = 6;

/// Columns of the longest row. A thread then has 64 values.
const COLS_MAX: usize = THREADS_MAX * 64;

/// Warps of a block that rounds W.
const WARPS: usize = 8;

/// Column tiles of a row tile that such a warp has in registers, at most.
const WARP_TILES_MAX: usize = 4;

/// Whether a product that goes through cuBLASLt is tried in 8 bits. The library decides when it sees the device.
pub(super) fn is_tried(weight: &WeightSpec) -> bool {
    matches!(weight.compute, Compute::PrefillFp8 | Compute::Fp8) && suits_fp8(weight)
}

/// See `Programs::narrows`: the kernels that write f16 for a product that rounds x to 8 bits.
///
/// - a product of gate and up, before SwiGLU that is absorbed;
/// - attention of prompts.
///
/// So it is on every device: if the library does not multiply 8 bits, it multiplies 16. f16 holds an eighth of each
/// value, off by up to 2^-11 of it, and saturates at 524,000.
pub(in crate::backend) fn narrows(producer: &Kernel, reader: &Kernel, mode: Mode) -> bool {
    let wide = &producer.outputs[0];
    let is_seen_whole = |seen: &Operand| {
        let Layout { shape, offset, .. } = &seen.layout;
        let elements = wide.layout.shape.elements();
        let is_whole = (shape.elements(), *offset) == (elements, 0) && seen.layout.is_contiguous();
        is_whole && seen.memory == wide.memory
    };
    let leaves = match (&producer.op, reader.producer(0)) {
        (Op::Linear { residual: false, .. }, Some(gate)) => {
            matches!(gate.op, Op::SwiGlu) && is_seen_whole(&gate.inputs[0]) && takes_fp8(producer, mode)
        }
        (Op::PagedAttention(spec), None) => {
            is_seen_whole(&reader.inputs[0]) && leaves_half(spec, producer, mode)
        }
        _ => false,
    };
    leaves && takes_fp8(reader, mode)
}

/// Whether a kernel is a product that is tried in 8 bits on every device.
fn takes_fp8(kernel: &Kernel, mode: Mode) -> bool {
    let Op::Linear { weight, .. } = &kernel.op else { return false };
    let rows = kernel.inputs[0].layout.shape.elements() / weight.cols;
    let by = SelectBy::of(kernel, mode);
    is_tried(weight)
        && takes_x_in_half(weight, kernel, mode)
        && linear_kernel(weight, rows, by) == LinearKernel::Blas
}

/// Where x and W in 8 bits and their scales lie in the scratch, from a multiple of [`HALF_ALIGN`] on. W takes the place
/// that it has in 16 bits, unless it is kept in 8.
pub(super) struct Fp8Scratch {
    w: usize,
    x: usize,
    x_scales: usize,
    w_scales: usize,
    pub end: usize,
}

impl Fp8Scratch {
    /// W is at `w`. The other sections begin at `first`.
    pub fn new(weight: &WeightSpec, rows: usize, w: usize, first: usize) -> Fp8Scratch {
        let x = first.next_multiple_of(HALF_ALIGN);
        let x_scales = (x + rows * weight.cols).next_multiple_of(HALF_ALIGN);
        let w_scales = (x_scales + rows * size_of::<f32>()).next_multiple_of(HALF_ALIGN);
        Fp8Scratch { w, x, x_scales, w_scales, end: w_scales + weight.rows * size_of::<f32>() }
    }
}

/// A product in 8 bits.
pub(super) struct Fp8Product<'a> {
    weight: &'a WeightSpec,
    product: Product,
    operands: ProductOperands,
    /// The address of the workspace.
    own: u64,
}

/// The source of x in 8 bits: rows of values, `stride` elements apart. The names are those of the kernel's constants.
struct Source {
    from: &'static str,
    x: u64,
    stride: usize,
    /// The norm's weight; 0 without a norm.
    norm: u64,
    eps: f32,
}

impl<'a> Fp8Product<'a> {
    /// The product of `rows` rows, with its scratch from address `own` on. `None` if the library has no kernel for it
    /// on this device.
    pub fn of(
        weight: &'a WeightSpec,
        rows: usize,
        accumulate: bool,
        scratch: &Fp8Scratch,
        own: u64,
        call: &Call<'_>,
    ) -> Option<Fp8Product<'a>> {
        let (cols, inner, result) = (weight.rows, weight.cols, result_type(&call.outputs[0]));
        let product = Product {
            rows,
            cols,
            inner,
            alpha: 1,
            accumulate,
            bias: false,
            factors: FactorType::E4m3,
            result,
        };
        let at = |offset: usize| own + offset as u64;
        let of_weight = |offset: usize| call.inputs[1].address + offset as u64;
        let (w, w_scales) = match WeightLayout::of(weight).fp8 {
            Some(copy) => (of_weight(copy.codes), of_weight(copy.scales)),
            None => (at(scratch.w), at(scratch.w_scales)),
        };
        let scales = ScaleAddresses { x: at(scratch.x_scales), w: w_scales };
        let (x, y) = (at(scratch.x), call.outputs[0].address);
        let operands = ProductOperands { x, w, y, bias: 0, scales };
        let refusal = call.gpu.blas.takes(product, &operands).err();
        if let Some(refusal) = &refusal {
            tracing::debug!("{refusal}; multiplied in 16 bits");
        }
        refusal.is_none().then_some(Fp8Product { weight, product, operands, own })
    }

    /// Writes x in 8 bits, in one launch from its `Source`. If it has none, `halve` first writes x in 16 bits to
    /// address `half`.
    pub fn round(
        &self,
        half: u64,
        halve: impl FnOnce() -> Result<(), ArrayError>,
        call: &Call<'_>,
    ) -> Result<(), ArrayError> {
        let cols = self.weight.cols;
        let source = match Source::before(cols, call) {
            Some(source) => source,
            None => {
                halve()?;
                Source { from: "FROM_F16", x: half, stride: cols, norm: 0, eps: 0.0 }
            }
        };
        let Source { from, x, stride, norm, eps } = source;
        let threads = threads(cols);
        let key = KernelKey::new(FP8, "quantize_fp8").define("DIM_K", cols);
        let key = key.define("THREADS", threads).define("FROM", from);
        let ProductOperands { x: y, scales, .. } = self.operands;
        let parameters = QuantizeFp8 { x, stride: Wide(stride), w: norm, eps, y, scales: scales.x };
        call.launch(&key, Geometry::rows(self.product.rows, threads), &parameters)
    }

    /// Multiplies x with W, which it rounds first, unless it is kept in 8 bits.
    pub fn multiply(&self, call: &Call<'_>) -> Result<(), ArrayError> {
        if !keeps_fp8(self.weight) {
            let parameters = DequantizeToFp8 {
                weight: call.inputs[1].address,
                pairs: pairs(self.weight, &call.inputs[1]),
                out: self.operands.w,
                scales: self.operands.scales.w,
            };
            let (key, geometry) = rounds_weight(self.weight, self.weight.rows);
            call.launch(&key, geometry, &parameters)?;
        }
        let multiplied = call.multiply(self.product, self.operands, self.own);
        multiplied.map_err(|error| error.in_op(call.kernel.op.name()))
    }
}

/// The kernel that rounds the first `rows` rows of a weight, and its launch.
pub(in crate::backend) fn rounds_weight(weight: &WeightSpec, rows: usize) -> (KernelKey, Geometry) {
    // Blocks of a row tile take equally many column tiles, up to rounding.
    let tiles = col_tiles(weight);
    let pieces = tiles.div_ceil(WARPS * WARP_TILES_MAX);
    let key = weight_key(FP8, "dequantize_to_fp8", weight);
    let key = key.define("PIECES", pieces).define("WARP_TILES", tiles.div_ceil(WARPS * pieces));
    (key, Geometry::rows(rows.div_ceil(TILE_ROWS) * pieces, WARPS * 32))
}

/// Threads that round a row of x. All of them have equally many groups of four values, if that is possible.
fn threads(cols: usize) -> usize {
    let fours = cols / 4;
    let equal =
        (2..=FOURS_OF_THREAD).rev().filter(|each| fours.is_multiple_of(*each)).map(|each| fours / each);
    let whole = |threads: &usize| threads.is_multiple_of(32) && (128..=THREADS_MAX).contains(threads);
    let any = fours.div_ceil(FOURS_OF_THREAD).next_multiple_of(32).clamp(128, THREADS_MAX);
    equal.into_iter().find(whole).unwrap_or(any)
}

impl Source {
    /// The source of a product's x in 8 bits: x itself, or the input of the norm or SwiGLU before the product. `None`
    /// if another kernel has to make x.
    fn before(cols: usize, call: &Call<'_>) -> Option<Source> {
        let plain = |from, x: &Bound<'_>, stride| Source { from, x: x.address, stride, norm: 0, eps: 0.0 };
        let source = match call.producer(0) {
            None if call.inputs[0].dtype == DType::F16 => plain("FROM_F16", &call.inputs[0], cols),
            None => plain("FROM_F32", &call.inputs[0], cols),
            Some(producer) => {
                let x = &producer.inputs[0];
                match producer.kernel.op {
                    Op::SwiGlu if x.dtype == DType::F16 => plain("FROM_SWIGLU_F16", x, x.row_stride(1)),
                    Op::SwiGlu => plain("FROM_SWIGLU", x, x.row_stride(1)),
                    Op::RmsNorm { eps } => Source {
                        norm: producer.inputs[1].address,
                        eps: eps.get(),
                        ..plain("FROM_NORM", x, x.row_stride(1))
                    },
                    _ => return None,
                }
            }
        };
        let is_aligned = source.x.is_multiple_of(16) && source.stride.is_multiple_of(4);
        (is_aligned && cols <= COLS_MAX).then_some(source)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agreement::assert_values;
    use keel_array::WeightFormat;

    #[test]
    fn the_source_has_as_many_warps() {
        let format = WeightFormat::Affine { bits: 4, group_size: 64, scale_dtype: DType::BF16 };
        let weight = WeightSpec { experts: 1, rows: 96, cols: 4096, format, compute: Compute::PrefillFp8 };
        let (key, geometry) = rounds_weight(&weight, weight.rows);
        assert_values(key, &[("WARPS", WARPS), ("32 * WARPS", geometry.block.0)]);
    }
}
