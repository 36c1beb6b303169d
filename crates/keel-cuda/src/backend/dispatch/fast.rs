//! Norms, rotary embedding and gates.

use super::{Bound, Call, Geometry};
use crate::driver::Arguments;
use crate::kernels::{ACTIVATION, KernelKey, RMS_NORM, ROPE, ROTATE_PAIRS};
use keel_array::{ArrayError, Op, RopeSpec};

pub(super) fn run(call: &Call<'_>) -> Result<(), ArrayError> {
    let (x, y) = (&call.inputs[0], &call.outputs[0]);
    let norm = |entry| KernelKey::new(RMS_NORM, entry);
    match &call.kernel.op {
        Op::RmsNorm { eps } => {
            let arguments = Arguments::default()
                .pointer(x.address)
                .u64(x.row_stride(1))
                .pointer(call.inputs[1].address)
                .pointer(y.address)
                .u32(x.width())
                .f32(eps.get());
            call.launch_generated(&norm("rms_norm"), row_geometry(x.rows(), x.width()), arguments)
        }
        Op::AddRmsNorm { eps } => {
            let [x, residual, w] = &call.inputs[..] else { unreachable!("three operands") };
            let arguments = [x, residual, w, y, &call.outputs[1]]
                .into_iter()
                .fold(Arguments::default(), |a, operand| a.pointer(operand.address));
            let arguments = arguments.u32(x.width()).f32(eps.get());
            call.launch_generated(&norm("add_rms_norm"), row_geometry(x.rows(), x.width()), arguments)
        }
        Op::GatedRmsNorm { eps } => {
            let [x, w, z] = &call.inputs[..] else { unreachable!("three operands") };
            // Rows of the operands are tokens, each with `heads` heads.
            let heads = x.layout.shape.iter().rev().nth(1).copied().unwrap_or(1);
            let arguments = Arguments::default()
                .pointer(x.address)
                .u64(x.row_stride(2))
                .pointer(w.address)
                .pointer(z.address)
                .u64(z.row_stride(2))
                .u32(heads)
                .pointer(y.address)
                .u32(x.width())
                .f32(eps.get());
            call.launch_generated(&norm("gated_rms_norm"), row_geometry(x.rows(), x.width()), arguments)
        }
        Op::Rope(spec) => rotate(spec, None, call),
        Op::NormRope { rope, eps } => rotate(rope, Some((call.inputs[3].address, eps.get())), call),
        Op::RotatePairs => {
            let [_, scales, pairs, cos_sin] = &call.inputs[..] else { unreachable!("four operands") };
            let arguments = Arguments::default().pointer(x.address).u64(x.row_stride(1));
            let arguments =
                [scales, pairs, cos_sin, y].iter().fold(arguments, |a, operand| a.pointer(operand.address));
            let arguments = arguments.u32(x.width()).u32(pairs.layout.shape[0]);
            let arguments = arguments.pointer(call.fault).u32(call.index);
            call.launch_generated(
                &KernelKey::new(ROTATE_PAIRS, "rotate_pairs"),
                row_geometry(x.rows(), x.width()),
                arguments,
            )
        }
        Op::SwiGlu => swiglu(x, y, call),
        Op::SigmoidGate => {
            let (x, gate) = (call.strided(0), call.strided(1));
            let arguments = Arguments::default()
                .pointer(x.address)
                .words(&x.strides())
                .pointer(gate.address)
                .words(&gate.strides())
                .pointer(y.address)
                .u64(y.len());
            call.launch_generated(
                &KernelKey::new(ACTIVATION, "sigmoid_gate"),
                Geometry::elements(y.len()),
                arguments,
            )
        }
        op => unreachable!("{} is no norm, rotation or gate", op.name()),
    }
}

/// `y = silu(first half of x) * second half`, gap-free.
pub(super) fn swiglu(x: &Bound<'_>, y: &Bound<'_>, call: &Call<'_>) -> Result<(), ArrayError> {
    let arguments = Arguments::default()
        .pointer(x.address)
        .u64(x.row_stride(1))
        .pointer(y.address)
        .u64(y.rows())
        .u32(y.width());
    call.launch_generated(&KernelKey::new(ACTIVATION, "swiglu"), Geometry::elements(y.len()), arguments)
}

/// A block for each row, with as many threads as the row keeps busy.
fn row_geometry(rows: usize, width: usize) -> Geometry {
    Geometry::rows(rows, width.div_ceil(4).next_multiple_of(32).clamp(32, 1024))
}

fn rotate(spec: &RopeSpec, norm: Option<(u64, f32)>, call: &Call<'_>) -> Result<(), ArrayError> {
    const WARPS: usize = 4;
    let (x, y) = (call.strided(0), &call.outputs[0]);
    let (tokens, heads) = (x.layout.shape[0], x.layout.shape[1]);
    let (stride, head_stride) = match call.producer(0) {
        Some(_) => x.head_strides(),
        None => (x.row_stride(2), x.width()),
    };
    let key = rotation(KernelKey::new(ROPE, "rope"), spec, norm.is_some()).define("D", x.width());
    let (weight, eps) = norm.unwrap_or((0, 0.0));
    let arguments = Arguments::default()
        .pointer(x.address)
        .u64(stride)
        .u64(head_stride)
        .pointer(call.inputs[1].address)
        .pointer(call.inputs[2].address)
        .pointer(weight)
        .f32(eps)
        .pointer(y.address)
        .u32(tokens)
        .u32(heads);
    let grid = ((tokens * heads).div_ceil(WARPS), 1, 1);
    call.launch_generated(&key, Geometry { grid, block: (32 * WARPS, 1, 1), shared_bytes: 0 }, arguments)
}

/// All constants of `rope.cuh` except the head size.
pub(super) fn rotation(key: KernelKey, spec: &RopeSpec, normed: bool) -> KernelKey {
    let axes: Vec<String> = frequency_axes(spec).iter().map(usize::to_string).collect();
    key.define("R", spec.rotary)
        .define("NORM", u8::from(normed))
        .define("AXES", format!("{{{}}}", axes.join(",")))
}

/// The row of the positions that each frequency reads; see [`RopeSpec`].
fn frequency_axes(spec: &RopeSpec) -> Vec<usize> {
    let sections = spec.sections.unwrap_or([spec.rotary / 2, 0, 0]);
    let axis = |i: usize| match spec.interleaved {
        true if i < 3 * sections[i % 3] => i % 3,
        true => 0,
        false => usize::from(i >= sections[0]) + usize::from(i >= sections[0] + sections[1]),
    };
    let single = spec.sections.is_none();
    (0..spec.rotary / 2).map(|i| if single { 0 } else { axis(i) }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequencies_read_the_position_of_their_section() {
        let axes = |sections, interleaved| frequency_axes(&RopeSpec { rotary: 12, sections, interleaved });
        assert_eq!(axes(None, true), [0; 6]);
        assert_eq!(axes(Some([3, 2, 1]), false), [0, 0, 0, 1, 1, 2]);
        assert_eq!(axes(Some([2, 2, 2]), true), [0, 1, 2, 0, 1, 2]);
        assert_eq!(axes(Some([4, 1, 1]), true), [0, 1, 2, 0, 0, 0]);
    }
}
