//! x in 16 bits for products on tensor cores. The kernel that rounds x also computes what comes before: a norm, the
//! layer norm, the gated norm of heads, a gate, SwiGLU, or a chain of element-wise operations.

use super::super::{Bound, BoundKernel, Call, Geometry, elementwise};
use crate::driver::Arguments;
use crate::kernels::{ACTIVATION, HalfForm, KernelKey, RMS_NORM, Source};
use keel_array::{ArrayError, Op, WeightSpec};

/// Writes the result of `maker` to address `to`.
pub(super) fn absorbed_to_half(
    producer: &BoundKernel<'_>,
    weight: &WeightSpec,
    rows: usize,
    to: u64,
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
    let heads = |gate: Bound<'_>, norm: u64, eps: f32| {
        let (row, head) = gate.head_strides();
        let (size, count) = (gate.width(), weight.cols / gate.width());
        let arguments = Arguments::default().pointer(x.address).pointer(gate.address).u64(row).u64(head);
        let arguments = arguments.pointer(norm).pointer(to).u32(rows * count).u32(count).u32(size).f32(eps);
        let blocks = (rows * count).div_ceil(8);
        call.launch_generated(&key(RMS_NORM, "gated_heads_half"), Geometry::rows(blocks, 256), arguments)
    };
    match producer.kernel.op {
        Op::SwiGlu => {
            let arguments = Arguments::default().pointer(x.address).u64(x.row_stride(1));
            let arguments = arguments.pointer(to).u64(rows).u32(weight.cols);
            let blocks = (rows * weight.cols / 8).div_ceil(256);
            call.launch_generated(&key(ACTIVATION, "swiglu_half"), Geometry::rows(blocks, 256), arguments)
        }
        Op::RmsNorm { eps } => {
            let norm = producer.inputs[1].address;
            let arguments = Arguments::default().pointer(x.address).u64(x.row_stride(1)).pointer(norm);
            let arguments = arguments.pointer(to).u32(weight.cols).f32(eps.get());
            let block = (weight.cols / 4).next_multiple_of(32);
            call.launch_generated(&key(RMS_NORM, "rms_norm_half"), Geometry::rows(rows, block), arguments)
        }
        Op::LayerNorm { eps } => {
            let [norm, bias] = [1, 2].map(|i| producer.inputs[i].address);
            let arguments = Arguments::default().pointer(x.address).u64(x.row_stride(1)).pointer(norm);
            let arguments = arguments.pointer(bias).pointer(to).u32(weight.cols).f32(eps.get());
            let block = (weight.cols / 4).next_multiple_of(32);
            call.launch_generated(&key(RMS_NORM, "layer_norm_half"), Geometry::rows(rows, block), arguments)
        }
        Op::GatedRmsNorm { eps } => heads(producer.strided(2), producer.inputs[1].address, eps.get()),
        Op::SigmoidGate => heads(producer.strided(1), 0, 0.0),
        Op::Unary(_) | Op::Binary(_) | Op::Fused(_) => {
            elementwise::chain_by_four(producer, to, Some(form), call)
        }
        ref op => unreachable!("{} is not absorbed by a product of many rows", op.name()),
    }
}
