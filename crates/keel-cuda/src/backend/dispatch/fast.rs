//! Norms, rotary embedding and gates.

use super::{Bound, Call, Geometry};
use crate::backend::Precision;
use crate::backend::operand::HeadStrides;
use crate::kernels::{ACTIVATION, KernelKey, RMS_NORM, ROPE, ROTATE_PAIRS};
use crate::parameters::{AddRmsNorm, GatedRmsNorm, RmsNorm, Rope, RotatePairs, SigmoidGate, SwiGlu, Wide};
use keel_array::{ArrayError, Op, RopeSpec};

pub(super) fn run(call: &Call<'_>) -> Result<(), ArrayError> {
    let (x, y) = (&call.inputs[0], &call.outputs[0]);
    let norm = |entry| KernelKey::new(RMS_NORM, entry);
    match &call.kernel.op {
        Op::RmsNorm { eps } => {
            let parameters = RmsNorm {
                x: x.address,
                stride: Wide(x.row_stride(1)),
                w: call.inputs[1].address,
                y: y.address,
                width: x.width(),
                eps: eps.get(),
            };
            call.launch(&norm("rms_norm"), row_geometry(x.rows(), x.width()), &parameters)
        }
        Op::AddRmsNorm { eps } => {
            let [x, residual, w] = &call.inputs[..] else { unreachable!("three operands") };
            let parameters = AddRmsNorm {
                x: x.address,
                residual: residual.address,
                w: w.address,
                sum: y.address,
                y: call.outputs[1].address,
                width: x.width(),
                eps: eps.get(),
            };
            call.launch(&norm("add_rms_norm"), row_geometry(x.rows(), x.width()), &parameters)
        }
        Op::GatedRmsNorm { eps } => {
            let [x, w, z] = &call.inputs[..] else { unreachable!("three operands") };
            let parameters = GatedRmsNorm {
                x: x.address,
                x_stride: Wide(x.row_stride(2)),
                w: w.address,
                z: z.address,
                z_stride: Wide(z.row_stride(2)),
                // Rows of the operands are tokens, each with this number of heads.
                heads: x.layout.shape.iter().rev().nth(1).copied().unwrap_or(1),
                y: y.address,
                width: x.width(),
                eps: eps.get(),
            };
            call.launch(&norm("gated_rms_norm"), row_geometry(x.rows(), x.width()), &parameters)
        }
        Op::Rope(spec) => rotate(spec, None, call),
        Op::NormRope { rope, eps } => rotate(rope, Some(eps.get()), call),
        Op::RotatePairs => {
            let [_, scales, pairs, cos_sin] = &call.inputs[..] else { unreachable!("four operands") };
            let parameters = RotatePairs {
                x: x.address,
                stride: Wide(x.row_stride(1)),
                scales: scales.address,
                pairs: pairs.address,
                cos_sin: cos_sin.address,
                y: y.address,
                width: x.width(),
                rounds: pairs.layout.shape[0],
                fault: call.fault,
                kernel: call.index,
            };
            let key = KernelKey::new(ROTATE_PAIRS, "rotate_pairs");
            call.launch(&key, row_geometry(x.rows(), x.width()), &parameters)
        }
        Op::SwiGlu => swiglu(x, y, call),
        Op::SigmoidGate => {
            let (x, gate) = (call.strided(0), call.strided(1));
            let parameters = SigmoidGate {
                x: x.address,
                sx: x.strides(),
                gate: gate.address,
                sg: gate.strides(),
                y: y.address,
                n: Wide(y.len()),
            };
            call.launch(&KernelKey::new(ACTIVATION, "sigmoid_gate"), Geometry::elements(y.len()), &parameters)
        }
        op => unreachable!("{} is no norm, rotation or gate", op.name()),
    }
}

/// `y = silu(first half of x) * second half`, gap-free.
pub(super) fn swiglu(x: &Bound<'_>, y: &Bound<'_>, call: &Call<'_>) -> Result<(), ArrayError> {
    let parameters = SwiGlu {
        x: x.address,
        stride: Wide(x.row_stride(1)),
        y: y.address,
        rows: Wide(y.rows()),
        width: y.width(),
    };
    let is_quick = call.mode.precision == Precision::Fast;
    let key = KernelKey::new(ACTIVATION, "swiglu").define("QUICK", u8::from(is_quick));
    call.launch(&key, Geometry::elements(y.len()), &parameters)
}

/// A block for each row, with as many threads as the row keeps busy.
fn row_geometry(rows: usize, width: usize) -> Geometry {
    Geometry::rows(rows, width.div_ceil(4).next_multiple_of(32).clamp(32, 1024))
}

/// `norm_eps` is the epsilon if each head is normed first. The norm's weight is the fourth operand.
fn rotate(spec: &RopeSpec, norm_eps: Option<f32>, call: &Call<'_>) -> Result<(), ArrayError> {
    const WARPS: usize = 4;
    let (x, y) = (call.strided(0), &call.outputs[0]);
    let (tokens, heads) = (x.layout.shape[0], x.layout.shape[1]);
    let HeadStrides { row, head } = match call.producer(0) {
        Some(_) => x.head_strides(),
        None => HeadStrides { row: x.row_stride(2), head: x.width() },
    };
    let key = rotation(KernelKey::new(ROPE, "rope"), spec, norm_eps.is_some()).define("D", x.width());
    let parameters = Rope {
        x: x.address,
        stride: Wide(row),
        head_stride: Wide(head),
        positions: call.inputs[1].address,
        inverse: call.inputs[2].address,
        w: norm_eps.map_or(0, |_| call.inputs[3].address),
        eps: norm_eps.unwrap_or(0.0),
        y: y.address,
        tokens,
        heads,
    };
    call.launch(&key, Geometry::rows((tokens * heads).div_ceil(WARPS), 32 * WARPS), &parameters)
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
