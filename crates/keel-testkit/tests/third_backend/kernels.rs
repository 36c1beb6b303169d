//! One kernel for each operation: the oracle.

use super::elements::{floats, integers, store_floats, store_integers};
use keel_array::{Binary, DType, Fused, FusedStep, Kernel, Launch, Op, RandomKind, Reduction, Source, Unary};
use keel_testkit::naive::create::{random_bits, random_normal, random_uniform};
use keel_testkit::naive::elementwise::{gelu, gelu_tanh, select, sigmoid, silu, softplus};
use keel_testkit::naive::indexing::{take, take_along};
use keel_testkit::naive::layout::{concatenate, slice_update};
use keel_testkit::naive::matmul::matmul;
use keel_testkit::naive::reduce::{cumsum, largest, layer_norm, reduce, smallest, softmax};
use keel_testkit::naive::sort::{argsort, sorted};
use keel_testkit::naive::tensor::Tensor;

/// Total over operations: a new operation does not compile until it is decided about.
pub fn supports(op: &Op) -> Result<(), String> {
    match op {
        Op::Fill(_)
        | Op::Arange { .. }
        | Op::Random { .. }
        | Op::Copy
        | Op::Cast
        | Op::Unary(_)
        | Op::Binary(_)
        | Op::Where
        | Op::Fused(_)
        | Op::Concatenate { .. }
        | Op::SliceUpdate { .. }
        | Op::Reduce(_)
        | Op::ArgReduce { .. }
        | Op::Softmax
        | Op::CumSum { .. }
        | Op::Sort { .. }
        | Op::TopK { .. }
        | Op::Matmul
        | Op::Take
        | Op::TakeAlong
        | Op::RmsNorm { .. }
        | Op::LayerNorm { .. }
        | Op::SigmoidGate => Ok(()),
        Op::View(_) => unreachable!("views never reach a backend"),
        Op::Sample
        | Op::AddRmsNorm { .. }
        | Op::GatedRmsNorm { .. }
        | Op::Rope(_)
        | Op::NormRope { .. }
        | Op::RotatePairs
        | Op::SwiGlu
        | Op::Linear { .. }
        | Op::GatherLinear { .. }
        | Op::Embedding { .. }
        | Op::RouteTopK { .. }
        | Op::CombineExperts { .. }
        | Op::CausalConv(_)
        | Op::GatedDelta(_)
        | Op::PagedAttention(_)
        | Op::Send { .. }
        | Op::Receive { .. }
        | Op::AllReduce { .. }
        | Op::AllGather { .. }
        | Op::ReduceScatter { .. }
        | Op::Custom(_) => Err(format!("{} is not supported yet; run it on the CPU", op.name())),
    }
}

/// Runs one kernel.
pub fn run(kernel: &Kernel, launch: &Launch<'_>) -> Result<(), String> {
    let output = &kernel.outputs[0];
    let is_whole = |dtype: DType| !dtype.is_float() && dtype != DType::Bool;
    if let (Op::Binary(op), true) = (&kernel.op, is_whole(output.dtype)) {
        let (a, b) = (integers(launch, &kernel.inputs[0]), integers(launch, &kernel.inputs[1]));
        let values: Vec<i64> = a.iter().zip(b).map(|(&a, b)| whole(*op, a, b)).collect();
        store_integers(launch, output, &values);
        return Ok(());
    }
    let inputs: Vec<Tensor> = kernel.inputs.iter().map(|input| floats(launch, input)).collect();
    // Results of integers are integers that wrap; a float that becomes an integer saturates.
    let saturates = kernel.inputs.first().is_some_and(|input| input.dtype.is_float());
    for (output, values) in kernel.outputs.iter().zip(results(kernel, &inputs)?) {
        if output.dtype.is_float() || saturates {
            store_floats(launch, output, &values);
        } else {
            store_integers(launch, output, &values.iter().map(|&x| x as i64).collect::<Vec<_>>());
        }
    }
    Ok(())
}

/// The elements of each output.
fn results(kernel: &Kernel, inputs: &[Tensor]) -> Result<Vec<Vec<f64>>, String> {
    let shape = &kernel.outputs[0].layout.shape;
    let elements = 0..shape.elements() as u64;
    let one = match &kernel.op {
        Op::Fill(value) => elements.map(|_| f64::from(value.get())).collect(),
        Op::Arange { start, step } => {
            elements.map(|i| f64::from(start.get()) + f64::from(step.get()) * i as f64).collect()
        }
        Op::Random { kind, seed } => elements.map(|i| random(*kind, *seed, i)).collect(),
        Op::Copy | Op::Cast => inputs[0].values.clone(),
        Op::Unary(op) => inputs[0].map(|x| unary(*op, x)).values,
        Op::Binary(op) => {
            inputs[0].values.iter().zip(&inputs[1].values).map(|(&a, &b)| binary(*op, a, b)).collect()
        }
        Op::Where => select(&inputs[0], &inputs[1], &inputs[2]).values,
        Op::Fused(chain) => elements.map(|i| fused(chain, inputs, i as usize)).collect(),
        Op::Concatenate { axis } => concatenate(inputs, *axis).values,
        Op::SliceUpdate { starts } => slice_update(&inputs[0], &inputs[1], starts).values,
        Op::Reduce(reduction) => reduce(&inputs[0], |row| reduced(*reduction, row)).values,
        Op::ArgReduce { largest } => reduce(&inputs[0], |row| argsort(row, *largest)[0] as f64).values,
        Op::Softmax => softmax(&inputs[0]).values,
        Op::CumSum { reverse, exclusive } => cumsum(&inputs[0], *reverse, *exclusive).values,
        Op::Sort { descending } => return Ok(ordered(&inputs[0], *descending, inputs[0].width())),
        Op::TopK { k } => return Ok(ordered(&inputs[0], true, *k)),
        Op::Matmul => product(&inputs[0], &inputs[1]),
        Op::Take => take(&inputs[0], checked(&inputs[1], inputs[0].shape[0])?).values,
        Op::TakeAlong => take_along(&inputs[0], checked(&inputs[1], inputs[0].width())?).values,
        Op::RmsNorm { eps } => normed(&inputs[0], &inputs[1].values, f64::from(eps.get())),
        Op::LayerNorm { eps } => {
            layer_norm(&inputs[0], &inputs[1].values, &inputs[2].values, f64::from(eps.get())).values
        }
        Op::SigmoidGate => {
            inputs[0].values.iter().zip(&inputs[1].values).map(|(x, &gate)| x * sigmoid(gate)).collect()
        }
        op => unreachable!("{} was refused", op.name()),
    };
    Ok(vec![one])
}

