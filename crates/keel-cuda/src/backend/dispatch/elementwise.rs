//! Element-wise operations: float chains as generated code, everything else by type.

use super::{Bound, BoundKernel, Call, Geometry};
use crate::backend::operand::{bits_type, c_type};
use crate::driver::Arguments;
use crate::kernels::{ELEMENTWISE, HalfForm, KernelKey};
use crate::parameters::{Cast, Select, TwoOperands, Wide};
use keel_array::{ArrayError, Binary, DType, FusedStep, Kernel, Layout, Op, Shape, Source, Unary};
use std::borrow::Cow;
use std::fmt::Write;

pub(super) fn run(call: &Call<'_>) -> Result<(), ArrayError> {
    let (x, y) = (&call.inputs[0], &call.outputs[0]);
    let float = x.dtype.is_float();
    match &call.kernel.op {
        Op::Cast => {
            let key = key("cast").define("FROM", c_type(x.dtype)).define("TO", c_type(y.dtype));
            let parameters = Cast { x: x.address, from: x.strides(), y: y.address, n: Wide(y.len()) };
            call.launch(&key, Geometry::elements(y.len()), &parameters)
        }
        Op::Where => {
            let key = key("select").define("SELECT", 1).define("ELEM", bits_type(y.dtype));
            let [c, a, b] = [0, 1, 2].map(|i| call.inputs[i].address);
            let [sc, sa, sb] = [0, 1, 2].map(|i| call.inputs[i].strides());
            let parameters = Select { c, sc, a, sa, b, sb, y: y.address, n: Wide(y.len()) };
            call.launch(&key, Geometry::elements(y.len()), &parameters)
        }
        _ if float && chain_steps(&call.kernel.op).is_some() => chain(call),
        Op::Unary(op) => integer(integer_unary(*op), call, 0),
        Op::Binary(op) if compares(*op) && float => {
            let key = key("compare").define("COMPARE", 1).define("ELEM", c_type(x.dtype));
            two_operands(key.define("EXPRESSION", binary(*op)), call, 1)
        }
        Op::Binary(op) => integer(integer_binary(*op), call, 1),
        op => unreachable!("{} is not element-wise", op.name()),
    }
}

fn key(entry: &'static str) -> KernelKey {
    KernelKey::new(ELEMENTWISE, entry)
}

/// An operation on integers or flags, computed in 64 bits; `second` is the number of the input b.
fn integer(expression: &str, call: &Call<'_>, second: usize) -> Result<(), ArrayError> {
    let key = key("integer")
        .define("INTEGER", 1)
        .define("ELEM", c_type(call.inputs[0].dtype))
        .define("RESULT", c_type(call.outputs[0].dtype))
        .define("EXPRESSION", expression);
    two_operands(key, call, second)
}

fn two_operands(key: KernelKey, call: &Call<'_>, second: usize) -> Result<(), ArrayError> {
    let (y, [x, z]) = (&call.outputs[0], [0, second].map(|i| call.inputs[i].address));
    let [sx, sz] = [0, second].map(|i| call.inputs[i].strides());
    let parameters = TwoOperands { x, sx, z, sz, y: y.address, n: Wide(y.len()) };
    call.launch(&key, Geometry::elements(y.len()), &parameters)
}

/// The steps of an operation on floats that generated code computes, element by element.
fn chain_steps(op: &Op) -> Option<Cow<'_, [FusedStep]>> {
    match op {
        Op::Unary(op) => Some(vec![FusedStep::Unary(*op, Source::Input(0))].into()),
        Op::Binary(op) if !compares(*op) => {
            Some(vec![FusedStep::Binary(*op, Source::Input(0), Source::Input(1))].into())
        }
        Op::Fused(fused) => Some((&fused.steps[..]).into()),
        _ => None,
    }
}

/// Fours of a chain at most: the kernel counts them in 32 bits and adds the threads of a grid.
const FOURS_MAX: usize = u32::MAX as usize - Geometry::THREADS_MAX;

/// How far apart the rows of a chain's input are that is read four columns at a time.
pub(super) enum RowStep {
    /// In units of four columns. The rows begin at multiples of 16 bytes.
    Fours(usize),
    /// One row meets every row. It may begin at any value.
    OneRow,
    /// One value meets every element.
    OneValue,
}

pub(super) fn row_step(input: &Layout) -> Option<RowStep> {
    let rank = input.shape.rank();
    let stretched = |axes: usize| input.strides[..axes].iter().all(|&stride| stride == 0);
    if stretched(rank) {
        return Some(RowStep::OneValue);
    }
    let elements = match input.row_stride(1) {
        None if input.strides.last() == Some(&1) && stretched(rank - 1) => return Some(RowStep::OneRow),
        stride => stride?,
    };
    (elements.is_multiple_of(4) && input.offset.is_multiple_of(4)).then_some(RowStep::Fours(elements / 4))
}

