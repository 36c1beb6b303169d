//! Moving elements: copies out of strides, joins, block replacement.

use super::GRAIN;
use super::scalar::Plain;
use super::strided::Strided;
use crate::pool::Worker;
use crate::shared_slice::SharedMut;

/// `y = x`, row-major.
///
/// # Panics
/// If the lengths differ.
pub fn copy<T: Plain>(x: Strided<'_, T>, y: SharedMut<'_, T>, worker: &Worker<'_>) {
    assert_eq!(x.len(), y.len());
    for range in worker.claim(y.len(), GRAIN) {
        // SAFETY: each range is claimed once.
        x.read(range.start, unsafe { y.range(range) });
    }
}

/// One operand of [`concatenate`]: its elements, and the number of them for each index of the leading axes.
pub struct JoinedOperand<'a, T> {
    /// Elements.
    pub x: Strided<'a, T>,
    /// Elements of one index of the axes before the joined one.
    pub run: usize,
}

/// Joins `count` operands one after another, for each of the `outer` indices of the axes before the joined one.
///
/// # Panics
/// If the lengths do not add up.
pub fn concatenate<'a, T: Plain>(
    count: usize,
    operand: impl Fn(usize) -> JoinedOperand<'a, T>,
    outer: usize,
    y: SharedMut<'_, T>,
    worker: &Worker<'_>,
) {
    let width: usize = (0..count).map(|i| operand(i).run).sum();
    assert_eq!(width * outer, y.len());
    // A unit is a range of one run of one operand.
    let ranges = |run: usize| run.div_ceil(GRAIN);
    let units: usize = (0..count).map(|i| ranges(operand(i).run) * outer).sum();
    // Short runs are claimed several at a time.
    let grain = (GRAIN * count / width.max(1)).max(1);
    for claimed in worker.claim(units, grain) {
        let (mut unit, mut first, mut at) = (claimed.start, 0, 0);
        for i in 0..count {
            let JoinedOperand { x, run } = operand(i);
            let past_run = first + ranges(run) * outer;
            while unit < claimed.end.min(past_run) {
                let (o, start) = ((unit - first) / ranges(run), (unit - first) % ranges(run) * GRAIN);
                let len = GRAIN.min(run - start);
                let to = o * width + at + start;
                // SAFETY: each range of each run is claimed once.
                x.read(o * run + start, unsafe { y.range(to..to + len) });
                unit += 1;
            }
            (first, at) = (past_run, at + run);
        }
    }
}

/// Writes `update`, of extents `block`, into `y`, of extents `shape`, with its first element at `starts`.
///
/// # Panics
/// If the block does not fit.
pub fn write_block<T: Plain>(
    update: Strided<'_, T>,
    block: &[usize],
    starts: &[usize],
    shape: &[usize],
    y: SharedMut<'_, T>,
    worker: &Worker<'_>,
) {
    // Trailing axes that the block covers completely form one run with the axis before them.
    let whole = block.iter().zip(shape).rev().take_while(|(b, s)| b == s).count();
    let lead = block.len().saturating_sub(whole + 1);
    let run: usize = block[lead..].iter().product();
    let runs: usize = block[..lead].iter().product();
    for i in worker.claim(runs, super::row_grain(run)).flatten() {
        let (mut at, mut stride, mut rest) = (0, 1, i);
        for axis in (0..block.len()).rev() {
            let index = if axis < lead { rest % block[axis] } else { 0 };
            rest = if axis < lead { rest / block[axis] } else { rest };
            at += (starts[axis] + index) * stride;
            stride *= shape[axis];
        }
        // SAFETY: runs of a block do not overlap, and each is claimed once.
        update.read(i * run, unsafe { y.range(at..at + run) });
    }
}
