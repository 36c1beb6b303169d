//! Operations with state: convolution, gated delta rule, attention.

use super::batch::{BatchCheck, Log, check_batch};
use super::linear::{self, Convolution};
use super::support::SHARED_BYTES;
use super::{Bound, Call, Geometry, attention};
use crate::backend::{Mode, Precision};
use crate::kernels::{CAUSAL_CONV, GATED_DELTA, GATED_DELTA_ANY, GATED_DELTA_CHUNKED, KernelKey};
use crate::parameters::{CausalConv, CausalConvPrefill, GatedDelta, GatedDeltaChunks, GatedDeltaPrepare};
use keel_array::{ArrayError, ConvSpec, DType, GatedDeltaSpec, Kernel, Op, PREFILL_GRID, Regime, RowLog};

/// Threads of a block of a convolution, and rows that one of them works on.
const CONV_BLOCK: usize = 128;
pub(super) const CONV_TILE: usize = 32;

/// Rows of a chunk of the gated delta rule: `ROWS` of `gated_delta_tiles.cuh`.
const CHUNK: usize = 64;
const _: () = assert!(CHUNK == PREFILL_GRID);

/// Columns of a head's state that a block works on.
const COLUMNS: usize = 32;

pub(super) fn run(call: &Call<'_>) -> Result<(), ArrayError> {
    check_states(call)?;
    match &call.kernel.op {
        Op::CausalConv(spec) => conv(spec, call),
        Op::GatedDelta(spec) => delta(spec, call),
        Op::PagedAttention(spec) => attention::run(spec, call),
        op => unreachable!("{} has no memory", op.name()),
    }
}

fn check_states(call: &Call<'_>) -> Result<(), ArrayError> {
    let inputs = &call.inputs;
    let checked = call.kernel.op.check_states(inputs.len(), |i, j| inputs[i].overlaps(&inputs[j]));
    checked.map_err(|reason| call.error(reason))
}

pub(super) fn workspace_bytes(kernel: &Kernel, mode: Mode) -> usize {
    let shape = |i: usize| &kernel.inputs[i].layout.shape;
    match &kernel.op {
        Op::PagedAttention(spec) => attention::workspace_bytes(spec, kernel, mode),
        Op::GatedDelta(spec) if spec.regime == Regime::Prefill && chunked(spec, mode.precision) => {
            chunk_bytes(spec) * chunks(shape(0)[0], shape(7)[0])
        }
        _ => 0,
    }
}

/// A log as kernels take it.
struct LogArguments {
    /// Address of the records, 0 without a log.
    records: u64,
    /// Address of the accepted counts, 0 without a log.
    accepted: u64,
    /// 1 if rows stay open.
    keep_open: usize,
}

impl LogArguments {
    fn of(log: Option<Log<'_>>) -> LogArguments {
        let (records, accepted) = log.map_or((0, 0), |log| (log.rows.address, log.accepted.address));
        LogArguments { records, accepted, keep_open: log.map_or(0, |log| usize::from(log.keep_open)) }
    }
}

fn conv(spec: &ConvSpec, call: &Call<'_>) -> Result<(), ArrayError> {
    let (x, weight, window, row_start, slot, log) = match &call.inputs[..] {
        [x, weight, window, row_start, slot] => (x, weight, window, row_start, slot, None),
        [x, weight, window, rows, row_start, slot, accepted] => {
            let keep_open = spec.log == RowLog::KeepOpen;
            (x, weight, window, row_start, slot, Some(Log { rows, accepted, keep_open }))
        }
        _ => unreachable!("five operands, seven with a log"),
    };
    let (rows, channels) = (x.layout.shape[0], x.width());
    let slots = Some((slot, window.layout.shape[0]));
    check_batch(call, row_start, &BatchCheck { rows, slot: slots, log, ..BatchCheck::default() })?;
    let key = |entry| {
        KernelKey::new(CAUSAL_CONV, entry)
            .define("C", channels)
            .define("K", spec.width)
            .define("X_STRIDE", x.row_stride(1))
            .define("OPEN", log.map_or(0, |log| log.capacity()))
    };
    let (sequences, y) = (slot.len(), call.outputs[0].address);
    let [x, w, window, row_start, slot] = [x, weight, window, row_start, slot].map(|operand| operand.address);
    let geometry = |y: usize| Geometry {
        grid: (channels.div_ceil(CONV_BLOCK), y, 1),
        block: (CONV_BLOCK, 1, 1),
        shared_bytes: 0,
    };
    if log.is_none() && runs_in_tiles(rows, sequences) {
        let tiles = rows.div_ceil(CONV_TILE) + sequences;
        let parameters = CausalConvPrefill { x, w, window, row_start, slot, sequences, y };
        return call.launch(&key("causal_conv_prefill"), geometry(tiles), &parameters);
    }
    let LogArguments { records: open, accepted, keep_open } = LogArguments::of(log);
    let parameters = CausalConv { x, w, window, open, row_start, slot, accepted, keep_open, y };
    call.launch(&key("causal_conv"), geometry(sequences), &parameters)
}

