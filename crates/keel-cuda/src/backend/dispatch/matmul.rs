//! Products of arrays, and the first and the last operation of a mixture of experts.

use super::{Call, Geometry, linear};
use crate::backend::Mode;
use crate::backend::operand::c_type;
use crate::kernels::{EXPERTS, KernelKey, MATMUL};
use crate::parameters::{Combine, Matmul, RouteFew, RouteTopK, Wide};
use keel_array::{ArrayError, Kernel, Op};

pub(super) fn run(call: &Call<'_>) -> Result<(), ArrayError> {
    match &call.kernel.op {
        Op::Matmul => matmul(call),
        Op::Linear { weight, residual } => linear::linear(weight, residual.then(|| &call.inputs[2]), call),
        Op::GatherLinear { weight } => linear::gather(weight, call),
        Op::RouteTopK { k, normalise } => route_top_k(*k, *normalise, call),
        Op::CombineExperts { .. } if call.producer(0).is_some() => linear::combination::combine(call, None),
        Op::CombineExperts { shared, residual } => combine_experts(*shared, *residual, call),
        op => unreachable!("{} is no matrix product", op.name()),
    }
}

pub(super) fn workspace_bytes(kernel: &Kernel, mode: Mode) -> usize {
    match &kernel.op {
        Op::Linear { weight, .. } => linear::linear_workspace_bytes(weight, kernel, mode),
        Op::GatherLinear { weight } => linear::gather_workspace_bytes(weight, kernel, mode),
        _ => 0,
    }
}

fn matmul(call: &Call<'_>) -> Result<(), ArrayError> {
    let [a, b, y] = [&call.inputs[0], &call.inputs[1], &call.outputs[0]];
    let (left, right) = (&a.layout.shape, &b.layout.shape);
    let (m, k, n) = (left[left.rank() - 2], left[left.rank() - 1], right[right.rank() - 1]);
    let parameters = Matmul {
        a: a.address,
        sa: a.strides(),
        b: b.address,
        sb: b.strides(),
        y: y.address,
        m: Wide(m),
        n: Wide(n),
        k: Wide(k),
    };
    let key = KernelKey::new(MATMUL, "matmul").define("ELEM", c_type(y.dtype));
    let grid = (n.div_ceil(32), m.div_ceil(32), y.len() / (m * n));
    let geometry = Geometry { grid, block: (256, 1, 1), shared_bytes: 0 };
    call.launch(&key, geometry, &parameters)
}

fn route_top_k(k: usize, normalise: bool, call: &Call<'_>) -> Result<(), ArrayError> {
    let x = &call.strided(0);
    let experts = x.width();
    let (logits, stride) = (x.address, x.row_stride(1));
    let [weights, chosen] = [0, 1].map(|i: usize| call.outputs[i].address);
    if experts <= 512 && k <= 32 {
        let key = KernelKey::new(EXPERTS, "route_few")
            .define("EXPERTS", experts)
            .define("CHOICES", k)
            .define("NORMALISE", u8::from(normalise));
        let parameters = RouteFew { logits, stride, weights, chosen, tokens: x.rows() };
        return call.launch(&key, Geometry::rows(x.rows().div_ceil(4), 128), &parameters);
    }
    let normalise = usize::from(normalise);
    let parameters = RouteTopK { logits, stride, weights, chosen, experts, k, normalise };
    let geometry =
        Geometry { grid: (x.rows(), 1, 1), block: (256, 1, 1), shared_bytes: experts * size_of::<f32>() };
    call.launch(&KernelKey::new(EXPERTS, "route_top_k"), geometry, &parameters)
}

fn combine_experts(shared: bool, residual: bool, call: &Call<'_>) -> Result<(), ArrayError> {
    let (x, y) = (&call.inputs[0], &call.outputs[0]);
    let gate = shared.then(|| call.strided(3));
    let parameters = Combine {
        experts: x.address,
        weights: call.inputs[1].address,
        shared: if shared { call.inputs[2].address } else { 0 },
        gate: gate.map_or(0, |gate| gate.address),
        stride: gate.map_or(0, |gate| gate.row_stride(1)),
        residual: if residual { call.inputs[call.inputs.len() - 1].address } else { 0 },
        y: y.address,
        choices: call.inputs[1].width(),
        width: y.width(),
        with_shared: usize::from(shared),
    };
    let grid = (y.width().div_ceil(256), y.rows(), 1);
    let geometry = Geometry { grid, block: (256, 1, 1), shared_bytes: 0 };
    call.launch(&KernelKey::new(EXPERTS, "combine"), geometry, &parameters)
}
