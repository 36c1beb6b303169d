//! Refuses operations that the kernels cannot run. It does so when a program is made, by shapes, types and attributes
//! alone, so a plan gives the same answer as a device.
//!
//! A launched kernel relies on this. The match names every operation, so a new one cannot be forgotten.

use super::sequence::{CONV_TILE, chunked, chunks, prepare_shared_bytes};
use super::{COUNTERS, custom, linear};
use crate::backend::Mode;
use keel_array::{AttentionSpec, GatedDeltaSpec, Kernel, Op, Regime, RowLog, Shape};

/// Blocks that a grid has along y and z, at most.
pub(super) const GRID_MAX: usize = 65_535;

/// Blocks that a grid has along x, at most.
const GRID_X_MAX: usize = i32::MAX as usize;

/// Rows of a tile of the exact product, whose tiles of rows lie along y.
const LINEAR_TILE: usize = 64;

/// Widest attention head.
const HEAD_MAX: usize = 256;

/// Experts that the general routing kernel can keep in a block's shared memory.
const EXPERTS_MAX: usize = 12_288;

/// Bytes of shared memory that a block can have on every generation from Ampere on.
pub(super) const SHARED_BYTES: usize = 99 << 10;

/// Refuses an operation that no kernel of this backend runs.
pub(in crate::backend) fn supports(kernel: &Kernel, mode: Mode) -> Result<(), String> {
    let operands = kernel.inputs.iter().chain(&kernel.outputs);
    for extent in operands.flat_map(|operand| operand.layout.shape.iter()) {
        if u32::try_from(*extent).is_err() {
            return Err(format!("an extent of {extent}; kernels count to {}", u32::MAX));
        }
    }
    if kernel.outputs.iter().all(|output| output.layout.shape.elements() == 0) {
        return Ok(());
    }
    let shape = |i: usize| &kernel.inputs[i].layout.shape;
    match &kernel.op {
        Op::PagedAttention(_) => attention(shape(0), shape(1), shape(5)),
        Op::GatedDelta(spec) => {
            // The last operands are the starts, slots and positions of the sequences, and with a log the accepted
            // counts.
            let sequences = shape(if kernel.inputs.len() == 9 { 7 } else { 8 }).elements();
            gated_delta(spec, shape(0)[0], sequences, mode)
        }
        Op::CausalConv(spec) => {
            let sequences = shape(if spec.log == RowLog::None { 4 } else { 5 }).elements();
            convolution(spec.width, shape(0)[0], sequences)
        }
        Op::Matmul => {
            let (a, y) = (shape(0), &kernel.outputs[0].layout.shape);
            let (rows, cols) = (a[a.rank() - 2], y[y.rank() - 1]);
            at_most("rows of a product", rows, GRID_MAX * 32)?;
            at_most("products in a batch", y.elements() / (rows * cols).max(1), GRID_MAX)
        }
        Op::RouteTopK { k, .. } => {
            a_block_for_each_row(shape(0))?;
            let experts = shape(0).last().copied().unwrap_or(0);
            if experts <= 512 && *k <= 32 { Ok(()) } else { at_most("experts", experts, EXPERTS_MAX) }
        }
        Op::CombineExperts { .. } => at_most("rows in a step", shape(1)[0], GRID_MAX),
        Op::Linear { weight, .. } => {
            at_most("rows of a product", shape(0).elements() / weight.cols, GRID_MAX * LINEAR_TILE)
        }
        Op::GatherLinear { weight, .. } => linear::gathers(weight),
        Op::Custom(kernel_of_user) => custom::supports(kernel_of_user, kernel),
        Op::Reduce(_)
        | Op::ArgReduce { .. }
        | Op::Softmax
        | Op::CumSum { .. }
        | Op::Sort { .. }
        | Op::TopK { .. }
        | Op::Sample
        | Op::RmsNorm { .. }
        | Op::AddRmsNorm { .. }
        | Op::GatedRmsNorm { .. }
        | Op::LayerNorm { .. }
        | Op::Rope(_)
        | Op::NormRope { .. }
        | Op::RotatePairs => a_block_for_each_row(shape(0)),
        Op::Embedding { .. } => at_most("rows", shape(0).elements(), GRID_X_MAX),
        Op::Fill(_)
        | Op::Arange { .. }
        | Op::Random { .. }
        | Op::View(_)
        | Op::Copy
        | Op::Cast
        | Op::Unary(_)
        | Op::Binary(_)
        | Op::Where
        | Op::Fused(_)
        | Op::Concatenate { .. }
        | Op::SliceUpdate { .. }
        | Op::Take
        | Op::TakeAlong
        | Op::SwiGlu
        | Op::SigmoidGate => Ok(()),
        // Whether the device has these peers is asked of its group.
        Op::Send { .. }
        | Op::Receive { .. }
        | Op::AllReduce { .. }
        | Op::AllGather { .. }
        | Op::ReduceScatter { .. } => Ok(()),
    }
}