/// Whether rows are divided into tiles. Otherwise one block goes over all rows of a sequence, of which a decode step
/// has one. A step of prompts has room for more sequences than take part, so their number says nothing of their length.
fn runs_in_tiles(rows: usize, sequences: usize) -> bool {
    rows > sequences
}

/// The name of a group of a product and a convolution of its columns.
pub(super) const CONVOLVED: &str = "convolved product";

/// Whether a product and the convolution that reads its columns can be one launch: those of a step of one row.
pub(super) fn is_convolved(product: &Kernel, conv: &Kernel, mode: Mode) -> bool {
    let (Op::Linear { weight, residual: false }, Op::CausalConv(_)) = (&product.op, &conv.op) else {
        return false;
    };
    let (y, convolved) = (&product.outputs[0], &conv.outputs[0]);
    let [x, _, _, _, slot] = &conv.inputs[..] else { return false };
    let one_row = y.layout.shape.elements() == weight.rows
        && slot.layout.shape.elements() == 1
        && x.layout.shape[0] == 1;
    // Some blocks of the product may still read its operands when others have finished.
    one_row
        && linear::takes_few_rows(weight, product, mode)
        && x.lies_within(y)
        && product.workspace.is_none()
        && product.reads().into_iter().all(|read| !read.may_overlap(convolved))
        && !convolved.may_overlap(y)
}

/// Runs a product and the convolution that reads its columns in one launch.
pub(super) fn run_convolved(product: &Call<'_>, conv: &Call<'_>) -> Result<(), ArrayError> {
    check_states(conv)?;
    let (Op::CausalConv(spec), [x, taps, window, row_start, slot]) = (&conv.kernel.op, &conv.inputs[..])
    else {
        unreachable!("a convolution without a log")
    };
    let slots = Some((slot, window.layout.shape[0]));
    check_batch(conv, row_start, &BatchCheck { rows: 1, slot: slots, ..BatchCheck::default() })?;
    let convolution = Convolution {
        width: spec.width,
        channels: x.width(),
        first_column: (x.address - product.outputs[0].address) as usize / size_of::<f32>(),
        weight: *taps,
        window: *window,
        row_start: *row_start,
        slot: *slot,
        y: conv.outputs[0],
    };
    linear::convolved_linear(product, convolution)?;
    [product, conv].into_iter().for_each(Call::note_written);
    Ok(())
}

