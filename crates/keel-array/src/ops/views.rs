//! Layout changes, copies and joins.

use super::{Op, View};
use crate::error::{expect_dtype, expect_shape, wrong_shape};
use crate::{Array, ArrayError, Result, Shape};

/// Resolves a possibly negative axis.
pub(crate) fn resolve_axis(op: &'static str, axis: isize, shape: &Shape) -> Result<usize> {
    let rank = shape.rank() as isize;
    let resolved = if axis < 0 { axis + rank } else { axis };
    if (0..rank).contains(&resolved) {
        Ok(resolved as usize)
    } else {
        Err(ArrayError::Axis { op, axis, shape: shape.clone() })
    }
}

impl Array {
    fn view(&self, view: View, shape: Shape) -> Result<Array> {
        Array::build(Op::View(view), &[self], shape, self.dtype())
    }

    /// The same elements in row-major order under another shape.
    ///
    /// # Errors
    /// If the number of elements differs.
    pub fn reshape(&self, shape: impl Into<Shape>) -> Result<Array> {
        let shape = shape.into();
        if shape.elements() != self.shape().elements() {
            return Err(wrong_shape(
                "reshape",
                "x",
                format!("{} elements for {shape}", shape.elements()),
                self.shape(),
            ));
        }
        self.view(View::Reshape, shape)
    }

    /// Axes in the order given.
    ///
    /// # Errors
    /// If `axes` is not a permutation of all axes.
    pub fn transpose(&self, axes: &[usize]) -> Result<Array> {
        let mut sorted = axes.to_vec();
        sorted.sort_unstable();
        if !sorted.iter().copied().eq(0..self.shape().rank()) {
            return Err(ArrayError::Argument {
                op: "transpose",
                reason: format!("{axes:?} is not a permutation of the axes of {}", self.shape()),
            });
        }
        let shape = axes.iter().map(|&a| self.shape()[a]).collect();
        self.view(View::Permute(axes.to_vec()), shape)
    }

    /// Two axes exchanged; negative axes count from the end.
    ///
    /// # Errors
    /// If there is no such axis.
    pub fn swap_axes(&self, a: isize, b: isize) -> Result<Array> {
        let mut axes: Vec<usize> = (0..self.shape().rank()).collect();
        axes.swap(resolve_axis("swap_axes", a, self.shape())?, resolve_axis("swap_axes", b, self.shape())?);
        self.transpose(&axes)
    }

    /// The block that begins at `starts` and ends before `stops`.
    ///
    /// # Errors
    /// If the block is not within the array.
    pub fn slice(&self, starts: &[usize], stops: &[usize]) -> Result<Array> {
        let shape = self.shape();
        let fits = starts.len() == shape.rank()
            && stops.len() == shape.rank()
            && starts.iter().zip(stops).zip(shape.iter()).all(|((a, b), n)| a <= b && b <= n);
        if !fits {
            return Err(ArrayError::Argument {
                op: "slice",
                reason: format!("{starts:?}..{stops:?} is not within {shape}"),
            });
        }
        self.view(View::Slice(starts.to_vec()), starts.iter().zip(stops).map(|(a, b)| b - a).collect())
    }

    /// `start..stop` along one axis, everything along the others.
    ///
    /// # Errors
    /// If there is no such axis, or the range is not within it.
    pub fn slice_axis(&self, axis: isize, start: usize, stop: usize) -> Result<Array> {
        let axis = resolve_axis("slice", axis, self.shape())?;
        let mut starts = vec![0; self.shape().rank()];
        let mut stops = self.shape().to_vec();
        (starts[axis], stops[axis]) = (start, stop);
        self.slice(&starts, &stops)
    }

    /// Stretched to `shape` under the broadcasting rule.
    ///
    /// # Errors
    /// If the shapes do not broadcast.
    pub fn broadcast_to(&self, shape: impl Into<Shape>) -> Result<Array> {
        let shape = shape.into();
        if *self.shape() == shape {
            return Ok(self.clone());
        }
        if self.shape().broadcast(&shape).as_ref() != Some(&shape) {
            return Err(ArrayError::Broadcast { op: "broadcast_to", lhs: self.shape().clone(), rhs: shape });
        }
        self.view(View::Broadcast, shape)
    }

    /// The same elements, row-major and gap-free.
    ///
    /// # Errors
    /// Only those that every operation can return.
    pub fn contiguous(&self) -> Result<Array> {
        Array::build(Op::Copy, &[self], self.shape().clone(), self.dtype())
    }

    /// Arrays one after the other along `axis`.
    ///
    /// # Errors
    /// If there is none, or the shapes differ elsewhere, or the types differ.
    pub fn concatenate(arrays: &[&Array], axis: isize) -> Result<Array> {
        const OP: &str = "concatenate";
        let first = arrays
            .first()
            .ok_or(ArrayError::Argument { op: OP, reason: "needs at least one array".into() })?;
        let axis = resolve_axis(OP, axis, first.shape())?;
        let mut shape = first.shape().to_vec();
        shape[axis] = 0;
        for array in arrays {
            let mut expected = first.shape().to_vec();
            if let Some(&extent) = array.shape().get(axis) {
                expected[axis] = extent;
            }
            expect_shape(OP, "operand", &expected, array.shape())?;
            expect_dtype(
                OP,
                "operand",
                array.dtype() == first.dtype(),
                "the type of the first",
                array.dtype(),
            )?;
            shape[axis] += expected[axis];
        }
        Array::build(Op::Concatenate { axis }, arrays, shape.into(), first.dtype())
    }

    /// This array with the block at `starts` replaced by `update`.
    ///
    /// # Memory
    /// Written in place if the array is in memory, this is its only handle, and this update is the evaluated array. In
    /// a chain of updates that is evaluated as a whole, the first one copies the array.
    ///
    /// # Errors
    /// If the block is not within the array, or the types differ.
    pub fn slice_update(self, update: &Array, starts: &[usize]) -> Result<Array> {
        let shape = self.shape().clone();
        let fits = starts.len() == shape.rank()
            && update.shape().rank() == shape.rank()
            && starts
                .iter()
                .zip(update.shape().iter())
                .zip(shape.iter())
                .all(|((a, n), d)| a.saturating_add(*n) <= *d);
        if !fits || update.dtype() != self.dtype() {
            return Err(ArrayError::Argument {
                op: "slice_update",
                reason: format!(
                    "a {} block {} at {starts:?} does not fit into {} {shape}",
                    update.dtype(),
                    update.shape(),
                    self.dtype()
                ),
            });
        }
        let dtype = self.dtype();
        Array::build(Op::SliceUpdate { starts: starts.to_vec() }, &[&self, update], shape, dtype)
    }
}
