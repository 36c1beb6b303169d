//! Copies, joins, block replacement.

use super::Call;
use crate::kernels::generic::layout::{JoinedOperand, concatenate, copy, write_block};
use crate::kernels::generic::scalar::with_bits;
use crate::pool::Worker;
use keel_array::Op;

pub(super) fn run(call: &Call<'_>, worker: &Worker<'_>) {
    let y = &call.outputs[0];
    let shape = &y.layout.shape;
    match &call.kernel.op {
        Op::Copy => {
            with_bits!(y.dtype, T => copy(call.inputs[0].strided::<T>(), y.shared(), worker));
        }
        Op::Concatenate { axis } => {
            let outer = shape[..*axis].iter().product();
            with_bits!(y.dtype, T => {
                let operand = |i: usize| JoinedOperand {
                    x: call.inputs[i].strided::<T>(),
                    run: call.inputs[i].layout.shape[*axis..].iter().product(),
                };
                concatenate(call.inputs.len(), operand, outer, y.shared(), worker);
            });
        }
        Op::SliceUpdate { starts } => {
            let [x, update] = call.inputs else { unreachable!("slice_update has two operands") };
            with_bits!(y.dtype, T => {
                if !x.starts_at(y) {
                    copy(x.strided::<T>(), y.shared(), worker);
                    worker.barrier();
                }
                write_block(update.strided::<T>(), &update.layout.shape, starts, shape, y.shared(), worker);
            });
        }
        op => unreachable!("{} moves no elements", op.name()),
    }
}