fn delta(spec: &GatedDeltaSpec, call: &Call<'_>) -> Result<(), ArrayError> {
    let [qkv, a, b, a_log, dt_bias, state, rest @ ..] = &call.inputs[..] else {
        unreachable!("six operands come first")
    };
    let (row_start, slot, position, log) = match rest {
        [row_start, slot, position] => (row_start, slot, position, None),
        [rows, row_start, slot, position, accepted] => {
            let keep_open = spec.log == RowLog::KeepOpen;
            (row_start, slot, position, Some(Log { rows, accepted, keep_open }))
        }
        _ => unreachable!("nine operands, eleven with a log"),
    };
    let check = BatchCheck {
        rows: qkv.layout.shape[0],
        slot: Some((slot, state.layout.shape[0])),
        position: Some(position),
        grid: if spec.regime == Regime::Prefill { PREFILL_GRID } else { 0 },
        log,
        ..BatchCheck::default()
    };
    check_batch(call, row_start, &check)?;
    let constants = |key: KernelKey| {
        key.define("HK", spec.key_heads)
            .define("HV", spec.value_heads)
            .define("DK", spec.key_dim)
            .define("DV", spec.value_dim)
            .define("QKV_STRIDE", qkv.row_stride(1))
            .define("A_STRIDE", a.row_stride(1))
            .define("B_STRIDE", b.row_stride(1))
            .define("LOG", log.map_or(0, |log| log.capacity()))
            .define("STATE_F16", u8::from(state.dtype == DType::F16))
    };
    let LogArguments { records, accepted, keep_open } = LogArguments::of(log);
    let parameters = GatedDelta {
        qkv: qkv.address,
        a: a.address,
        b: b.address,
        a_log: a_log.address,
        dt_bias: dt_bias.address,
        state: state.address,
        row_start: row_start.address,
        slot: slot.address,
        records,
        accepted,
        counters: call.counters,
        keep_open,
        y: call.outputs[0].address,
    };
    if !spec.value_dim.is_multiple_of(4) {
        let key = constants(KernelKey::new(GATED_DELTA_ANY, "gated_delta_any"));
        let columns = spec.value_heads / spec.key_heads * spec.value_dim;
        let block = (columns.next_multiple_of(32).min(256), 1, 1);
        let geometry = Geometry { grid: (spec.key_heads, slot.len(), 1), block, shared_bytes: 0 };
        return call.launch(&key, geometry, &parameters);
    }
    if spec.regime == Regime::Prefill && chunked(spec, call.mode.precision) && aligned(qkv) {
        return delta_chunked(spec, constants, call);
    }
    // The operands that the kernel reads before it waits.
    let early = [a_log, dt_bias, state, row_start, slot].iter().all(|operand| call.is_untouched(operand));
    let key = constants(KernelKey::new(GATED_DELTA, "gated_delta")).define("EARLY", u8::from(early));
    let grid = (spec.value_heads * spec.value_dim.div_ceil(COLUMNS), slot.len(), 1);
    call.launch(&key, Geometry { grid, block: (128, 1, 1), shared_bytes: 0 }, &parameters)?;
    call.settle();
    Ok(())
}

/// Widest head of the kernels on tensor cores. A chunk of it fits a block's shared memory on every generation.
const CHUNKED_HEAD_MAX: usize = 256;
const _: () = assert!(stage_bytes(CHUNKED_HEAD_MAX) <= SHARED_BYTES);

/// Whether prefill works on tensor cores, in chunks.
pub(super) fn chunked(spec: &GatedDeltaSpec, precision: Precision) -> bool {
    let fits = |size: usize| size.is_multiple_of(16) && size <= CHUNKED_HEAD_MAX;
    precision == Precision::Fast && fits(spec.key_dim) && fits(spec.value_dim)
}

/// Chunks of a step at most: whole ones of all rows, and a ragged one for each sequence.
pub(super) fn chunks(rows: usize, sequences: usize) -> usize {
    rows.div_ceil(CHUNK) + sequences
}

/// Bytes of a chunk's k and q of a key head, of a value head's two matrices, and of its gates.
const fn key_tiles(key_dim: usize) -> usize {
    2 * CHUNK * (key_dim + 8) * size_of::<u16>()
}
const PAIR_TILES: usize = 2 * CHUNK * (CHUNK + 8) * size_of::<u16>();
const GATES: usize = 2 * CHUNK * size_of::<f32>();

/// `WORKSPACE_BYTES` of the source: scratch of a chunk.
fn chunk_bytes(spec: &GatedDeltaSpec) -> usize {
    spec.key_heads * key_tiles(spec.key_dim) + spec.value_heads * (PAIR_TILES + GATES)
}

/// `sizeof(Stage)` of the source: a chunk of a value head in shared memory.
const fn stage_bytes(key_dim: usize) -> usize {
    key_tiles(key_dim) + PAIR_TILES + CHUNK * (COLUMNS + 4) * size_of::<f32>() + GATES
}

/// `PREPARE_SHARED` of the source: k and q of a key head, then two matrices in their place. After them, of each of its
/// value heads, the sums of log decays, two floats each, and the betas.
pub(super) fn prepare_shared_bytes(spec: &GatedDeltaSpec) -> usize {
    const MATRICES: usize = 2 * (CHUNK * (CHUNK + 4) + 32 * 36) * size_of::<f32>();
    const OF_VALUE_HEAD: usize = 3 * CHUNK * size_of::<f32>();
    key_tiles(spec.key_dim).max(MATRICES) + OF_VALUE_HEAD * (spec.value_heads / spec.key_heads.max(1))
}