fn convolution(width: usize, rows: usize, sequences: usize) -> Result<(), String> {
    // The rows before a tile lie in the tile before it.
    at_most("columns of a convolution", width, CONV_TILE + 1)?;
    at_most("sequences in a step", sequences, GRID_MAX)?;
    // A tile holds rows of one sequence.
    at_most("tiles of 32 rows in a step", rows.div_ceil(CONV_TILE) + sequences, GRID_MAX)
}

fn gated_delta(spec: &GatedDeltaSpec, rows: usize, sequences: usize, mode: Mode) -> Result<(), String> {
    at_most("sequences in a step", sequences, GRID_MAX)?;
    if spec.regime == Regime::Prefill && chunked(spec, mode.precision) {
        at_most("chunks of 64 rows in a step", chunks(rows, sequences), GRID_MAX)?;
        let advice = "use --compute f32";
        return fits(prepare_shared_bytes(spec), &format!("value heads that share a key head; {advice}"));
    }
    if !spec.value_dim.is_multiple_of(4) {
        return Ok(());
    }
    at_most("sequences times key heads", sequences.saturating_mul(spec.key_heads), COUNTERS)
}

fn attention(q: &Shape, k: &Shape, table: &Shape) -> Result<(), String> {
    let (size, kv_heads, sequences) = (q[2], k[1], table[0]);
    let unit = AttentionSpec::HEAD_UNIT;
    if !size.is_multiple_of(unit) || size > HEAD_MAX {
        return Err(format!(
            "heads of {size}; the GPU takes multiples of {unit} up to {HEAD_MAX}. Run this model on the CPU (--device cpu)"
        ));
    }
    at_most("key heads", kv_heads, GRID_MAX)?;
    at_most("sequences in a step", sequences, GRID_MAX)?;
    // Tiles of prompts lie along y. A tile has at least 64 pairs of a row and a head that reads the same keys.
    let tiles = (q[0] * (q[1] / kv_heads.max(1))).div_ceil(64) + sequences;
    at_most("tiles of 64 rows and heads in a step", tiles, GRID_MAX)
}

/// Refuses more rows than a grid has blocks.
fn a_block_for_each_row(x: &Shape) -> Result<(), String> {
    let rows = x.iter().rev().skip(1).fold(1, |rows: usize, extent| rows.saturating_mul(*extent));
    at_most("rows", rows, GRID_X_MAX)
}

fn at_most(what: &str, count: usize, most: usize) -> Result<(), String> {
    if count > most { Err(format!("{count} {what}; the GPU takes {most}")) } else { Ok(()) }
}

fn fits(shared_bytes: usize, what: &str) -> Result<(), String> {
    if shared_bytes <= SHARED_BYTES {
        return Ok(());
    }
    Err(format!(
        "a block would need {shared_bytes} bytes of shared memory and has {SHARED_BYTES}: too many {what}"
    ))
}
