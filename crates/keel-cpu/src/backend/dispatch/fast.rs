//! Norms, rotary embedding and gates.

use super::Call;
use crate::kernels::activation::{sigmoid_gate, swiglu};
use crate::kernels::generic::rotate_pairs::{Rounds, rotate_pairs};
use crate::kernels::rms_norm::{add_rms_norm, gated_rms_norm, rms_norm};
use crate::kernels::rope::{FREQUENCIES_MAX, HeadNorm, Rope, mrope_axes, rope};
use crate::pool::Worker;
use keel_array::{ArrayError, Op, RopeSpec};

pub(super) fn run(call: &Call<'_>, worker: &Worker<'_>) -> Result<(), ArrayError> {
    let (x, y) = (&call.inputs[0], &call.outputs[0]);
    if x.len() == 0 {
        return Ok(());
    }
    match &call.kernel.op {
        Op::RmsNorm { eps } => {
            rms_norm(x.rows(1), call.inputs[1].values(), eps.get(), y.rows_mut(1), worker);
        }
        Op::AddRmsNorm { eps } => {
            call.copy_input_to_output(1, 0, worker);
            let (sum, norm) = (y.rows_mut(1), call.outputs[1].rows_mut(1));
            add_rms_norm(x.rows(1), sum, call.inputs[2].values(), eps.get(), norm, worker);
        }
        Op::GatedRmsNorm { eps } => {
            let (weight, gate) = (call.inputs[1].values(), call.inputs[2].rows(2));
            gated_rms_norm(x.rows(2), gate, weight, eps.get(), y.rows_mut(2), worker);
        }
        Op::Rope(spec) => return rotate(spec, None, call, worker),
        Op::NormRope { rope, eps } => {
            let norm = HeadNorm { weight: call.inputs[3].values(), eps: eps.get() };
            return rotate(rope, Some(norm), call, worker);
        }
        Op::RotatePairs => {
            let (scales, pairs, cos_sin) = (&call.inputs[1], &call.inputs[2], &call.inputs[3]);
            // A negative i32 is out of range as a u32, too.
            let rounds = Rounds { scales: scales.values(), pairs: pairs.values(), cos_sin: cos_sin.values() };
            if let Some(column) = rounds.astray() {
                return Err(call.error(format!("a pair names column {column} of {}", x.width())));
            }
            rotate_pairs(x.rows(1), rounds, y.rows_mut(1), worker);
        }
        Op::SwiGlu => swiglu(x.rows(1), y.rows_mut(1), worker),
        Op::SigmoidGate => sigmoid_gate(x.rows(1), call.inputs[1].rows(1), y.rows_mut(1), worker),
        op => unreachable!("{} is no norm, rotation or gate", op.name()),
    }
    Ok(())
}

/// Refuses heads with more rotary elements than the kernel has room for.
pub(super) fn supports_rotation(spec: &RopeSpec) -> Result<(), String> {
    let most = 2 * FREQUENCIES_MAX;
    if spec.rotary <= most {
        return Ok(());
    }
    Err(format!("{} rotary elements; at most {most} are supported", spec.rotary))
}

fn rotate(
    spec: &RopeSpec,
    norm: Option<HeadNorm<'_>>,
    call: &Call<'_>,
    worker: &Worker<'_>,
) -> Result<(), ArrayError> {
    let axes = spec.sections.map_or_else(Vec::new, |sections| mrope_axes(sections, spec.interleaved));
    let x = &call.inputs[0];
    let task = Rope {
        x: x.rows(2),
        head_dim: x.width(),
        positions: call.inputs[1].values(),
        inverse_frequencies: call.inputs[2].values(),
        axes: &axes,
        norm,
        y: call.outputs[0].rows_mut(2),
    };
    rope(&task, worker);
    Ok(())
}
