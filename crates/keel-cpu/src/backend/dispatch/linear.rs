//! Matrix products: with packed weights, of arrays, and the mixture of experts around them.

use super::Call;
use crate::backend::weights;
use crate::isa::Isa;
use crate::kernels::blocks::{BlockProduct, workspace_len};
use crate::kernels::generic::experts::{Combine, SharedExpert, combine, route_top_k};
use crate::kernels::generic::matmul::{MatmulShape, matmul};
use crate::kernels::generic::scalar::with_float;
use crate::kernels::linear::Epilogue;
use crate::pool::Worker;
use keel_array::{ArrayError, Kernel, Op};

pub(super) fn run(call: &Call<'_>, worker: &Worker<'_>) -> Result<(), ArrayError> {
    let (x, y) = (&call.inputs[0], &call.outputs[0]);
    match &call.kernel.op {
        Op::Matmul => {
            let (a, b) = (&x.layout.shape, &call.inputs[1].layout.shape);
            let (m, k, n) = (a[a.rank() - 2], a[a.rank() - 1], b[b.rank() - 1]);
            let shape = MatmulShape { batch: a[..a.rank() - 2].iter().product(), m, k, n };
            with_float!(x.dtype, T => {
                let b = call.inputs[1].strided::<T>();
                matmul(shape, x.strided(), b, y.shared(), call.isa, worker);
            });
        }
        Op::Linear { weight, residual } => {
            let epilogue = if *residual {
                call.copy_input_to_output(2, 0, worker);
                Epilogue::Add
            } else {
                Epilogue::Store
            };
            if let Some(weight) = weights::blocks(weight, call.inputs[1].values()) {
                let add = *residual;
                let product = BlockProduct { weight, x: x.values(), experts: None, y: y.shared(), add };
                product.run(call.scratch(), worker);
                return Ok(());
            }
            let linear = weights::linear(weight, call.isa);
            linear.run(worker, call.inputs[1].values(), x.values(), y.shared(), epilogue, call.scratch);
        }
        Op::GatherLinear { weight } => {
            // A negative i32 is out of range as a u32, too.
            let experts: &[u32] = call.inputs[2].values();
            if let Some(wrong) = experts.iter().find(|&&e| e as usize >= weight.experts) {
                return Err(call.error(format!("expert {wrong} of a stack of {}", weight.experts)));
            }
            if let Some(weight) = weights::blocks(weight, call.inputs[1].values()) {
                let product =
                    BlockProduct { weight, x: x.values(), experts: Some(experts), y: y.shared(), add: false };
                product.run(call.scratch(), worker);
                return Ok(());
            }
            let linear = weights::linear(weight, call.isa);
            linear.run_gathered(
                worker,
                call.inputs[1].values(),
                x.values(),
                experts,
                y.shared(),
                call.scratch,
            );
        }
        Op::RouteTopK { k, normalise } => {
            let chosen = call.outputs[1].shared();
            route_top_k(x.values(), x.width(), *k, *normalise, y.shared(), chosen, worker);
        }
        Op::CombineExperts { shared, residual } => {
            let task = Combine {
                experts: x.values(),
                weights: call.inputs[1].values(),
                shared: shared
                    .then(|| SharedExpert { output: call.inputs[2].values(), gate: call.inputs[3].values() }),
                residual: residual.then(|| call.inputs[call.inputs.len() - 1].values()),
                choices: call.inputs[1].width(),
                width: y.width(),
            };
            combine(&task, y.shared(), worker);
        }
        op => unreachable!("{} is no matrix product", op.name()),
    }
    Ok(())
}

pub(super) fn workspace_bytes(kernel: &Kernel, workers: usize, isa: Isa) -> usize {
    let elements = |i: usize| kernel.inputs[i].layout.shape.elements();
    match &kernel.op {
        Op::Linear { weight, .. } | Op::GatherLinear { weight } if weights::raw_blocks(weight).is_some() => {
            workspace_len(workers, elements(0) / weight.cols, weight.cols) * size_of::<f32>()
        }
        Op::Linear { weight, .. } => weights::linear(weight, isa).scratch_bytes(elements(0) / weight.cols),
        Op::GatherLinear { weight } => {
            weights::linear(weight, isa).gathered_scratch_bytes(elements(0) / weight.cols, elements(2))
        }
        _ => 0,
    }
}
