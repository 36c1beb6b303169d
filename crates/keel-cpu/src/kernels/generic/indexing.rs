//! Gathering by index. An index out of range is an error, and its element is not written.

use super::scalar::Plain;
use super::{GRAIN, row_grain};
use crate::pool::Worker;
use crate::shared_slice::SharedMut;

/// A type of index.
pub trait Index: Plain {
    /// The value; negative ones are out of every range.
    fn value(self) -> i64;
}

impl Index for u32 {
    fn value(self) -> i64 {
        i64::from(self)
    }
}

impl Index for i32 {
    fn value(self) -> i64 {
        i64::from(self)
    }
}

/// `index` as a position below `limit`.
///
/// # Errors
/// If it is not below `limit`.
pub fn position<I: Index>(index: I, limit: usize) -> Result<usize, String> {
    usize::try_from(index.value())
        .ok()
        .filter(|&i| i < limit)
        .ok_or_else(|| format!("index {} is out of range for {limit} entries", index.value()))
}

/// `y[i] = x[indices[i]]` for blocks of `width` values.
///
/// # Errors
/// If an index of this worker's share is out of range.
///
/// # Panics
/// If the lengths do not fit.
pub fn take<T: Plain, I: Index>(
    x: &[T],
    width: usize,
    indices: &[I],
    y: SharedMut<'_, T>,
    worker: &Worker<'_>,
) -> Result<(), String> {
    assert_eq!(y.len(), indices.len() * width);
    let entries = x.len().checked_div(width).unwrap_or(usize::MAX);
    for i in worker.claim(indices.len(), row_grain(width)).flatten() {
        let from = position(indices[i], entries)? * width;
        // SAFETY: each index is claimed once.
        unsafe { y.range(i * width..(i + 1) * width) }.copy_from_slice(&x[from..from + width]);
    }
    Ok(())
}

/// `y[r, i] = x[r, indices[r, i]]` for rows of `width` values of x and `picks` indices.
///
/// # Errors
/// If an index of this worker's share is out of range.
///
/// # Panics
/// If the lengths do not fit.
pub fn take_along<T: Plain, I: Index>(
    x: &[T],
    width: usize,
    indices: &[I],
    picks: usize,
    y: SharedMut<'_, T>,
    worker: &Worker<'_>,
) -> Result<(), String> {
    assert_eq!(y.len(), indices.len());
    for range in worker.claim(y.len(), GRAIN) {
        for i in range {
            let from = i / picks * width + position(indices[i], width)?;
            // SAFETY: each element is claimed once.
            unsafe { y.range(i..i + 1).fill(x[from]) };
        }
    }
    Ok(())
}
