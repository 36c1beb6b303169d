//! Element-wise operations with broadcasting, and the chains that programs fuse them into.

use serde::{Deserialize, Serialize};

use super::Op;
use crate::error::expect_dtype;
use crate::{Array, ArrayError, DType, Result};

/// Functions of one operand. On integers only `Neg`, `Abs` and `Not` are defined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Unary {
    /// `-x`
    Neg,
    /// `|x|`
    Abs,
    /// `e^x`
    Exp,
    /// `ln x`
    Log,
    /// `sqrt x`
    Sqrt,
    /// `1 / sqrt x`
    Rsqrt,
    /// `sin x`
    Sin,
    /// `cos x`
    Cos,
    /// `tanh x`
    Tanh,
    /// `1 / (1 + e^-x)`
    Sigmoid,
    /// `x * sigmoid(x)`
    Silu,
    /// `ln(1 + e^x)`
    Softplus,
    /// `0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`
    GeluTanh,
    /// `0.5 x (1 + erf(x / sqrt 2))`
    Gelu,
    /// Logical not of a bool.
    Not,
}

impl Unary {
    /// The name in errors.
    pub fn name(self) -> &'static str {
        match self {
            Unary::Neg => "neg",
            Unary::Abs => "abs",
            Unary::Exp => "exp",
            Unary::Log => "log",
            Unary::Sqrt => "sqrt",
            Unary::Rsqrt => "rsqrt",
            Unary::Sin => "sin",
            Unary::Cos => "cos",
            Unary::Tanh => "tanh",
            Unary::Sigmoid => "sigmoid",
            Unary::Silu => "silu",
            Unary::Softplus => "softplus",
            Unary::GeluTanh => "gelu_tanh",
            Unary::Gelu => "gelu",
            Unary::Not => "not",
        }
    }
}

/// Functions of two operands of the same type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Binary {
    /// `a + b`
    Add,
    /// `a - b`
    Sub,
    /// `a * b`
    Mul,
    /// `a / b`. Integer division truncates; integer division by zero gives zero.
    Div,
    /// The larger; NaN if either operand is.
    Max,
    /// The smaller; NaN if either operand is.
    Min,
    /// `a ^ b`, floats only.
    Pow,
    /// `a == b`, as bool.
    Equal,
    /// `a < b`, as bool.
    Less,
    /// `a <= b`, as bool.
    LessEqual,
    /// Logical and of bools.
    And,
    /// Logical or of bools.
    Or,
}

impl Binary {
    /// The name in errors.
    pub fn name(self) -> &'static str {
        match self {
            Binary::Add => "add",
            Binary::Sub => "sub",
            Binary::Mul => "mul",
            Binary::Div => "div",
            Binary::Max => "maximum",
            Binary::Min => "minimum",
            Binary::Pow => "pow",
            Binary::Equal => "equal",
            Binary::Less => "less",
            Binary::LessEqual => "less_equal",
            Binary::And => "and",
            Binary::Or => "or",
        }
    }

    fn compares(self) -> bool {
        matches!(self, Binary::Equal | Binary::Less | Binary::LessEqual)
    }

    fn is_arithmetic(self) -> bool {
        matches!(self, Binary::Add | Binary::Sub | Binary::Mul | Binary::Div)
    }

    fn is_logical(self) -> bool {
        matches!(self, Binary::And | Binary::Or)
    }
}

/// An operand of a step of a fused chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Source {
    /// Input of the kernel.
    Input(usize),
    /// Result of an earlier step.
    Step(usize),
}

/// One operation of a fused chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum FusedStep {
    /// Function of one operand.
    Unary(Unary, Source),
    /// Function of two operands.
    Binary(Binary, Source, Source),
}

/// A chain of f32 operations over one index space. The last step is the output. Values between steps are never in
/// memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Fused {
    /// In order of execution.
    pub steps: Vec<FusedStep>,
}

impl Fused {
    /// Most steps of a chain: the state of this many fits into the first-level cache.
    pub const STEPS_MAX: usize = 24;
    /// Most inputs of a chain.
    pub const INPUTS_MAX: usize = 12;
}

impl Array {
    fn unary(&self, op: Unary) -> Result<Array> {
        let allowed = match op {
            Unary::Not => self.dtype() == DType::Bool,
            Unary::Neg | Unary::Abs => self.dtype() != DType::Bool,
            _ => self.dtype().is_float(),
        };
        let expected = if op == Unary::Not { "bool" } else { "a float type" };
        expect_dtype(op.name(), "x", allowed, expected, self.dtype())?;
        Array::build(Op::Unary(op), &[self], self.shape().clone(), self.dtype())
    }

