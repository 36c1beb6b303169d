//! Reductions, softmax, sorting and running sums along an axis.
//!
//! Kernels work on the last axis. The builders move the axis there and back.

use serde::{Deserialize, Serialize};

use super::Op;
use super::views::resolve_axis;
use crate::error::expect_dtype;
use crate::{Array, ArrayError, ArraySpec, DType, Result, Shape};

/// How the elements of the last axis become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Reduction {
    /// Sum; floats are summed in f32, integers wrap.
    Sum,
    /// Sum divided by the number of elements, floats only.
    Mean,
    /// Largest.
    Max,
    /// Smallest.
    Min,
    /// Product.
    Prod,
    /// True if any is true, bool only.
    Any,
    /// True if all are true, bool only.
    All,
}

impl Reduction {
    /// The name in errors.
    pub fn name(self) -> &'static str {
        match self {
            Reduction::Sum => "sum",
            Reduction::Mean => "mean",
            Reduction::Max => "max",
            Reduction::Min => "min",
            Reduction::Prod => "prod",
            Reduction::Any => "any",
            Reduction::All => "all",
        }
    }
}

/// Elements of an axis in order, from [`Array::sort`] and [`Array::top_k`].
#[derive(Clone, Debug)]
pub struct Sorted {
    /// The elements.
    pub values: Array,
    /// Where they were on the axis, u32.
    pub indices: Array,
}

impl Array {
    /// `axis` moved to the end, the others in order.
    fn axis_last(&self, axis: usize) -> Result<Array> {
        let rank = self.shape().rank();
        if axis + 1 == rank {
            return Ok(self.clone());
        }
        let order: Vec<usize> = (0..rank).filter(|&a| a != axis).chain([axis]).collect();
        self.transpose(&order)
    }

    /// The last axis moved to `axis`.
    fn last_to(&self, axis: usize) -> Result<Array> {
        let rank = self.shape().rank();
        if axis + 1 == rank {
            return Ok(self.clone());
        }
        let order: Vec<usize> = (0..axis).chain([rank - 1]).chain(axis..rank - 1).collect();
        self.transpose(&order)
    }

    /// Reduces one axis, which disappears.
    ///
    /// # Errors
    /// If there is no such axis, the reduction is not defined for the type, or it needs an element and the
    /// axis has none.
    pub fn reduce(&self, reduction: Reduction, axis: isize) -> Result<Array> {
        let op = reduction.name();
        let axis = resolve_axis(op, axis, self.shape())?;
        let wants = match reduction {
            Reduction::Any | Reduction::All => (self.dtype() == DType::Bool, "bool"),
            Reduction::Mean => (self.dtype().is_float(), "a float type"),
            _ => (self.dtype() != DType::Bool, "a number"),
        };
        expect_dtype(op, "x", wants.0, wants.1, self.dtype())?;
        if matches!(reduction, Reduction::Max | Reduction::Min | Reduction::Mean) {
            expect_elements(op, self.shape()[axis])?;
        }
        let moved = self.axis_last(axis)?;
        let shape = Shape::from(&moved.shape()[..moved.shape().rank() - 1]);
        Array::build(Op::Reduce(reduction), &[&moved], shape, self.dtype())
    }

    /// Sum along an axis.
    ///
    /// # Errors
    /// See [`Array::reduce`].
    pub fn sum(&self, axis: isize) -> Result<Array> {
        self.reduce(Reduction::Sum, axis)
    }

    /// Mean along an axis.
    ///
    /// # Errors
    /// See [`Array::reduce`].
    pub fn mean(&self, axis: isize) -> Result<Array> {
        self.reduce(Reduction::Mean, axis)
    }

    /// Largest along an axis.
    ///
    /// # Errors
    /// See [`Array::reduce`].
    pub fn max(&self, axis: isize) -> Result<Array> {
        self.reduce(Reduction::Max, axis)
    }

    /// Smallest along an axis.
    ///
    /// # Errors
    /// See [`Array::reduce`].
    pub fn min(&self, axis: isize) -> Result<Array> {
        self.reduce(Reduction::Min, axis)
    }

