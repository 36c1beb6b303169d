//! Gathering by index, from arrays and from packed weights.

use super::Call;
use crate::backend::weights;
use crate::kernels::generic::indexing::{Index, position, take, take_along};
use crate::kernels::generic::scalar::with_bits;
use crate::kernels::linear::unpack_row;
use crate::pool::Worker;
use keel_array::{ArrayError, DType, Op, WeightSpec};

pub(super) fn run(call: &Call<'_>, worker: &Worker<'_>) -> Result<(), ArrayError> {
    let indices = match call.kernel.op {
        Op::Embedding { .. } => &call.inputs[0],
        _ => &call.inputs[1],
    };
    let outcome = match indices.dtype {
        DType::I32 => by_index::<i32>(call, indices.values(), worker),
        _ => by_index::<u32>(call, indices.values(), worker),
    };
    outcome.map_err(|reason| call.error(reason))
}

fn by_index<I: Index>(call: &Call<'_>, indices: &[I], worker: &Worker<'_>) -> Result<(), String> {
    let (x, y) = (&call.inputs[0], &call.outputs[0]);
    match &call.kernel.op {
        Op::Take => {
            let width = x.layout.shape[1..].iter().product();
            with_bits!(x.dtype, T => take::<T, I>(x.values(), width, indices, y.shared(), worker))
        }
        Op::TakeAlong => with_bits!(x.dtype, T => {
            take_along::<T, I>(x.values(), x.width(), indices, y.width(), y.shared(), worker)
        }),
        Op::Embedding { weight } => embedding(weight, indices, call, worker),
        op => unreachable!("{} takes no indices", op.name()),
    }
}

/// Rows of a packed weight.
fn embedding<I: Index>(
    spec: &WeightSpec,
    ids: &[I],
    call: &Call<'_>,
    worker: &Worker<'_>,
) -> Result<(), String> {
    let (weight, y) = (call.inputs[1].values(), call.outputs[0].rows_mut(1));
    if let Some(weight) = weights::blocks(spec, weight) {
        for i in worker.claim(ids.len(), 1).flatten() {
            let row = position(ids[i], spec.rows)?;
            // SAFETY: each row is claimed once.
            weight.row(worker.isa, 0, row, unsafe { y.row(i) });
        }
        return Ok(());
    }
    let layout = weights::layout(spec);
    for i in worker.claim(ids.len(), 1).flatten() {
        let row = position(ids[i], spec.rows)?;
        // SAFETY: each row is claimed once.
        unpack_row(worker.isa, &layout, weight, 0, row, unsafe { y.row(i) });
    }
    Ok(())
}
