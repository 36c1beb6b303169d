//! Element-wise operations: float chains as generated code, everything else by type.

use super::{Call, Geometry};
use crate::backend::operand::{bits_type, c_type};
use crate::driver::Arguments;
use crate::kernels::{ELEMENTWISE, KernelKey};
use keel_array::{ArrayError, Binary, FusedStep, Op, Source, Unary};
use std::fmt::Write;

pub(super) fn run(call: &Call<'_>) -> Result<(), ArrayError> {
    let (x, y) = (&call.inputs[0], &call.outputs[0]);
    let float = x.dtype.is_float();
    match &call.kernel.op {
        Op::Cast => {
            let key = key("cast").define("FROM", c_type(x.dtype)).define("TO", c_type(y.dtype));
            let arguments = operand(Arguments::default(), call, 0).pointer(y.address).u64(y.len());
            call.launch(&key, Geometry::elements(y.len()), arguments)
        }
        Op::Where => {
            let key = key("select").define("SELECT", 1).define("ELEM", bits_type(y.dtype));
            let arguments = (0..3).fold(Arguments::default(), |a, i| operand(a, call, i));
            call.launch(&key, Geometry::elements(y.len()), arguments.pointer(y.address).u64(y.len()))
        }
        Op::Unary(op) if float => chain(&[FusedStep::Unary(*op, Source::Input(0))], call),
        Op::Unary(op) => integer(integer_unary(*op), call, 0),
        Op::Binary(op) if compares(*op) && float => {
            let key = key("compare").define("COMPARE", 1).define("ELEM", c_type(x.dtype));
            two_operands(key.define("EXPRESSION", binary(*op)), call, 1)
        }
        Op::Binary(op) if float => chain(&[FusedStep::Binary(*op, Source::Input(0), Source::Input(1))], call),
        Op::Binary(op) => integer(integer_binary(*op), call, 1),
        Op::Fused(fused) => chain(&fused.steps, call),
        op => unreachable!("{} is not element-wise", op.name()),
    }
}

fn key(entry: &'static str) -> KernelKey {
    KernelKey::new(ELEMENTWISE, entry)
}

fn operand(arguments: Arguments, call: &Call<'_>, i: usize) -> Arguments {
    arguments.pointer(call.inputs[i].address).words(&call.inputs[i].strides())
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
    let y = &call.outputs[0];
    let arguments = operand(operand(Arguments::default(), call, 0), call, second);
    call.launch(&key, Geometry::elements(y.len()), arguments.pointer(y.address).u64(y.len()))
}

fn chain(steps: &[FusedStep], call: &Call<'_>) -> Result<(), ArrayError> {
    let y = &call.outputs[0];
    let (mut parameters, mut loads, mut body) = (String::new(), String::new(), String::new());
    let mut arguments = Arguments::default().pointer(y.address).u64(y.len());
    for i in 0..call.inputs.len() {
        // Writing to a String cannot fail.
        let _ = write!(parameters, ", const ELEM* x{i}, Strides s{i}");
        let _ = write!(loads, "const float v{i} = to_f32(x{i}[s{i}.at(i)]); ");
        arguments = operand(arguments, call, i);
    }
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
    let key = key("chain")
        .define("ELEM", c_type(y.dtype))
        .define("PARAMETERS", parameters)
        .define("LOADS", loads)
        .define("CHAIN", body);
    call.launch(&key, Geometry::elements(y.len()), arguments)
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

/// An expression over `a` and `b`.
fn binary(op: Binary) -> &'static str {
    match op {
        Binary::Add => "a + b",
        Binary::Sub => "a - b",
        Binary::Mul => "a * b",
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