/// Whether a chain may run four columns at a time, if the operands that have a row for each row begin at multiples of
/// 16 bytes.
pub(super) fn runs_by_four(kernel: &Kernel) -> bool {
    let y = &kernel.outputs[0];
    chain_steps(&kernel.op).is_some()
        && kernel.inputs.iter().chain([y]).all(|operand| operand.dtype == DType::F32)
        && kernel.inputs.iter().all(|input| row_step(&input.layout).is_some())
        && y.layout.is_contiguous()
        && y.layout.shape.last().is_some_and(|width| width.is_multiple_of(4))
        && y.layout.shape.elements() / 4 <= FOURS_MAX
}

/// A chain four columns at a time, to f32 or, in a form of `half.cuh`, to 16 bits.
pub(super) fn chain_by_four(
    chain: &BoundKernel<'_>,
    to: u64,
    half: Option<HalfForm>,
    call: &Call<'_>,
) -> Result<(), ArrayError> {
    let inputs = chain.inputs.iter().map(|input| {
        let Some(step) = row_step(input.layout) else { unreachable!("the chain runs by four") };
        (input.address, step)
    });
    let key = key("chain_by_four")
        .define("CHAIN_BY_FOUR", if half.is_some() { 16 } else { 32 })
        .define("CHAIN", chain_body(&chain.kernel.op));
    let key = match half {
        Some(form) => form.define(key),
        None => key,
    };
    by_four(key, inputs, to, &chain.kernel.outputs[0].layout.shape, call)
}

/// Adds a row to each row of y, whose width is a multiple of 4.
pub(super) fn add_row(y: &Bound<'_>, row: &Bound<'_>, call: &Call<'_>) -> Result<(), ArrayError> {
    let inputs = [(y.address, RowStep::Fours(y.width() / 4)), (row.address, RowStep::OneRow)];
    let key =
        key("chain_by_four").define("CHAIN_BY_FOUR", 32).define("CHAIN", "const float result = v0 + v1;");
    by_four(key, inputs.into_iter(), y.address, &y.layout.shape, call)
}

/// Launches `chain_by_four` over values of this shape.
fn by_four(
    key: KernelKey,
    inputs: impl Iterator<Item = (u64, RowStep)>,
    to: u64,
    shape: &Shape,
    call: &Call<'_>,
) -> Result<(), ArrayError> {
    let (mut parameters, mut loads, mut pick) = (String::new(), String::new(), String::new());
    let (fours, width) = (shape.elements() / 4, shape.last().copied().unwrap_or(1));
    let mut arguments = Arguments::default().with(to).with(fours).with(width / 4);
    for (i, (address, step)) in inputs.enumerate() {
        let (load, step) = match step {
            RowStep::Fours(step) => (format!("x{i}[(u64)row * s{i} + column]"), step),
            RowStep::OneRow => (format!("any_four((const float*)(x{i} + column))"), 0),
            RowStep::OneValue => (format!("make_float4(x{i}->x, x{i}->x, x{i}->x, x{i}->x)"), 0),
        };
        // Writing to a String cannot fail.
        let _ = write!(parameters, ", const float4* x{i}, u32 s{i}");
        let _ = write!(loads, "const float4 w{i} = {load}; ");
        let _ = write!(pick, "const float v{i} = (&w{i}.x)[j]; ");
        arguments = arguments.with(address).with(step);
    }
    let key = key.define("PARAMETERS", parameters).define("LOADS", loads).define("PICK", pick);
    call.launch_generated(&key, Geometry::elements(fours), arguments)
}

fn chain(call: &Call<'_>) -> Result<(), ArrayError> {
    let y = &call.outputs[0];
    let aligned = |operand: &Bound<'_>| {
        !matches!(row_step(operand.layout), Some(RowStep::Fours(_))) || operand.address.is_multiple_of(16)
    };
    if runs_by_four(call.kernel) && call.inputs.iter().chain([y]).all(aligned) {
        return chain_by_four(&call.bound, y.address, None, call);
    }
    let (mut parameters, mut loads) = (String::new(), String::new());
    let mut arguments = Arguments::default().with(y.address).with(Wide(y.len()));
    for (i, x) in call.inputs.iter().enumerate() {
        let _ = write!(parameters, ", const ELEM* x{i}, Strides s{i}");
        let _ = write!(loads, "const float v{i} = to_f32(x{i}[s{i}.at(i)]); ");
        arguments = arguments.with(x.address).with(x.strides());
    }
    let key = key("chain")
        .define("ELEM", c_type(y.dtype))
        .define("PARAMETERS", parameters)
        .define("LOADS", loads)
        .define("CHAIN", chain_body(&call.kernel.op));
    call.launch_generated(&key, Geometry::elements(y.len()), arguments)
}

