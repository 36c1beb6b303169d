//! x and W in 16 bits for products on tensor cores. The kernel that rounds x also computes the operation before the
//! product: a norm, the layer norm, the gated norm of heads, a gate, SwiGLU, or a chain of element-wise operations.

use super::super::{Bound, BoundKernel, Call, Geometry, elementwise};
use super::{col_tiles, pairs, row_tiles, weight_key};
use crate::backend::weights::padded_rows;
use crate::driver::FactorType;
use crate::kernels::{ACTIVATION, DEQUANTIZE, FP8, HalfForm, KernelKey, RMS_NORM, Source};
use crate::parameters::{
    Dequantize, GatedHeadsHalf, LayerNormHalf, RmsNorm, SwiGlu, SwiGluOfHalf, ToHalf, ToTwoBf16, Wide,
};
use keel_array::{ArrayError, Compute, DType, Op, WeightFormat, WeightSpec};

/// Alignment of the sections of scratch, in bytes; the arena promises less.
pub(super) const HALF_ALIGN: usize = 256;

/// The type of the factors of a product on tensor cores.
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

/// Parts of x, each of which is multiplied.
pub(super) fn x_parts(weight: &WeightSpec) -> usize {
    if splits_x(weight) { 2 } else { 1 }
}

/// Bytes of a part of x in 16 bits.
pub(super) fn x_bytes(weight: &WeightSpec, rows: usize) -> usize {
    (rows * weight.cols * size_of::<u16>()).next_multiple_of(HALF_ALIGN)
}

/// Writes x in 16 bits, after the absorbed operation if there is one. If x is split, its two parts are
/// [`x_bytes`] apart.
pub(super) fn to_half(weight: &WeightSpec, rows: usize, to: u64, call: &Call<'_>) -> Result<(), ArrayError> {
    let form = HalfForm::Rows { is_bf16: factors(weight) == FactorType::Bf16 };
    if let Some(producer) = call.producer(0) {
        return absorbed_to_half(producer, weight, rows, to, form, call);
    }
    // Two columns at a time. If the number of columns is odd, a pair may straddle two rows, which does no harm.
    let (x, pairs) = (call.inputs[0].address, (rows * weight.cols).div_ceil(2));
    if splits_x(weight) {
        call.expect_aligned(&call.inputs[0], 8)?;
        let key = weight_key(DEQUANTIZE, "to_two_bf16", weight);
        let parameters = ToTwoBf16 { x, hi: to, lo: to + x_bytes(weight, rows) as u64, pairs: Wide(pairs) };
        return call.launch(&key, Geometry::rows(pairs.div_ceil(256), 256), &parameters);
    }
    call.expect_aligned(&call.inputs[0], 16)?;
    let key = form.define(KernelKey::new(DEQUANTIZE, "to_half"));
    let key = key.define("DIM_N", weight.rows).define("DIM_K", weight.cols);
    let parameters = ToHalf { x, y: to, pairs: Wide(pairs) };
    call.launch(&key, Geometry::rows(pairs.div_ceil(1024), 256), &parameters)
}

/// Bytes of a weight that is widened to f16 in scratch; 0 for one that is multiplied as stored.
pub(super) fn widened_bytes(weight: &WeightSpec) -> usize {
    if is_widened(weight) { padded_rows(weight.rows) * weight.cols * size_of::<u16>() } else { 0 }
}

/// The weight in 16 bits: as stored, or widened to f16 at `scratch`.
pub(super) fn weight_in_half(weight: &WeightSpec, scratch: u64, call: &Call<'_>) -> Result<u64, ArrayError> {
    let packed = &call.inputs[1];
    if !is_widened(weight) {
        return Ok(packed.address);
    }
    let key = weight_key(DEQUANTIZE, "dequantize", weight);
    let (pairs, tiles) = (pairs(weight, packed), row_tiles(weight) * col_tiles(weight));
    let parameters = Dequantize { weight: packed.address, pairs, out: scratch, experts: 1 };
    call.launch(&key, Geometry::rows(tiles.div_ceil(8), 256), &parameters)?;
    Ok(scratch)
}

