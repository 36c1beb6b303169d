//! Reductions, sorting and running sums of the last axis.

use super::Call;
use crate::kernels::generic::reduce::{
    DIVIDED_ROWS_MAX, arg_reduce, argmax_divided, cumsum, layer_norm, reduce, softmax,
};
use crate::kernels::generic::scalar::{with_float, with_scalar};
use crate::kernels::generic::sort::{Order, sort, top_k};
use crate::kernels::sample::{sample, scratch_words};
use crate::pool::Worker;
use keel_array::{DType, Kernel, Op};

pub(super) fn run(call: &Call<'_>, worker: &Worker<'_>) {
    let (x, y, isa) = (&call.inputs[0], &call.outputs[0], call.isa);
    let width = x.width();
    match &call.kernel.op {
        Op::Reduce(reduction) => with_scalar!(x.dtype, T => {
            reduce::<T>(*reduction, x.values(), width, y.shared(), isa, worker);
        }),
        Op::ArgReduce { .. } if is_divided(call.kernel) => {
            argmax_divided(x.values(), width, y.shared(), call.scratch(), worker);
        }
        Op::ArgReduce { largest } => with_scalar!(x.dtype, T => {
            arg_reduce::<T>(*largest, x.values(), width, y.shared(), worker);
        }),
        Op::Softmax => with_float!(x.dtype, T => softmax::<T>(x.values(), width, y.shared(), isa, worker)),
        Op::CumSum { reverse, exclusive } => with_scalar!(x.dtype, T => {
            cumsum::<T>(x.values(), width, *reverse, *exclusive, y.shared(), worker);
        }),
        Op::Sort { descending } => with_scalar!(x.dtype, T => {
            let order = Order { descending: *descending };
            sort::<T>(x.values(), width, order, y.shared(), call.outputs[1].shared(), worker);
        }),
        Op::TopK { k } => with_scalar!(x.dtype, T => {
            top_k::<T>(x.values(), width, *k, y.shared(), call.outputs[1].shared(), worker);
        }),
        Op::Sample => {
            sample(x.values(), width, call.inputs[1].values(), y.shared(), call.scratch(), worker);
        }
        Op::LayerNorm { eps } => with_float!(x.dtype, T => {
            let (weight, bias) = (call.inputs[1].values(), call.inputs[2].values());
            layer_norm::<T>(x.values(), weight, bias, eps.get(), y.shared(), isa, worker);
        }),
        op => unreachable!("{} is not a reduction", op.name()),
    }
}

pub(super) fn workspace_bytes(kernel: &Kernel, workers: usize) -> usize {
    let rows = kernel.outputs[0].layout.shape.elements();
    if matches!(kernel.op, Op::Sample) {
        return scratch_words(rows, workers) * size_of::<u64>();
    }
    if is_divided(kernel) { 2 * rows * workers * size_of::<u32>() } else { 0 }
}

/// Whether all workers search each row for the largest value together.
fn is_divided(kernel: &Kernel) -> bool {
    let rows = kernel.outputs[0].layout.shape.elements();
    let is_argmax = matches!(kernel.op, Op::ArgReduce { largest: true });
    is_argmax && kernel.inputs[0].dtype == DType::F32 && (1..=DIVIDED_ROWS_MAX).contains(&rows)
}
