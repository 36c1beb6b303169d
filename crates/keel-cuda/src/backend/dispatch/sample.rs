//! Tokens drawn from logits.

use super::{Call, Geometry};
use crate::kernels::{KernelKey, SAMPLE};
use crate::parameters::{DrawTokens, Greatest};
use keel_array::{ArrayError, Kernel, Layout};

/// `THREADS` and `CHUNK` of `sample.cu`: threads of a block, and logits that they read at a time.
const THREADS: usize = 1024;
const CHUNK: usize = 3 * THREADS;

/// Bytes of an `Ends` and of a `Board`: a count and a mass for each of 1,024 buckets, 4,096 candidates, and 16 bytes.
const ENDS_BYTES: usize = 16;
const BOARD_BYTES: usize = 1024 * (4 + 8) + 4096 * 8 + 16;

/// Blocks of a launch, divided among the rows: about as many as a large GPU runs at once.
const BLOCKS: usize = 128;

/// Blocks for each row.
fn parts(logits: &Layout) -> usize {
    let (rows, width) = (logits.shape[0], logits.shape[1]);
    width.div_ceil(CHUNK).min(BLOCKS / rows.max(1)).max(1)
}

pub(super) fn workspace_bytes(kernel: &Kernel) -> usize {
    let logits = &kernel.inputs[0].layout;
    logits.shape[0] * (BOARD_BYTES + parts(logits) * ENDS_BYTES)
}

pub(super) fn run(call: &Call<'_>) -> Result<(), ArrayError> {
    let (logits, draws, y) = (&call.inputs[0], &call.inputs[1], &call.outputs[0]);
    let (rows, width) = (logits.layout.shape[0], logits.layout.shape[1]);
    let (boards, ends) = (call.scratch, call.scratch + (rows * BOARD_BYTES) as u64);
    let key = |entry| KernelKey::new(SAMPLE, entry);
    let spread = Geometry { grid: (rows, parts(logits.layout), 1), ..Geometry::rows(rows, THREADS) };
    let (logits, draws, y) = (logits.address, draws.address, y.address);
    call.launch(&key("greatest"), spread, &Greatest { logits, draws, ends, boards, width })?;
    let parameters = DrawTokens { logits, draws, ends, boards, y, width };
    call.launch(&key("weigh"), spread, &parameters)?;
    call.launch(&key("draw"), spread, &parameters)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agreement::assert_values;
    use keel_array::sampling::Draw;

    #[test]
    fn the_source_has_the_same_numbers() {
        let numbers = [("THREADS", THREADS), ("CHUNK", CHUNK), ("DRAW_WORDS", Draw::WORDS)];
        let sizes = [("sizeof(Ends)", ENDS_BYTES), ("sizeof(Board)", BOARD_BYTES)];
        assert_values(KernelKey::new(SAMPLE, "draw"), &[&numbers[..], &sizes].concat());
    }
}
