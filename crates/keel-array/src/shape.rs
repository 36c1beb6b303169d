//! Shapes, and the layouts that map them onto memory.

use std::fmt;
use std::ops::Deref;

use serde::{Deserialize, Serialize};

/// Extents of an array, outermost first. Prints as `(2, 7, 64)`.
#[derive(Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct Shape(Box<[usize]>);

impl Shape {
    /// Number of elements. It saturates, so a size check fails on a hostile shape instead of wrapping.
    pub fn elements(&self) -> usize {
        self.iter().fold(1usize, |n, &d| n.saturating_mul(d))
    }

    /// Number of axes.
    pub fn rank(&self) -> usize {
        self.len()
    }

    /// The common shape under NumPy's broadcasting rule, if there is one.
    pub fn broadcast(&self, other: &Shape) -> Option<Shape> {
        let rank = self.rank().max(other.rank());
        let extent = |s: &Shape, i: usize| (i + s.rank()).checked_sub(rank).map_or(1, |j| s[j]);
        (0..rank)
            .map(|i| match (extent(self, i), extent(other, i)) {
                (a, b) if a == b => Some(a),
                (1, b) => Some(b),
                (a, 1) => Some(a),
                _ => None,
            })
            .collect()
    }
}

impl FromIterator<usize> for Shape {
    fn from_iter<I: IntoIterator<Item = usize>>(extents: I) -> Shape {
        Shape(extents.into_iter().collect())
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(extents: [usize; N]) -> Shape {
        Shape(Box::new(extents))
    }
}

impl From<&[usize]> for Shape {
    fn from(extents: &[usize]) -> Shape {
        Shape(extents.into())
    }
}

impl From<Vec<usize>> for Shape {
    fn from(extents: Vec<usize>) -> Shape {
        Shape(extents.into())
    }
}

impl From<&Shape> for Shape {
    fn from(shape: &Shape) -> Shape {
        shape.clone()
    }
}

impl Deref for Shape {
    type Target = [usize];
    fn deref(&self) -> &[usize] {
        &self.0
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(")?;
        for (i, d) in self.iter().enumerate() {
            write!(f, "{}{d}", if i == 0 { "" } else { ", " })?;
        }
        f.write_str(if self.rank() == 1 { ",)" } else { ")" })
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Where the elements of a shape lie: element `i` is at `offset + sum(i[a] * strides[a])`, in elements.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Layout {
    /// Extents.
    pub shape: Shape,
    /// Distance between neighbours along each axis, in elements; 0 along a broadcast axis.
    pub strides: Box<[usize]>,
    /// Position of the first element, in elements.
    pub offset: usize,
}

impl Layout {
    /// Most axes of an array.
    pub const RANK_MAX: usize = 8;

    /// Row-major, gap-free, from element 0.
    pub fn contiguous(shape: Shape) -> Layout {
        let mut strides = vec![1usize; shape.rank()];
        for axis in (1..shape.rank()).rev() {
            strides[axis - 1] = strides[axis].saturating_mul(shape[axis].max(1));
        }
        Layout { strides: strides.into(), shape, offset: 0 }
    }

    /// True if the elements lie row-major without gaps (from any offset).
    pub fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        if self.shape.elements() == 0 {
            return true;
        }
        for axis in (0..self.shape.rank()).rev() {
            if self.shape[axis] != 1 && self.strides[axis] != expected {
                return false;
            }
            expected *= self.shape[axis].max(1);
        }
        true
    }

    /// The distance between consecutive rows, in elements. `None` unless the last `inner` axes lie gap-free and the
    /// axes before them step evenly without overlap.
    pub fn row_stride(&self, inner: usize) -> Option<usize> {
        let split = self.shape.rank().checked_sub(inner)?;
        let mut expected = 1;
        for axis in (split..self.shape.rank()).rev() {
            if self.shape[axis] != 1 && self.strides[axis] != expected {
                return None;
            }
            expected *= self.shape[axis].max(1);
        }
        let mut step = None;
        for axis in (0..split).rev() {
            if self.shape[axis] == 1 {
                continue;
            }
            match step {
                None => step = Some((self.strides[axis], self.strides[axis] * self.shape[axis])),
                Some((row, next)) if self.strides[axis] == next => {
                    step = Some((row, next * self.shape[axis]));
                }
                Some(_) => return None,
            }
        }
        // Broadcast rows lie on top of each other: one cannot step through them.
        Some(step.map_or(expected, |(row, _)| row)).filter(|&row| row >= expected)
    }

    /// Axes in a new order.
    pub fn permute(&self, axes: &[usize]) -> Layout {
        Layout {
            shape: axes.iter().map(|&a| self.shape[a]).collect(),
            strides: axes.iter().map(|&a| self.strides[a]).collect(),
            offset: self.offset,
        }
    }

    /// The block that begins at `starts` and has the extents of `shape`.
    pub fn slice(&self, starts: &[usize], shape: &Shape) -> Layout {
        let skipped: usize = starts.iter().zip(&self.strides).map(|(i, s)| i * s).sum();
        // A block without elements may begin at the end of several axes, which is not within the memory.
        let offset = if shape.elements() == 0 { self.offset } else { self.offset + skipped };
        Layout { shape: shape.clone(), strides: self.strides.clone(), offset }
    }

    /// Stretched to `shape`. The caller has checked that the shapes are compatible.
    pub fn broadcast(&self, shape: &Shape) -> Layout {
        let lead = shape.rank() - self.shape.rank();
        let strides = (0..shape.rank())
            .map(|i| match i.checked_sub(lead) {
                Some(j) if self.shape[j] == shape[i] => self.strides[j],
                _ => 0,
            })
            .collect();
        Layout { shape: shape.clone(), strides, offset: self.offset }
    }

    /// The same elements under another shape, if that needs no copy.
    pub fn reshape(&self, shape: &Shape) -> Option<Layout> {
        if self.shape.elements() == 0 {
            return Some(Layout { offset: self.offset, ..Layout::contiguous(shape.clone()) });
        }
        // Merge axes that follow each other without a gap, then cut the merged runs anew.
        let mut runs: Vec<(usize, usize)> = Vec::new(); // (extent, stride of its last axis)
        for (&extent, &stride) in self.shape.iter().zip(&self.strides) {
            if extent == 1 {
                continue;
            }
            match runs.last_mut() {
                Some((len, step)) if *step == stride * extent => {
                    *len *= extent;
                    *step = stride;
                }
                _ => runs.push((extent, stride)),
            }
        }
        let mut strides = vec![0usize; shape.rank()];
        let mut run = runs.len();
        let (mut left, mut step) = (1, 1);
        for axis in (0..shape.rank()).rev() {
            if shape[axis] == 1 {
                strides[axis] = step;
                continue;
            }
            if left == 1 {
                run = run.checked_sub(1)?;
                (left, step) = runs[run];
            }
            if left % shape[axis] != 0 {
                return None;
            }
            strides[axis] = step;
            left /= shape[axis];
            step *= shape[axis];
        }
        (left == 1 && run == 0).then(|| Layout {
            shape: shape.clone(),
            strides: strides.into(),
            offset: self.offset,
        })
    }

    /// One past the highest element that the layout touches.
    pub fn end(&self) -> usize {
        if self.shape.elements() == 0 {
            return self.offset;
        }
        let span: usize = self.shape.iter().zip(&self.strides).map(|(d, s)| (d - 1) * s).sum();
        self.offset + span + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broadcasting_follows_numpy() {
        let s = |v: &[usize]| Shape::from(v);
        assert_eq!(s(&[3, 1, 5]).broadcast(&s(&[4, 1])), Some(s(&[3, 4, 5])));
        assert_eq!(s(&[2, 3]).broadcast(&s(&[3, 3])), None);
        assert_eq!(s(&[]).broadcast(&s(&[7])), Some(s(&[7])));
    }

    #[test]
    fn reshape_keeps_views_where_it_can() {
        let wide = Layout::contiguous([5, 12].into());
        let columns = wide.slice(&[0, 4], &[5, 6].into());
        let heads = columns.reshape(&[5, 2, 3].into()).expect("rows stay whole");
        assert_eq!((&*heads.strides, heads.offset), (&[12, 3, 1][..], 4));
        assert_eq!(columns.reshape(&[30].into()), None);
        assert_eq!(heads.row_stride(2), Some(12));
        assert!(!heads.is_contiguous());
        let repeated = Layout::contiguous([1, 3].into()).broadcast(&[4, 3].into());
        assert_eq!(repeated.row_stride(1), None, "rows on top of each other");
        assert_eq!(heads.end(), 4 + 4 * 12 + 6);
    }

    #[test]
    fn a_transposed_layout_is_not_contiguous_unless_an_axis_is_one() {
        let l = Layout::contiguous([3, 4].into()).permute(&[1, 0]);
        assert!(!l.is_contiguous());
        assert!(Layout::contiguous([1, 4].into()).permute(&[1, 0]).is_contiguous());
    }
}
