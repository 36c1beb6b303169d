//! Element-wise operations: floats as chains, all other types by type.

use super::Call;
use crate::kernels::generic::chain::chain;
use crate::kernels::generic::elementwise::{cast, compare, integer_binary, integer_unary, select};
use crate::kernels::generic::scalar::{with_bits, with_float, with_scalar};
use crate::pool::Worker;
use keel_array::{Binary, FusedStep, Op, Source};

pub(super) fn run(call: &Call<'_>, worker: &Worker<'_>) {
    let (x, y) = (&call.inputs[0], &call.outputs[0]);
    match &call.kernel.op {
        Op::Cast => with_scalar!(x.dtype, S => with_scalar!(y.dtype, D => {
            cast::<S, D>(x.strided(), y.shared(), worker);
        })),
        Op::Unary(op) if x.dtype.is_float() => {
            float(&[FusedStep::Unary(*op, Source::Input(0))], call, worker)
        }
        Op::Unary(op) => with_scalar!(x.dtype, T => {
            integer_unary::<T>(*op, x.strided(), y.shared(), worker);
        }),
        Op::Binary(op @ (Binary::Equal | Binary::Less | Binary::LessEqual)) => with_scalar!(x.dtype, T => {
            compare::<T>(*op, x.strided(), call.inputs[1].strided(), y.shared(), worker);
        }),
        Op::Binary(op) if x.dtype.is_float() => {
            float(&[FusedStep::Binary(*op, Source::Input(0), Source::Input(1))], call, worker);
        }
        Op::Binary(op) => with_scalar!(x.dtype, T => {
            integer_binary::<T>(*op, x.strided(), call.inputs[1].strided(), y.shared(), worker);
        }),
        Op::Where => with_bits!(y.dtype, T => {
            let (a, b) = (call.inputs[1].strided::<T>(), call.inputs[2].strided::<T>());
            select(x.strided(), a, b, y.shared(), worker);
        }),
        Op::Fused(fused) => float(&fused.steps, call, worker),
        op => unreachable!("{} is not element-wise", op.name()),
    }
}

fn float(steps: &[FusedStep], call: &Call<'_>, worker: &Worker<'_>) {
    with_float!(call.outputs[0].dtype, T => {
        let inputs: Vec<_> = call.inputs.iter().map(|x| x.strided::<T>()).collect();
        chain(steps, &inputs, call.outputs[0].shared(), call.isa, worker);
    });
}
