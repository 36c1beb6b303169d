//! Which producers our kernels absorb.
//!
//! | reader | producers |
//! |---|---|
//! | product of few rows | a norm, the gated norm of heads, or a gate before it |
//! | product of many rows | the same, a layer norm, SwiGLU or an element-wise chain, where x is rounded to 16 bits |
//! | SwiGLU | a product of few rows |
//! | sum with a bias, and with a residual | a product of many rows with a dense weight |
//! | combination of experts | the down projections of few rows, of the chosen and of the shared expert |
//! | choice of experts, combination | a copy of logits, or of a gate, from strides |
//! | rotation, gate | a copy of heads from strides |
//! | attention in decode | the rotations of queries and keys |
//! | attention in prefill, without a window | the same, of whole heads and without a norm; not of coded keys |
//!
//! A reshape may lie between the two: the reader then sees the producer's elements in their order, under another shape.
//! So each pair compares the extents that its kernel takes from one of the two for the other.

use super::elementwise::runs_by_four;
use super::linear::{self, Biased, combination};
use crate::backend::Mode;
use crate::backend::operand::{HeadStrides, head_strides};
use crate::backend::weights::TILE_ROWS;
use keel_array::{DType, Kernel, Layout, Op, Operand, OperandMemory, Regime, Shape, WeightSpec};

/// Widest head that a product absorbs: one warp must have all tiles of a head.
const HEAD_MAX: usize = 512;

/// See `Programs::absorbs`.
pub(in crate::backend) fn absorbs(reader: &Kernel, input: usize, producer: &Kernel, mode: Mode) -> bool {
    let (seen, made) = (&reader.inputs[input].layout, &producer.outputs[0].layout.shape);
    // A producer without inputs fills an array, or receives it from another device.
    if producer.inputs.is_empty() || !whole(seen, made) {
        return false;
    }
    match (&reader.op, input) {
        // The kernels of these readers take the producer's rows, choices or heads for their own.
        (
            Op::CombineExperts { .. }
            | Op::RouteTopK { .. }
            | Op::Rope(_)
            | Op::NormRope { .. }
            | Op::PagedAttention(_),
            _,
        ) if seen.shape != *made => false,
        (Op::Linear { weight, .. }, 0) if linear::takes_few_rows(weight, reader, mode) => {
            // Gates of heads come before weights whose columns several devices may share. One device reads slices of
            // these columns and cannot absorb. To keep the bits, no device does.
            enters(weight, producer) || !mode.spans_devices() && enters_by_heads(weight, producer)
        }
        (Op::Linear { weight, .. }, 0) if linear::takes_x_in_half(weight, reader, mode) => {
            enters_as_half(weight, producer) || enters_by_heads(weight, producer)
        }
        (Op::GatherLinear { weight }, 0) if linear::takes_few_rows(weight, reader, mode) => {
            enters(weight, producer)
        }
        (Op::GatherLinear { weight }, 0) if linear::is_grouped(weight, reader, mode) => {
            let x = &producer.inputs[0];
            // Read 8 bytes at a time, which a gap-free intermediate allows.
            let aligned = x.layout.is_contiguous() && x.layout.offset.is_multiple_of(2);
            // One device may read slices of these columns, too.
            matches!(producer.op, Op::SwiGlu)
                && made.last() == Some(&weight.cols)
                && !mode.spans_devices()
                && producer.absorbed.is_empty()
                && aligned
                && matches!(x.memory, OperandMemory::Temp(_))
        }
        (Op::SwiGlu, 0) => match &producer.op {
            Op::Linear { weight, residual: false } | Op::GatherLinear { weight } => {
                linear::takes_few_rows(weight, producer, mode)
                    && weight.rows.is_multiple_of(2 * TILE_ROWS)
                    && seen.shape.last() == Some(&weight.rows)
            }
            _ => false,
        },
        (Op::Binary(_) | Op::Fused(_), _) => match &producer.op {
            Op::Linear { weight, residual: false } => {
                Biased::of(reader, input, weight).is_some()
                    && linear::blas_takes_stored_weight(weight, producer, mode)
            }
            _ => false,
        },
        (Op::CombineExperts { .. }, 0) => match &producer.op {
            Op::GatherLinear { weight } => combination::takes_down(reader, weight, producer, mode),
            _ => false,
        },
        (Op::CombineExperts { shared: true, .. }, 2) => match &producer.op {
            Op::Linear { weight, residual: false } => {
                combination::takes_shared_down(reader, weight, producer, mode)
            }
            _ => false,
        },
        (Op::RouteTopK { .. }, 0) | (Op::CombineExperts { shared: true, .. }, 3) => copies_rows(producer),
        (Op::Rope(_) | Op::NormRope { .. }, 0) | (Op::SigmoidGate, 0 | 1) => copies_heads(producer),
        // Keys are coded in groups, which the threads that rotate a prompt's heads do not see as a whole.
        (Op::PagedAttention(spec), 1)
            if spec.regime == Regime::Prefill && reader.inputs[3].dtype == DType::U8 =>
        {
            false
        }
        (Op::PagedAttention(spec), 0 | 1) => match spec.regime {
            Regime::Decode => matches!(producer.op, Op::Rope(_) | Op::NormRope { .. }),
            // With a window, rows are written and attended in several launches.
            Regime::Prefill => spec.window.is_none() && turns_whole_heads(producer),
        },
        _ => false,
    }
}

