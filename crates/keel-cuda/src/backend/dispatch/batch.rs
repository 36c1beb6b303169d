//! The arrays that say which rows belong to which sequence, checked on the device before kernels trust them.

use super::{Bound, Call, Geometry};
use crate::kernels::{BATCH, KernelKey};
use crate::parameters::CheckBatch;
use keel_array::ArrayError;

/// The message for wrong data that `batch.cu` has found.
pub(super) fn describe_fault(what: u32, number: u32, bound: u32) -> String {
    match what {
        2 => format!("the rows of the sequences do not divide {bound} rows: one ends at {number}"),
        3 => format!("a sequence is in slot {number} of {bound}"),
        4 => format!("sequences {} and {} are both in slot {number}", bound >> 16, bound & 0xffff),
        5 => format!("a sequence ends at position {number} but its table has {bound} pages of 256"),
        6 => format!("a sequence is in page {number} of {bound}"),
        8 => format!("sequence {} accepted {number} rows, and its log holds {}", bound & 0xffff, bound >> 16),
        10 => format!(
            "the pages of a window of {bound} come round within {number} rows that are attended together: the table names \
             too few"
        ),
        11 => format!("sequences {} and {} both write to page {number}", bound >> 16, bound & 0xffff),
        12 => format!("sequence {bound} writes to page {number}, where its rows still see earlier keys"),
        9 => format!("{number} rows of a sequence are to be kept open in {bound}"),
        _ => format!("a sequence starts at {number}; prefill starts at multiples of {bound}"),
    }
}

/// The operands of an operation that describe its batch, and the bounds that they are checked against.
#[derive(Default)]
pub(super) struct BatchCheck<'a> {
    pub rows: usize,
    /// Slots, and their number.
    pub slot: Option<(&'a Bound<'a>, usize)>,
    pub position: Option<&'a Bound<'a>>,
    /// Page table, and the number of pages.
    pub table: Option<(&'a Bound<'a>, usize)>,
    /// Rows that a row sees; 0 for all.
    pub window: usize,
    /// With a window, rows are attended together up to a multiple of this position; 0 for all rows at once.
    pub run: usize,
    /// Positions have to be multiples of this; 0 for any position.
    pub grid: usize,
    pub log: Option<Log<'a>>,
}

/// Rows that may be taken back.
#[derive(Clone, Copy)]
pub(super) struct Log<'a> {
    /// `[slots, R, ..]`.
    pub rows: &'a Bound<'a>,
    pub accepted: &'a Bound<'a>,
    pub keep_open: bool,
}

impl Log<'_> {
    /// Rows of a slot.
    pub fn capacity(&self) -> usize {
        self.rows.layout.shape[1]
    }
}

/// Checks the batch of an operation. Layers share their batch, so operands that last are checked once in a launch.
pub(super) fn check_batch(
    call: &Call<'_>,
    row_start: &Bound<'_>,
    check: &BatchCheck<'_>,
) -> Result<(), ArrayError> {
    let address = |bound: Option<&Bound<'_>>| bound.map_or(0, |b| b.address);
    // The report's address and the kernel's number are added below: they do not change the check.
    let parameters = CheckBatch {
        row_start: row_start.address,
        slot: address(check.slot.map(|s| s.0)),
        position: address(check.position),
        table: address(check.table.map(|t| t.0)),
        accepted: address(check.log.map(|log| log.accepted)),
        sequences: row_start.len().saturating_sub(1),
        rows: check.rows,
        slots: check.slot.map_or(0, |s| s.1),
        pages: check.table.map_or(0, |t| t.1),
        table_width: check.table.map_or(0, |t| t.0.width()),
        window: check.window,
        run: check.run,
        grid: check.grid,
        records: check.log.map_or(0, |log| log.capacity()),
        keep_open: check.log.map_or(0, |log| usize::from(log.keep_open)),
        fault: 0,
        kernel: 0,
    };
    let operands = [
        Some(row_start),
        check.slot.map(|s| s.0),
        check.position,
        check.table.map(|t| t.0),
        check.log.map(|log| log.accepted),
    ];
    if operands.into_iter().flatten().all(|operand| operand.lasting) {
        let mut checked = call.checked.borrow_mut();
        if checked.contains(&parameters) {
            return Ok(());
        }
        checked.push(parameters.clone());
    }
    let parameters = CheckBatch { fault: call.fault, kernel: call.index, ..parameters };
    let geometry = Geometry { grid: (1, 1, 1), block: (256, 1, 1), shared_bytes: 0 };
    call.launch(&KernelKey::new(BATCH, "check_batch"), geometry, &parameters)
}