/// Whether rows can be read 16 bytes at a time.
fn aligned(x: &Bound<'_>) -> bool {
    x.address.is_multiple_of(16) && x.row_stride(1).is_multiple_of(4)
}

fn delta_chunked(
    spec: &GatedDeltaSpec,
    constants: impl Fn(KernelKey) -> KernelKey,
    call: &Call<'_>,
) -> Result<(), ArrayError> {
    let [qkv, a, b, a_log, dt_bias, state, row_start, slot, ..] = &call.inputs[..] else {
        unreachable!("nine operands")
    };
    let sequences = slot.len();
    let chunks = chunks(qkv.layout.shape[0], sequences);
    let stage_bytes = stage_bytes(spec.key_dim);
    // Chunks that a block keeps in shared memory. One sequence has few blocks, so each has copies under way. With
    // several, two blocks share a multiprocessor and hide each other's waits.
    let stages = (call.gpu.device.shared_bytes_max / stage_bytes).min(if sequences == 1 { 3 } else { 1 });
    let key = |entry| constants(KernelKey::new(GATED_DELTA_CHUNKED, entry)).define("STAGES", stages);
    let (workspace, row_start) = (call.scratch, row_start.address);
    let parameters = GatedDeltaPrepare {
        qkv: qkv.address,
        a: a.address,
        b: b.address,
        a_log: a_log.address,
        dt_bias: dt_bias.address,
        row_start,
        sequences,
        chunks,
        workspace,
    };
    let shared_bytes = prepare_shared_bytes(spec);
    let geometry = Geometry { grid: (spec.key_heads, chunks, 1), block: (256, 1, 1), shared_bytes };
    call.launch(&key("gated_delta_prepare"), geometry, &parameters)?;
    let parameters = GatedDeltaChunks {
        qkv: qkv.address,
        state: state.address,
        row_start,
        slot: slot.address,
        chunks,
        workspace,
        y: call.outputs[0].address,
    };
    let grid = (spec.value_heads * spec.value_dim.div_ceil(COLUMNS), sequences, 1);
    let geometry = Geometry { grid, block: (128, 1, 1), shared_bytes: stages * stage_bytes };
    call.launch(&key("gated_delta_chunks"), geometry, &parameters)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agreement::{assert_values, key_of};

    /// Two prompts of 512 rows in a step for 32: each block of the other kernel would go over 512 rows.
    #[test]
    fn a_convolution_of_prompts_runs_in_tiles() {
        assert!(runs_in_tiles(1024, 32) && runs_in_tiles(33, 32) && runs_in_tiles(2, 1));
        assert!(!runs_in_tiles(32, 32) && !runs_in_tiles(1, 1));
    }

    #[test]
    fn the_sources_have_the_same_numbers() {
        let conv = [("C", 96), ("K", 4), ("X_STRIDE", 100), ("OPEN", 3)];
        assert_values(key_of(CAUSAL_CONV, "causal_conv", &conv), &[("TILE", CONV_TILE)]);
        for (key_heads, value_heads, key_dim) in [(2, 6, 32), (16, 32, 128), (1, 2, 256)] {
            let spec = GatedDeltaSpec {
                key_heads,
                value_heads,
                key_dim,
                value_dim: 48,
                regime: Regime::Prefill,
                log: RowLog::None,
            };
            let constants = [
                ("HK", key_heads),
                ("HV", value_heads),
                ("DK", key_dim),
                ("DV", spec.value_dim),
                ("QKV_STRIDE", 400),
                ("A_STRIDE", 400),
                ("B_STRIDE", 400),
                ("LOG", 0),
                ("STATE_F16", 0),
                ("EARLY", 0),
                ("STAGES", 2),
            ];
            let values = [
                ("ROWS", CHUNK),
                ("COLUMNS", COLUMNS),
                ("WORKSPACE_BYTES", chunk_bytes(&spec)),
                ("sizeof(Stage)", stage_bytes(key_dim)),
                ("PREPARE_SHARED", prepare_shared_bytes(&spec)),
            ];
            assert_values(key_of(GATED_DELTA_CHUNKED, "gated_delta_chunks", &constants), &values);
            assert_values(key_of(GATED_DELTA, "gated_delta", &constants), &[("COLUMNS", COLUMNS)]);
        }
    }
}