/// The factor by which a product of x and W in 16 bits is multiplied. In f16, x is an eighth (`half.cuh`). A widened
/// weight makes up for it, and one as stored does not.
pub(super) fn alpha(weight: &WeightSpec) -> u8 {
    if factors(weight) == FactorType::F16 && !is_widened(weight) { 8 } else { 1 }
}

/// Writes the result of `producer` to address `y`.
pub(super) fn absorbed_to_half(
    producer: &BoundKernel<'_>,
    weight: &WeightSpec,
    rows: usize,
    y: u64,
    form: HalfForm,
    call: &Call<'_>,
) -> Result<(), ArrayError> {
    let key = |source: Source, entry| form.define(KernelKey::new(source, entry));
    let x = &producer.inputs[0];
    // A row that all rows share may begin anywhere.
    let shared =
        |operand: &Bound<'_>| operand.layout.shape.rank() < 2 || operand.layout.row_stride(1).is_none();
    producer.inputs.iter().filter(|operand| !shared(operand)).try_for_each(|x| call.expect_aligned(x, 16))?;
    let heads = |gate: Bound<'_>, w: u64, eps: f32| {
        let strides = gate.head_strides();
        let (d, heads) = (gate.width(), weight.cols / gate.width());
        let parameters = GatedHeadsHalf {
            x: x.address,
            gate: gate.address,
            gate_row: Wide(strides.row),
            gate_head: Wide(strides.head),
            w,
            y,
            rows: rows * heads,
            heads,
            d,
            eps,
        };
        let blocks = (rows * heads).div_ceil(8);
        call.launch(&key(RMS_NORM, "gated_heads_half"), Geometry::rows(blocks, 256), &parameters)
    };
    let (width, by_row) = (weight.cols, Geometry::rows(rows, (weight.cols / 4).next_multiple_of(32)));
    let stride = || Wide(x.row_stride(1));
    match producer.kernel.op {
        Op::SwiGlu if x.dtype == DType::F16 => {
            let parameters = SwiGluOfHalf { x: x.address, y, rows: Wide(rows), width };
            let blocks = (rows * width / 8).div_ceil(256);
            call.launch(&key(FP8, "swiglu_of_half"), Geometry::rows(blocks, 256), &parameters)
        }
        Op::SwiGlu => {
            let parameters = SwiGlu { x: x.address, stride: stride(), y, rows: Wide(rows), width };
            let blocks = (rows * width / 8).div_ceil(256);
            call.launch(&key(ACTIVATION, "swiglu_half"), Geometry::rows(blocks, 256), &parameters)
        }
        Op::RmsNorm { eps } => {
            let w = producer.inputs[1].address;
            let parameters = RmsNorm { x: x.address, stride: stride(), w, y, width, eps: eps.get() };
            call.launch(&key(RMS_NORM, "rms_norm_half"), by_row, &parameters)
        }
        Op::LayerNorm { eps } => {
            let ([w, bias], eps) = ([1, 2].map(|i| producer.inputs[i].address), eps.get());
            let parameters = LayerNormHalf { x: x.address, stride: stride(), w, bias, y, width, eps };
            call.launch(&key(RMS_NORM, "layer_norm_half"), by_row, &parameters)
        }
        Op::GatedRmsNorm { eps } => heads(producer.strided(2), producer.inputs[1].address, eps.get()),
        Op::SigmoidGate => heads(producer.strided(1), 0, 0.0),
        Op::Unary(_) | Op::Binary(_) | Op::Fused(_) => {
            elementwise::chain_by_four(producer, y, Some(form), call)
        }
        ref op => unreachable!("{} is not absorbed by a product of many rows", op.name()),
    }
}