    fn arg_reduce(&self, largest: bool, axis: isize) -> Result<Array> {
        let op = if largest { "argmax" } else { "argmin" };
        let axis = resolve_axis(op, axis, self.shape())?;
        expect_elements(op, self.shape()[axis])?;
        let moved = self.axis_last(axis)?;
        let shape = Shape::from(&moved.shape()[..moved.shape().rank() - 1]);
        Array::build(Op::ArgReduce { largest }, &[&moved], shape, DType::U32)
    }

    /// Index of the largest element along an axis; the first among equals.
    ///
    /// # Errors
    /// If there is no such axis or it has no element.
    pub fn argmax(&self, axis: isize) -> Result<Array> {
        self.arg_reduce(true, axis)
    }

    /// Index of the smallest element along an axis; the first among equals.
    ///
    /// # Errors
    /// If there is no such axis or it has no element.
    pub fn argmin(&self, axis: isize) -> Result<Array> {
        self.arg_reduce(false, axis)
    }

    /// `exp(x - max) / sum` along an axis.
    ///
    /// # Errors
    /// If there is no such axis or the type is not a float.
    pub fn softmax(&self, axis: isize) -> Result<Array> {
        let axis = resolve_axis("softmax", axis, self.shape())?;
        expect_float("softmax", self)?;
        let moved = self.axis_last(axis)?;
        Array::build(Op::Softmax, &[&moved], moved.shape().clone(), self.dtype())?.last_to(axis)
    }

    /// Running sum along an axis, from the end if `reverse`, without the element itself if `exclusive`.
    ///
    /// # Errors
    /// If there is no such axis or the type is bool.
    pub fn cumsum(&self, axis: isize, reverse: bool, exclusive: bool) -> Result<Array> {
        let axis = resolve_axis("cumsum", axis, self.shape())?;
        expect_dtype("cumsum", "x", self.dtype() != DType::Bool, "a number", self.dtype())?;
        let moved = self.axis_last(axis)?;
        Array::build(Op::CumSum { reverse, exclusive }, &[&moved], moved.shape().clone(), self.dtype())?
            .last_to(axis)
    }

    /// Values and indices (u32) of the sorted axis. Stable; NaN goes last.
    ///
    /// # Errors
    /// If there is no such axis.
    pub fn sort(&self, axis: isize, descending: bool) -> Result<Sorted> {
        let axis = resolve_axis("sort", axis, self.shape())?;
        let moved = self.axis_last(axis)?;
        let shape = moved.shape().clone();
        sorted(Op::Sort { descending }, &moved, shape, axis)
    }

    /// Values and indices (u32) of the `k` largest elements of an axis, largest first.
    ///
    /// # Errors
    /// If there is no such axis or it has fewer than `k` elements.
    pub fn top_k(&self, k: usize, axis: isize) -> Result<Sorted> {
        let axis = resolve_axis("top_k", axis, self.shape())?;
        if k > self.shape()[axis] {
            return Err(ArrayError::Argument {
                op: "top_k",
                reason: format!("{k} of axis {axis} of {} are more than there are", self.shape()),
            });
        }
        let moved = self.axis_last(axis)?;
        let mut shape = moved.shape().to_vec();
        shape[moved.shape().rank() - 1] = k;
        sorted(Op::TopK { k }, &moved, shape.into(), axis)
    }
}

fn sorted(op: Op, moved: &Array, shape: Shape, axis: usize) -> Result<Sorted> {
    let specs = vec![ArraySpec::new(shape.clone(), moved.dtype()), ArraySpec::new(shape, DType::U32)];
    let outputs = Array::build_many(op, &[moved], specs)?;
    Ok(Sorted { values: outputs[0].last_to(axis)?, indices: outputs[1].last_to(axis)? })
}

fn expect_elements(op: &'static str, extent: usize) -> Result<()> {
    if extent == 0 {
        return Err(ArrayError::Argument { op, reason: "the axis has no element".into() });
    }
    Ok(())
}

pub(crate) fn expect_float(op: &'static str, x: &Array) -> Result<()> {
    expect_dtype(op, "x", x.dtype().is_float(), "a float type", x.dtype())
}
