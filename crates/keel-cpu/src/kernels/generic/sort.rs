//! Sorting rows, and finding the largest elements of a row.
//!
//! Only indices are moved, in the output's own memory; values are gathered at the end. The index decides between
//! equals, so any algorithm is stable. NaN comes last in both directions.

use super::row_grain;
use super::scalar::Scalar;
use crate::pool::Worker;
use crate::shared_slice::SharedMut;
use std::cmp::Ordering;

/// The order of the elements of a row.
#[derive(Clone, Copy)]
pub struct Order {
    /// Largest first.
    pub descending: bool,
}

impl Order {
    /// The order of elements `i` and `j`; the index decides between equals.
    fn compare<T: Scalar>(self, x: &[T], i: usize, j: usize) -> Ordering {
        self.values(x[i], x[j]).then(i.cmp(&j))
    }

    /// Whether the value of element `i` comes before that of element `j`.
    #[inline(always)]
    pub(super) fn strictly_before<T: Scalar>(self, x: &[T], i: usize, j: usize) -> bool {
        self.values(x[i], x[j]) == Ordering::Less
    }

    #[inline(always)]
    fn values<T: Scalar>(self, a: T, b: T) -> Ordering {
        let ascending = if T::IS_FLOAT {
            let (a, b) = (a.to_f32(), b.to_f32());
            match (a.is_nan(), b.is_nan()) {
                (false, false) => a.partial_cmp(&b).unwrap_or(Ordering::Equal),
                (a, b) => return a.cmp(&b),
            }
        } else {
            a.to_i64().cmp(&b.to_i64())
        };
        if self.descending { ascending.reverse() } else { ascending }
    }
}

/// Sorts each row of `width` values: values and indices.
///
/// # Panics
/// If the lengths differ.
pub fn sort<T: Scalar>(
    x: &[T],
    width: usize,
    order: Order,
    values: SharedMut<'_, T>,
    indices: SharedMut<'_, u32>,
    worker: &Worker<'_>,
) {
    assert!(values.len() == x.len() && indices.len() == x.len());
    let rows = x.len() / width.max(1);
    for row in worker.claim(rows, row_grain(width)).flatten() {
        let range = row * width..(row + 1) * width;
        let x = &x[range.clone()];
        // SAFETY: each row is claimed once.
        let (values, indices) = unsafe { (values.range(range.clone()), indices.range(range)) };
        indices.iter_mut().enumerate().for_each(|(i, index)| *index = i as u32);
        sort_indices(x, order, indices);
        gather(x, indices, values);
    }
}

/// The `k` largest of each row of `width` values, largest first: values and indices.
///
/// # Panics
/// If the lengths do not fit.
pub fn top_k<T: Scalar>(
    x: &[T],
    width: usize,
    k: usize,
    values: SharedMut<'_, T>,
    indices: SharedMut<'_, u32>,
    worker: &Worker<'_>,
) {
    assert!(k <= width && values.len() == indices.len());
    if k == 0 {
        return;
    }
    let rows = values.len() / k;
    assert!(x.len() == rows * width && values.len() == rows * k);
    for row in worker.claim(rows, row_grain(width)).flatten() {
        let x = &x[row * width..(row + 1) * width];
        let range = row * k..(row + 1) * k;
        // SAFETY: each row is claimed once.
        let (values, indices) = unsafe { (values.range(range.clone()), indices.range(range)) };
        largest(x, indices);
        gather(x, indices, values);
    }
}

/// Fills `kept` with the indices of the largest values of `x`, largest first, equal values in order of their index.
pub(super) fn largest<T: Scalar>(x: &[T], kept: &mut [u32]) {
    let order = Order { descending: true };
    // A heap with the smallest kept element at its root, so that most elements cost one comparison.
    kept.iter_mut().enumerate().for_each(|(i, index)| *index = i as u32);
    for root in (0..kept.len() / 2).rev() {
        sift_down(x, order, kept, root);
    }
    for i in kept.len()..x.len() {
        if order.strictly_before(x, i, kept[0] as usize) {
            kept[0] = i as u32;
            sift_down(x, order, kept, 0);
        }
    }
    sort_indices(x, order, kept);
}

/// Sorts indices of elements of `x`. One function for both callers: the library's sort is compiled for each type once.
#[inline(never)]
fn sort_indices<T: Scalar>(x: &[T], order: Order, indices: &mut [u32]) {
    indices.sort_unstable_by(|&i, &j| order.compare(x, i as usize, j as usize));
}

fn sift_down<T: Scalar>(x: &[T], order: Order, heap: &mut [u32], mut root: usize) {
    let goes_later = |heap: &[u32], a: usize, b: usize| {
        order.compare(x, heap[a] as usize, heap[b] as usize) == Ordering::Greater
    };
    loop {
        let mut last = root;
        for child in [2 * root + 1, 2 * root + 2] {
            if child < heap.len() && goes_later(heap, child, last) {
                last = child;
            }
        }
        if last == root {
            return;
        }
        heap.swap(root, last);
        root = last;
    }
}

fn gather<T: Scalar>(x: &[T], indices: &[u32], values: &mut [T]) {
    values.iter_mut().zip(indices).for_each(|(value, &i)| *value = x[i as usize]);
}
