//! Tokens drawn from logits.

use super::{Call, Geometry};
use crate::driver::Arguments;
use crate::kernels::{KernelKey, SAMPLE};
use keel_array::{ArrayError, Kernel, Layout};

/// `BUCKETS` of `sample.cu`, and bytes of one.
const BUCKETS: usize = 512;
const BUCKET_BYTES: usize = 16;

/// `SPREAD` of `sample.cu`: threads of a block that works on a part of a row.
const SPREAD: usize = 256;

/// Parts that a row is divided into at most, and logits below which it is not divided.
const PARTS_MAX: usize = 32;
const PART_LOGITS: usize = 4096;

/// Threads that draw from a row.
const DRAWERS: usize = 1024;

fn extents(logits: &Layout) -> (usize, usize, usize) {
    let (rows, width) = (logits.shape[0], logits.shape[1]);
    (rows, width, width.div_ceil(PART_LOGITS).min(PARTS_MAX))
}

pub(super) fn workspace_bytes(kernel: &Kernel) -> usize {
    let (rows, _, parts) = extents(&kernel.inputs[0].layout);
    rows * (BUCKETS * BUCKET_BYTES + parts * size_of::<u64>())
}

pub(super) fn run(call: &Call<'_>) -> Result<(), ArrayError> {
    let (logits, draws, y) = (&call.inputs[0], &call.inputs[1], &call.outputs[0]);
    let (rows, width, parts) = extents(logits.layout);
    let (buckets, first) = (call.scratch, call.scratch + (rows * BUCKETS * BUCKET_BYTES) as u64);
    let key = |entry| KernelKey::new(SAMPLE, entry);
    let spread = Geometry { grid: (rows, parts, 1), ..Geometry::rows(rows, SPREAD) };
    let given = || Arguments::default().pointer(logits.address).pointer(draws.address).pointer(first);
    call.launch(&key("greatest"), spread, given().pointer(buckets).u32(width))?;
    let given = || given().pointer(buckets).pointer(y.address).u32(width);
    call.launch(&key("weigh"), spread, given())?;
    call.launch(&key("draw"), Geometry::rows(rows, DRAWERS), given().u32(parts))
}