/// Whether a reader sees all elements of the value, in their order. The shape that it sees may be another one.
fn whole(seen: &Layout, made: &Shape) -> bool {
    seen.offset == 0 && seen.is_contiguous() && seen.shape.elements() == made.elements()
}

/// Whether the producer is the norm of the rows that a weight multiplies.
fn enters(weight: &WeightSpec, producer: &Kernel) -> bool {
    let x = &producer.inputs[0].layout;
    matches!(producer.op, Op::RmsNorm { .. }) && x.is_contiguous() && x.shape.last() == Some(&weight.cols)
}

/// Whether the producer is a gate, or a norm of heads with a gate, `[T, heads, D]`.
fn enters_by_heads(weight: &WeightSpec, producer: &Kernel) -> bool {
    let gate = match &producer.op {
        Op::GatedRmsNorm { .. } => 2,
        Op::SigmoidGate => 1,
        _ => return false,
    };
    // The heads are those of the source: a gate that is a copy may have been reshaped since.
    let read = producer.source(gate);
    let Some(&size) = read.layout.shape.last() else { return false };
    let fits = match gate {
        1 => size.is_multiple_of(8) && size <= HEAD_MAX,
        _ => size.is_power_of_two() && (64..=HEAD_MAX).contains(&size),
    };
    // Read 16 bytes at a time. An intermediate begins at a multiple of 16 bytes; memory from outside may not.
    let strides = head_strides(&read.layout).filter(|_| matches!(read.memory, OperandMemory::Temp(_)));
    let aligned = strides.is_some_and(|by| by.row.is_multiple_of(4) && by.head.is_multiple_of(4));
    let x = &producer.inputs[0].layout;
    let columns: usize = read.layout.shape.iter().skip(1).product();
    let plain = x.is_contiguous() && producer.producer(0).is_none() && columns == weight.cols;
    fits && aligned && plain && read.layout.offset.is_multiple_of(4)
}

/// Whether the producer may come before a product of many rows, in the kernel that rounds them to 16 bits.
fn enters_as_half(weight: &WeightSpec, producer: &Kernel) -> bool {
    let x = &producer.inputs[0];
    // Read 16 bytes at a time. An intermediate begins at a multiple of 16 bytes; memory from outside may not.
    let aligned = x.layout.row_stride(1).is_some_and(|stride| stride.is_multiple_of(4))
        && x.layout.offset.is_multiple_of(4)
        && matches!(x.memory, OperandMemory::Temp(_));
    let fits = match producer.op {
        Op::SwiGlu => aligned && producer.absorbed.is_empty(),
        Op::RmsNorm { .. } | Op::LayerNorm { .. } => aligned && weight.cols <= 4 * 1024,
        Op::Unary(_) | Op::Binary(_) | Op::Fused(_) => {
            // An operand with a row for each token is an intermediate; one that all rows share is a parameter.
            let known = |input: &Operand| {
                matches!(input.memory, OperandMemory::Temp(_)) || input.layout.row_stride(1).is_none()
            };
            producer.absorbed.is_empty() && runs_by_four(producer) && producer.inputs.iter().all(known)
        }
        _ => false,
    };
    fits && producer.outputs[0].layout.shape.last() == Some(&weight.cols)
}

/// Whether the producer rotates heads as a whole, which it can read 16 bytes at a time.
fn turns_whole_heads(producer: &Kernel) -> bool {
    let x = producer.source(0);
    let aligned = |HeadStrides { row, head }| {
        [row, head, x.layout.offset].iter().all(|distance| distance.is_multiple_of(4))
    };
    matches!(&producer.op, Op::Rope(spec) if x.layout.shape.last() == Some(&spec.rotary))
        && head_strides(&x.layout).is_some_and(aligned)
        && matches!(x.memory, OperandMemory::Temp(_))
}

fn copies_rows(producer: &Kernel) -> bool {
    let from = &producer.inputs[0].layout;
    matches!(producer.op, Op::Copy) && from.shape.rank() == 2 && from.row_stride(1).is_some()
}

fn copies_heads(producer: &Kernel) -> bool {
    matches!(producer.op, Op::Copy) && head_strides(&producer.inputs[0].layout).is_some()
}
