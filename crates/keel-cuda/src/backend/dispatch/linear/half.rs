//! x in 16 bits for products on tensor cores. The kernel that rounds x also computes what comes before: a norm, the
//! layer norm, the gated norm of heads, a gate, SwiGLU, or a chain of element-wise operations.

use super::super::{Bound, BoundKernel, Call, Geometry, elementwise};
use crate::kernels::{ACTIVATION, FP8_PREFILL, HalfForm, KernelKey, RMS_NORM, Source};
use crate::parameters::{GatedHeadsHalf, LayerNormHalf, RmsNorm, SwiGlu, SwiGluOfHalf, Wide};
use keel_array::{ArrayError, DType, Op, WeightSpec};

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
    let odd = |operand: &&Bound<'_>| !operand.address.is_multiple_of(16) && !shared(operand);
    if let Some(odd) = producer.inputs.iter().find(odd) {
        let shape = &odd.layout.shape;
        return Err(
            call.error(format!("{shape} does not begin at a multiple of 16 bytes; make it contiguous"))
        );
    }
    let heads = |gate: Bound<'_>, w: u64, eps: f32| {
        let (gate_row, gate_head) = gate.head_strides();
        let (d, heads) = (gate.width(), weight.cols / gate.width());
        let parameters = GatedHeadsHalf {
            x: x.address,
            gate: gate.address,
            gate_row: Wide(gate_row),
            gate_head: Wide(gate_head),
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
            call.launch(&key(FP8_PREFILL, "swiglu_of_half"), Geometry::rows(blocks, 256), &parameters)
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