fn random(kind: RandomKind, seed: u64, i: u64) -> f64 {
    match kind {
        RandomKind::Uniform => random_uniform(seed, i),
        RandomKind::Normal => random_normal(seed, i),
        RandomKind::Bits => (random_bits(seed, i) >> 32) as f64,
    }
}

fn unary(op: Unary, x: f64) -> f64 {
    match op {
        Unary::Neg => -x,
        Unary::Abs => x.abs(),
        Unary::Exp => x.exp(),
        Unary::Log => x.ln(),
        Unary::Sqrt => x.sqrt(),
        Unary::Rsqrt => 1.0 / x.sqrt(),
        Unary::Sin => x.sin(),
        Unary::Cos => x.cos(),
        Unary::Tanh => x.tanh(),
        Unary::Sigmoid => sigmoid(x),
        Unary::Silu => silu(x),
        Unary::Softplus => softplus(x),
        Unary::GeluTanh => gelu_tanh(x),
        Unary::Gelu => gelu(x),
        Unary::Not => f64::from(u8::from(x == 0.0)),
    }
}

fn binary(op: Binary, a: f64, b: f64) -> f64 {
    let flag = |holds| f64::from(u8::from(holds));
    match op {
        Binary::Add => a + b,
        Binary::Sub => a - b,
        Binary::Mul => a * b,
        Binary::Div => a / b,
        Binary::Max | Binary::Min if a.is_nan() || b.is_nan() => f64::NAN,
        Binary::Max => a.max(b),
        Binary::Min => a.min(b),
        Binary::Pow => a.powf(b),
        Binary::Equal => flag(a == b),
        Binary::Less => flag(a < b),
        Binary::LessEqual => flag(a <= b),
        Binary::And => flag(a != 0.0 && b != 0.0),
        Binary::Or => flag(a != 0.0 || b != 0.0),
    }
}

/// Integers wrap; a division by zero gives zero.
fn whole(op: Binary, a: i64, b: i64) -> i64 {
    match op {
        Binary::Add => a.wrapping_add(b),
        Binary::Sub => a.wrapping_sub(b),
        Binary::Mul => a.wrapping_mul(b),
        Binary::Div if b == 0 => 0,
        Binary::Div => a.wrapping_div(b),
        Binary::Max => a.max(b),
        Binary::Min => a.min(b),
        op => unreachable!("{} does not give an integer", op.name()),
    }
}

fn fused(chain: &Fused, inputs: &[Tensor], i: usize) -> f64 {
    let mut values: Vec<f64> = Vec::new();
    for step in &chain.steps {
        let value = |source: Source| match source {
            Source::Input(n) => inputs[n].values[i],
            Source::Step(n) => values[n],
        };
        values.push(match *step {
            FusedStep::Unary(op, x) => unary(op, value(x)),
            FusedStep::Binary(op, a, b) => binary(op, value(a), value(b)),
        });
    }
    values[values.len() - 1]
}

fn reduced(reduction: Reduction, row: &[f64]) -> f64 {
    match reduction {
        Reduction::Sum => row.iter().sum::<f64>() + 0.0,
        Reduction::Mean => row.iter().sum::<f64>() / row.len() as f64,
        Reduction::Max => largest(row),
        Reduction::Min => smallest(row),
        Reduction::Prod => row.iter().product(),
        Reduction::Any => f64::from(u8::from(row.iter().any(|&x| x != 0.0))),
        Reduction::All => f64::from(u8::from(row.iter().all(|&x| x != 0.0))),
    }
}

fn ordered(x: &Tensor, descending: bool, k: usize) -> Vec<Vec<f64>> {
    let (values, indices) = sorted(x, descending, k);
    vec![values.values, indices.values]
}

/// `[.., M, K] x [.., K, N]`.
fn product(a: &Tensor, b: &Tensor) -> Vec<f64> {
    let [m, k] = [a.shape[a.shape.len() - 2], a.width()];
    let batch = a.shape[..a.shape.len() - 2].iter().product();
    let narrow = |x: &Tensor| x.values.iter().map(|&x| x as f32).collect::<Vec<f32>>();
    matmul(&narrow(a), &narrow(b), [batch, m, b.width(), k])
}

fn normed(x: &Tensor, weight: &[f64], eps: f64) -> Vec<f64> {
    let row = |row: &[f64]| {
        let square = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
        row.iter().zip(weight).map(|(x, w)| x / (square + eps).sqrt() * w).collect::<Vec<f64>>()
    };
    x.rows().flat_map(row).collect()
}

/// The indices, after a check: data are checked by kernels.
fn checked(indices: &Tensor, extent: usize) -> Result<&Tensor, String> {
    match indices.values.iter().find(|&&i| i < 0.0 || i >= extent as f64) {
        Some(i) => Err(format!("index {i} is out of range for {extent}")),
        None => Ok(indices),
    }
}