    fn binary(&self, op: Binary, other: &Array) -> Result<Array> {
        let name = op.name();
        let shape = self.shape().broadcast(other.shape()).ok_or_else(|| ArrayError::Broadcast {
            op: name,
            lhs: self.shape().clone(),
            rhs: other.shape().clone(),
        })?;
        let dtype = self.dtype().promote(other.dtype());
        let expect = |is_right, expected| expect_dtype(name, "both operands", is_right, expected, dtype);
        expect(!op.is_logical() || dtype == DType::Bool, "bool")?;
        expect(op != Binary::Pow || dtype.is_float(), "a float type")?;
        expect(!op.is_arithmetic() || dtype != DType::Bool, "a number")?;
        let lhs = self.cast(dtype)?.broadcast_to(&shape)?;
        let rhs = other.cast(dtype)?.broadcast_to(&shape)?;
        let result = if op.compares() { DType::Bool } else { dtype };
        Array::build(Op::Binary(op), &[&lhs, &rhs], shape, result)
    }

    /// The same values in another type. Floats to integers truncate towards zero and saturate.
    ///
    /// # Errors
    /// Only those that every operation can return.
    pub fn cast(&self, dtype: DType) -> Result<Array> {
        if dtype == self.dtype() {
            return Ok(self.clone());
        }
        Array::build(Op::Cast, &[self], self.shape().clone(), dtype)
    }

    /// Element-wise choice: `if_true` where this array is true, `if_false` elsewhere.
    ///
    /// # Errors
    /// If this array is not bool, or the shapes do not broadcast.
    pub fn select(&self, if_true: &Array, if_false: &Array) -> Result<Array> {
        const OP: &str = "where";
        expect_dtype(OP, "condition", self.dtype() == DType::Bool, "bool", self.dtype())?;
        let values = if_true.shape().broadcast(if_false.shape());
        let shape = values.and_then(|s| s.broadcast(self.shape())).ok_or_else(|| ArrayError::Broadcast {
            op: OP,
            lhs: if_true.shape().clone(),
            rhs: if_false.shape().clone(),
        })?;
        let dtype = if_true.dtype().promote(if_false.dtype());
        let a = if_true.cast(dtype)?.broadcast_to(&shape)?;
        let b = if_false.cast(dtype)?.broadcast_to(&shape)?;
        Array::build(Op::Where, &[&self.broadcast_to(&shape)?, &a, &b], shape, dtype)
    }
}

macro_rules! unary_methods {
    ($($name:ident $op:ident $doc:literal),* $(,)?) => { impl Array { $(
        #[doc = $doc]
        ///
        /// # Errors
        /// If the function is not defined for this type.
        pub fn $name(&self) -> Result<Array> { self.unary(Unary::$op) }
    )* } };
}

unary_methods! {
    neg Neg "`-x`", abs Abs "`|x|`", exp Exp "`e^x`", log Log "`ln x`", sqrt Sqrt "`sqrt x`", rsqrt Rsqrt "`1 / sqrt x`",
    sin Sin "`sin x`", cos Cos "`cos x`", tanh Tanh "`tanh x`", sigmoid Sigmoid "`1 / (1 + e^-x)`",
    silu Silu "`x * sigmoid(x)`", softplus Softplus "`ln(1 + e^x)`", gelu_tanh GeluTanh "GELU, tanh form",
    gelu Gelu "GELU, exact form",
    logical_not Not "Logical not",
}

macro_rules! binary_methods {
    ($($name:ident $op:ident $doc:literal),* $(,)?) => { impl Array { $(
        #[doc = $doc]
        ///
        /// # Errors
        /// If the shapes do not broadcast, or the function is not defined for the common type.
        pub fn $name(&self, other: &Array) -> Result<Array> { self.binary(Binary::$op, other) }
    )* } };
}

binary_methods! {
    add Add "`a + b`", sub Sub "`a - b`", mul Mul "`a * b`", div Div "`a / b`",
    maximum Max "The larger of each pair", minimum Min "The smaller of each pair", pow Pow "`a ^ b`",
    equal Equal "`a == b`", less Less "`a < b`", less_equal LessEqual "`a <= b`",
    logical_and And "Logical and", logical_or Or "Logical or",
}
