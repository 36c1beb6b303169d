//! Creation, gathering and random numbers.

use serde::{Deserialize, Serialize};

use super::{Op, Real};
use crate::error::{expect_dtype, wrong_shape};
use crate::{Array, ArrayError, DType, Result, Runtime, Shape};

/// Distributions of [`Array::random`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum RandomKind {
    /// f32, evenly in `[0, 1)`.
    Uniform,
    /// f32, mean 0 and deviation 1.
    Normal,
    /// u32, every bit pattern equally probable.
    Bits,
}

impl Array {
    /// Every element `value`.
    ///
    /// # Errors
    /// If the shape is too large to address.
    pub fn full(runtime: &Runtime, shape: impl Into<Shape>, dtype: DType, value: f32) -> Result<Array> {
        Array::create(runtime, Op::Fill(value.into()), shape.into(), dtype)
    }

    /// Every element zero.
    ///
    /// # Errors
    /// If the shape is too large to address.
    pub fn zeros(runtime: &Runtime, shape: impl Into<Shape>, dtype: DType) -> Result<Array> {
        Array::full(runtime, shape, dtype, 0.0)
    }

    /// `start, start + step, ...`: `count` elements.
    ///
    /// # Errors
    /// If the count is too large to address.
    pub fn arange(runtime: &Runtime, start: f32, step: f32, count: usize, dtype: DType) -> Result<Array> {
        let op = Op::Arange { start: Real::from(start), step: Real::from(step) };
        Array::create(runtime, op, Shape::from([count]), dtype)
    }

    /// Pseudo-random elements. The same seed gives the same elements on every machine and device.
    ///
    /// # Errors
    /// If the shape is too large to address.
    pub fn random(runtime: &Runtime, kind: RandomKind, shape: impl Into<Shape>, seed: u64) -> Result<Array> {
        let dtype = if kind == RandomKind::Bits { DType::U32 } else { DType::F32 };
        Array::create(runtime, Op::Random { kind, seed }, shape.into(), dtype)
    }

    /// Blocks of this array along its first axis. The result's shape is that of `indices`, followed by this array's
    /// other axes. An index out of range is an error when the kernel runs.
    ///
    /// # Errors
    /// If this array has no axis, or the indices are not i32 or u32.
    pub fn take(&self, indices: &Array) -> Result<Array> {
        let [_, block @ ..] = &self.shape()[..] else {
            return Err(ArrayError::Axis { op: "take", axis: 0, shape: self.shape().clone() });
        };
        expect_index("take", indices)?;
        let shape = indices.shape().iter().chain(block).copied().collect();
        Array::build(Op::Take, &[self, indices], shape, self.dtype())
    }

    /// Elements of the last axis chosen by `indices`. The other axes of `indices` are those of this array.
    ///
    /// # Errors
    /// If the leading axes differ, or the indices are not i32 or u32.
    pub fn take_along_axis(&self, indices: &Array) -> Result<Array> {
        const OP: &str = "take_along_axis";
        expect_index(OP, indices)?;
        let (x, i) = (self.shape(), indices.shape());
        if x.rank() == 0 || x.rank() != i.rank() || x[..x.rank() - 1] != i[..i.rank() - 1] {
            return Err(wrong_shape(OP, "indices", format!("{x} in all but the last axis"), i));
        }
        Array::build(Op::TakeAlong, &[self, indices], i.clone(), self.dtype())
    }
}

pub(crate) fn expect_index(op: &'static str, indices: &Array) -> Result<()> {
    let is_right = matches!(indices.dtype(), DType::I32 | DType::U32);
    expect_dtype(op, "indices", is_right, "i32 or u32", indices.dtype())
}
