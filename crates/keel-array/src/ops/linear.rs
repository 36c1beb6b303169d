//! Matrix products: of arrays, and with packed weights.

use super::Op;
use super::fast::{expect_f32, expect_f32_in};
use super::indexing::expect_index;
use crate::error::{expect_shape, wrong_shape};
use crate::{Array, ArrayError, DType, Result, Shape, Weight};

impl Array {
    /// `[.., M, K] x [.., K, N]`; the leading axes broadcast. Transposed views are read in place.
    ///
    /// # Errors
    /// If an operand has fewer than two axes, the inner extents differ, or the types are not floats.
    pub fn matmul(&self, other: &Array) -> Result<Array> {
        const OP: &str = "matmul";
        super::reduce::expect_float(OP, self)?;
        super::reduce::expect_float(OP, other)?;
        let (a, b) = (self.shape(), other.shape());
        if a.rank() < 2 || b.rank() < 2 || a[a.rank() - 1] != b[b.rank() - 2] {
            return Err(wrong_shape(OP, "rhs", format!("(.., K, N) for a lhs (.., M, K) of {a}"), b));
        }
        let (a_batch, b_batch) = (Shape::from(&a[..a.rank() - 2]), Shape::from(&b[..b.rank() - 2]));
        let batch = a_batch.broadcast(&b_batch).ok_or_else(|| ArrayError::Broadcast {
            op: OP,
            lhs: a.clone(),
            rhs: b.clone(),
        })?;
        let with = |rows: usize, cols: usize| batch.iter().copied().chain([rows, cols]).collect::<Shape>();
        let (m, k, n) = (a[a.rank() - 2], a[a.rank() - 1], b[b.rank() - 1]);
        let dtype = self.dtype().promote(other.dtype());
        let lhs = self.cast(dtype)?.broadcast_to(with(m, k))?;
        let rhs = other.cast(dtype)?.broadcast_to(with(k, n))?;
        Array::build(Op::Matmul, &[&lhs, &rhs], with(m, n), dtype)
    }

    /// `x W^T` for x f32 `[.., K]` and a packed weight `[N, K]`, dense or quantised; f32 `[.., N]`.
    ///
    /// # Errors
    /// If the last extent is not the weight's number of columns, x is not f32, or the weight is a stack.
    pub fn linear(&self, weight: &Weight) -> Result<Array> {
        self.linear_onto(weight, None)
    }

    /// `residual + x W^T`.
    ///
    /// # Errors
    /// As [`Array::linear`]; or if the residual has another shape than the product.
    pub fn linear_add(&self, weight: &Weight, residual: &Array) -> Result<Array> {
        self.linear_onto(weight, Some(residual))
    }

    fn linear_onto(&self, weight: &Weight, residual: Option<&Array>) -> Result<Array> {
        const OP: &str = "linear";
        let spec = *weight.spec();
        let lead = leading(OP, self, spec.cols)?;
        if spec.experts != 1 {
            return Err(ArrayError::Argument {
                op: OP,
                reason: format!("the weight is a stack of {}; use gather_linear", spec.experts),
            });
        }
        let shape: Shape = lead.iter().copied().chain([spec.rows]).collect();
        let op = Op::Linear { weight: spec, residual: residual.is_some() };
        let packed = Array::of_weight(weight);
        match residual {
            None => Array::build(op, &[self, &packed], shape, DType::F32),
            Some(r) => {
                expect_f32(OP, &[r])?;
                expect_shape(OP, "residual", &shape, r.shape())?;
                Array::build(op, &[self, &packed, r], shape, DType::F32)
            }
        }
    }

    /// For each token `t` and choice `j`, `x W[e]^T` with `e = experts[t, j]`. x is f32 `[T, K]` (the same row
    /// for all choices) or `[T, J, K]`; experts u32 `[T, J]`; the result `[T, J, N]`.
    ///
    /// # Errors
    /// If shapes or types differ from this.
    pub fn gather_linear(&self, weight: &Weight, experts: &Array) -> Result<Array> {
        const OP: &str = "gather_linear";
        let spec = *weight.spec();
        let lead = leading(OP, self, spec.cols)?;
        expect_index(OP, experts)?;
        let choices = experts.shape();
        let matches = choices.rank() == 2 && (lead == [choices[0]] || *lead == **choices);
        if !matches {
            return Err(wrong_shape(OP, "experts", format!("(T, J) for x {}", self.shape()), choices));
        }
        let shape = Shape::from([choices[0], choices[1], spec.rows]);
        Array::build(
            Op::GatherLinear { weight: spec },
            &[self, &Array::of_weight(weight), experts],
            shape,
            DType::F32,
        )
    }

    /// Rows of a packed weight as f32. This array holds the ids. An id out of range is an error when the kernel runs.
    ///
    /// # Errors
    /// If the ids are not i32 or u32, or the weight is a stack.
    pub fn embedding(&self, weight: &Weight) -> Result<Array> {
        const OP: &str = "embedding";
        expect_index(OP, self)?;
        let spec = *weight.spec();
        if spec.experts != 1 {
            return Err(ArrayError::Argument {
                op: OP,
                reason: format!("the weight is a stack of {}", spec.experts),
            });
        }
        let shape = self.shape().iter().copied().chain([spec.cols]).collect();
        Array::build(Op::Embedding { weight: spec }, &[self, &Array::of_weight(weight)], shape, DType::F32)
    }
}

/// The axes before the last, after a check that the last is `cols` and the type f32.
fn leading<'a>(op: &'static str, x: &'a Array, cols: usize) -> Result<&'a [usize]> {
    expect_f32_in(op, "x", x)?;
    match &x.shape()[..] {
        [lead @ .., last] if *last == cols => Ok(lead),
        _ => Err(wrong_shape(op, "x", format!("(.., {cols})"), x.shape())),
    }
}
