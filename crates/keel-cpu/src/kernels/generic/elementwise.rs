//! Element-wise operations that are not chains of f32: integers, comparisons, selection, conversion.

use super::scalar::{Flag, Plain, Scalar, Wide};
use super::strided::Strided;
use super::{BLOCK, GRAIN};
use crate::pool::Worker;
use crate::shared_slice::SharedMut;
use keel_array::{Binary, Unary};
use std::ops::Range;

/// Walks `0..total` in blocks.
fn for_each_block(total: usize, worker: &Worker<'_>, mut work: impl FnMut(Range<usize>)) {
    for range in worker.claim(total, GRAIN) {
        for start in range.clone().step_by(BLOCK) {
            work(start..range.end.min(start + BLOCK));
        }
    }
}

/// `y = op(x)` on integers, wrapping, or on flags.
///
/// # Panics
/// If the lengths differ, or `op` is for floats.
pub fn integer_unary<T: Scalar>(op: Unary, x: Strided<'_, T>, y: SharedMut<'_, T>, worker: &Worker<'_>) {
    assert_eq!(x.len(), y.len());
    let f: fn(i64) -> i64 = match op {
        Unary::Neg => i64::wrapping_neg,
        Unary::Abs => i64::wrapping_abs,
        Unary::Not => |x| i64::from(x == 0),
        other => unreachable!("{} is for floats", other.name()),
    };
    let mut block = [T::default(); BLOCK];
    for_each_block(y.len(), worker, |range| {
        let block = &mut block[..range.len()];
        x.read(range.start, block);
        // SAFETY: each block is claimed once.
        let y = unsafe { y.range(range) };
        y.iter_mut().zip(block).for_each(|(y, x)| *y = T::from_i64(f(x.to_i64())));
    });
}

/// `y = op(a, b)` on integers, wrapping, or on flags.
///
/// # Panics
/// If the lengths differ, or `op` compares or is for floats.
pub fn integer_binary<T: Scalar>(
    op: Binary,
    a: Strided<'_, T>,
    b: Strided<'_, T>,
    y: SharedMut<'_, T>,
    worker: &Worker<'_>,
) {
    assert!(a.len() == y.len() && b.len() == y.len());
    let f: fn(i64, i64) -> i64 = match op {
        Binary::Add => i64::wrapping_add,
        Binary::Sub => i64::wrapping_sub,
        Binary::Mul => i64::wrapping_mul,
        Binary::Div => |a, b| if b == 0 { 0 } else { a.wrapping_div(b) },
        Binary::Max | Binary::Or => Ord::max,
        Binary::Min | Binary::And => Ord::min,
        other => unreachable!("{} does not give an integer", other.name()),
    };
    for_each_pair(a, b, y, worker, |a, b| T::from_i64(f(a.to_i64(), b.to_i64())));
}

/// `y = a op b` as flags; false where a float is NaN.
///
/// # Panics
/// If the lengths differ, or `op` does not compare.
pub fn compare<T: Scalar>(
    op: Binary,
    a: Strided<'_, T>,
    b: Strided<'_, T>,
    y: SharedMut<'_, Flag>,
    worker: &Worker<'_>,
) {
    assert!(a.len() == y.len() && b.len() == y.len());
    for_each_pair(a, b, y, worker, |a, b| {
        let holds = if T::IS_FLOAT {
            holds(op, &a.to_f32(), &b.to_f32())
        } else {
            holds(op, &a.to_i64(), &b.to_i64())
        };
        Flag(u8::from(holds))
    });
}

/// `y = f(a, b)`. All three have as many elements.
fn for_each_pair<T: Scalar, D>(
    a: Strided<'_, T>,
    b: Strided<'_, T>,
    y: SharedMut<'_, D>,
    worker: &Worker<'_>,
    f: impl Fn(T, T) -> D,
) {
    let (mut a_block, mut b_block) = ([T::default(); BLOCK], [T::default(); BLOCK]);
    for_each_block(y.len(), worker, |range| {
        let (av, bv) = (&mut a_block[..range.len()], &mut b_block[..range.len()]);
        a.read(range.start, av);
        b.read(range.start, bv);
        // SAFETY: each block is claimed once.
        let y = unsafe { y.range(range) };
        y.iter_mut().zip(av).zip(bv).for_each(|((y, a), b)| *y = f(*a, *b));
    });
}

#[inline(always)]
fn holds<T: PartialOrd>(op: Binary, a: &T, b: &T) -> bool {
    match op {
        Binary::Equal => a == b,
        Binary::Less => a < b,
        Binary::LessEqual => a <= b,
        other => unreachable!("{} does not compare", other.name()),
    }
}

/// `y = if condition { a } else { b }`
///
/// # Panics
/// If the lengths differ.
pub fn select<T: Plain>(
    condition: Strided<'_, u8>,
    a: Strided<'_, T>,
    b: Strided<'_, T>,
    y: SharedMut<'_, T>,
    worker: &Worker<'_>,
) {
    assert!(condition.len() == y.len() && a.len() == y.len() && b.len() == y.len());
    let (mut a_block, mut b_block, mut flags) = ([T::default(); BLOCK], [T::default(); BLOCK], [0; BLOCK]);
    for_each_block(y.len(), worker, |range| {
        let len = range.len();
        a.read(range.start, &mut a_block[..len]);
        b.read(range.start, &mut b_block[..len]);
        condition.read(range.start, &mut flags[..len]);
        // SAFETY: each block is claimed once.
        let y = unsafe { y.range(range) };
        for (i, y) in y.iter_mut().enumerate() {
            *y = if flags[i] != 0 { a_block[i] } else { b_block[i] };
        }
    });
}

/// `y[i] = x[i]` in another type: floats by way of f32, all others by way of i64.
///
/// # Panics
/// If the lengths differ.
pub fn cast<S: Scalar, D: Scalar>(x: Strided<'_, S>, y: SharedMut<'_, D>, worker: &Worker<'_>) {
    assert_eq!(x.len(), y.len());
    // Cleared once, and not for each block.
    let (mut raw, mut wide) = ([S::default(); BLOCK], [S::Wide::default(); BLOCK]);
    for_each_block(y.len(), worker, |range| {
        let wide = &mut wide[..range.len()];
        read_wide(&x, range.start, &mut raw[..range.len()], wide);
        // SAFETY: each block is claimed once.
        write_wide(wide, unsafe { y.range(range) });
    });
}

/// Elements from `start` on, as they are in `raw`, and widened. This and [`write_wide`] are functions of their own, so
/// that the loops over elements are compiled for each type, not for each pair of types.
#[inline(never)]
fn read_wide<S: Scalar>(x: &Strided<'_, S>, start: usize, raw: &mut [S], wide: &mut [S::Wide]) {
    x.read(start, raw);
    wide.iter_mut().zip(raw).for_each(|(wide, x)| *wide = x.wide());
}

#[inline(never)]
fn write_wide<W: Wide, D: Scalar>(from: &[W], y: &mut [D]) {
    y.iter_mut().zip(from).for_each(|(y, x)| *y = x.narrow());
}