/// Statements over the inputs v0, v1, ... that define `result`.
fn chain_body(op: &Op) -> String {
    let Some(steps) = chain_steps(op) else { unreachable!("{} is no chain", op.name()) };
    let mut body = String::new();
    for (n, step) in steps.iter().enumerate() {
        let statement = match *step {
            FusedStep::Unary(op, a) => format!("const float a = {}; t{n} = {};", value(a), unary(op)),
            FusedStep::Binary(op, a, b) => {
                format!("const float a = {}, b = {}; t{n} = {};", value(a), value(b), binary(op))
            }
        };
        let _ = write!(body, "float t{n}; {{ {statement} }} ");
    }
    let _ = write!(body, "const float result = t{};", steps.len() - 1);
    body
}

fn value(source: Source) -> String {
    match source {
        Source::Input(i) => format!("v{i}"),
        Source::Step(n) => format!("t{n}"),
    }
}

fn compares(op: Binary) -> bool {
    matches!(op, Binary::Equal | Binary::Less | Binary::LessEqual)
}

/// An expression over `a`.
fn unary(op: Unary) -> &'static str {
    match op {
        Unary::Neg => "-a",
        Unary::Abs => "fabsf(a)",
        Unary::Exp => "expf(a)",
        Unary::Log => "logf(a)",
        Unary::Sqrt => "sqrtf(a)",
        Unary::Rsqrt => "1.0f / sqrtf(a)",
        Unary::Sin => "sinf(a)",
        Unary::Cos => "cosf(a)",
        Unary::Tanh => "tanhf(a)",
        Unary::Sigmoid => "sigmoid(a)",
        Unary::Silu => "silu(a)",
        Unary::Softplus => "softplus(a)",
        Unary::GeluTanh => "gelu_tanh(a)",
        Unary::Gelu => "0.5f * a * (1.0f + erff(a * 0.70710678f))",
        Unary::Not => unreachable!("not is for flags"),
    }
}

/// An expression over `a` and `b`. Each operation is rounded. So a fused chain has the bits of its operations run one
/// by one.
fn binary(op: Binary) -> &'static str {
    match op {
        Binary::Add => "__fadd_rn(a, b)",
        Binary::Sub => "__fsub_rn(a, b)",
        Binary::Mul => "__fmul_rn(a, b)",
        Binary::Div => "a / b",
        Binary::Max => "f_max(a, b)",
        Binary::Min => "f_min(a, b)",
        Binary::Pow => "powf(a, b)",
        Binary::Equal => "a == b",
        Binary::Less => "a < b",
        Binary::LessEqual => "a <= b",
        Binary::And | Binary::Or => unreachable!("{} is for flags", op.name()),
    }
}

fn integer_unary(op: Unary) -> &'static str {
    match op {
        Unary::Neg => "(i64)(0ull - (u64)a)",
        Unary::Abs => "(a < 0 ? (i64)(0ull - (u64)a) : a)",
        Unary::Not => "a == 0",
        other => unreachable!("{} is for floats", other.name()),
    }
}

/// Wrapping, which C++ guarantees for unsigned numbers alone.
fn integer_binary(op: Binary) -> &'static str {
    match op {
        Binary::Add => "(i64)((u64)a + (u64)b)",
        Binary::Sub => "(i64)((u64)a - (u64)b)",
        Binary::Mul => "(i64)((u64)a * (u64)b)",
        Binary::Div => "(b == 0 ? 0 : b == -1 ? (i64)(0ull - (u64)a) : a / b)",
        Binary::Max | Binary::Or => "(a > b ? a : b)",
        Binary::Min | Binary::And => "(a < b ? a : b)",
        Binary::Equal => "a == b",
        Binary::Less => "a < b",
        Binary::LessEqual => "a <= b",
        Binary::Pow => unreachable!("{} is for floats", op.name()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(strides: &[usize], offset: usize) -> Option<RowStep> {
        row_step(&Layout { shape: Shape::from([3, 8]), strides: strides.into(), offset })
    }

    #[test]
    fn only_a_row_that_all_rows_share_begins_anywhere() {
        assert!(matches!(step(&[12, 1], 4), Some(RowStep::Fours(3))));
        assert!(step(&[12, 1], 5).is_none() && step(&[9, 1], 4).is_none());
        assert!(matches!(step(&[0, 1], 5), Some(RowStep::OneRow)));
        assert!(matches!(step(&[0, 0], 5), Some(RowStep::OneValue)));
    }
}
