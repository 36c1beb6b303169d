//! Products with packed weights. Which kernel multiplies depends on shapes alone, see `selection.rs`; in the fast mode:
//!
//! | rows | quantised weight | dense bf16 weight | dense f16 weight | f32 arithmetic, other dense weights |
//! |---|---|---|---|---|
//! | up to [`FEW_ROWS`] | integer products, one pass over the weight | bf16 products | `exact_rows` | `exact_rows` |
//! | up to 1,024 | widened to f16 on the way into the tensor cores | cuBLASLt | cuBLASLt | `exact_tiled` |
//! | more | widened to f16 in scratch, then cuBLASLt | cuBLASLt | cuBLASLt | `exact_tiled` |
//!
//! With `Compute::Bf16` x keeps more bits. Few rows meet a quantised weight in f16, as many rows do. A dense bf16
//! weight meets x as the sum of two bf16, for any number of rows. Many rows of x meet a dense f16 weight in f16, few in
//! f32.
//!
//! With `Compute::PrefillFp8` more than 256 rows take the third line, which rounds x and a quantised weight to 8-bit
//! floats instead, on devices that multiply them. With `Compute::Fp8` more than 128 rows do, and the weight has been
//! rounded when it was loaded.
//!
//! In the deterministic mode:
//! - Rows of decode take the first line whatever their number, [`FEW_ROWS`] at a time.
//! - Other rows take the second line with all of K in one block, and `linear_half` where that line has cuBLASLt.
//!
//! A row's bits then follow from its own values, because the weight's shape orders the sums. If several devices may
//! hold rows of a weight, its columns alone order them. One property of the hardware is assumed: an element of a tensor
//! core's product depends on its row and column alone, not on their place in a tile.

mod biased;
mod blas;
pub(super) mod combination;
mod exact;
mod few_rows;
mod fp8;
mod gather;
mod grouped;
mod half;
mod half_operands;
pub(super) mod mixture;
mod panels;
mod selection;
mod tuning;

use super::{Bound, Call, Geometry};
use crate::backend::Mode;
use crate::backend::operand::c_type;
use crate::backend::weights::{Layout, TILE_COLS, TILE_ROWS};
use crate::kernels::{DEQUANTIZE, KernelKey, Source};
use crate::parameters::EmbeddingRows;
pub(super) use biased::{Biased, biased_linear};
use blas::{blas_scratch, through_blas};
use exact::{exact_rows, exact_tiled};
pub(super) use few_rows::Convolution;
pub(super) use few_rows::gathers;
use few_rows::{FewRows, few_rows_bytes};
pub(in crate::backend) use fp8::{narrows, rounds_weight};
pub(super) use gather::gather;
use gather::grouped_scratch;
use half::{half_bytes, linear_half};
use keel_array::{ArrayError, Compute, DType, Kernel, Op, WeightFormat, WeightSpec};
use panels::{in_panels, panels_bytes};
use selection::{LinearKernel, SelectBy, linear_kernel, takes_groups};
pub(super) use selection::{blas_takes_stored_weight, is_grouped, takes_x_in_half};

/// Rows that are multiplied in one pass over the weight. A row's bits do not depend on their number.
const FEW_ROWS: usize = 16;

/// Rows of a weight from which on tensor cores are worth the preparation of x.
const TENSOR_ROWS_MIN: usize = 64;

/// How a weight is multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arithmetic {
    /// f32 throughout.
    Exact,
    /// Integer codes, affine or in blocks.
    Codes,
    /// The same, but x has 16 bits even for few rows.
    WidenedCodes,
    /// bf16 as stored.
    Half,
    /// f16 as stored for many rows, f32 for few.
    ManyHalf,
}

fn arithmetic(weight: &WeightSpec, by: SelectBy) -> Arithmetic {
    // Few rows may be a share of many. A single row is not shared.
    let is_narrow = weight.rows < if by.spans_devices() { 2 } else { TENSOR_ROWS_MIN };
    match weight.format {
        _ if weight.compute == Compute::F32 || is_narrow => Arithmetic::Exact,
        WeightFormat::Affine { .. } | WeightFormat::Blocks(_) => match weight.compute {
            Compute::Bf16 => Arithmetic::WidenedCodes,
            _ => Arithmetic::Codes,
        },
        // Lanes of the tensor-core kernels take eight columns at a time.
        WeightFormat::Dense(DType::BF16) if weight.cols.is_multiple_of(8) => Arithmetic::Half,
        WeightFormat::Dense(DType::F16) if weight.cols.is_multiple_of(8) => Arithmetic::ManyHalf,
        _ => Arithmetic::Exact,
    }
}

fn col_tiles(weight: &WeightSpec) -> usize {
    weight.cols.div_ceil(TILE_COLS)
}

fn row_tiles(weight: &WeightSpec) -> usize {
    weight.rows.div_ceil(TILE_ROWS)
}

/// A kernel for a packed weight, with the weight's shape and coding as constants.
fn weight_key(source: Source, entry: &'static str, weight: &WeightSpec) -> KernelKey {
    let key = KernelKey::new(source, entry).define("DIM_N", weight.rows).define("DIM_K", weight.cols);
    match weight.format {
        WeightFormat::Dense(dtype) => key.define("WEIGHT_T", c_type(dtype)),
        WeightFormat::Affine { bits, group_size, scale_dtype } => {
            key.define("BITS", bits).define("GROUP", group_size).define("PAIR_T", c_type(scale_dtype))
        }
        WeightFormat::Blocks(format) => key.define("BLOCK", format),
    }
}

/// The addresses of a quantised weight: codes and pairs.
fn codes_and_pairs(weight: &WeightSpec, operand: &Bound<'_>) -> [u64; 2] {
    [operand.address, operand.address + Layout::of(weight).pairs as u64]
}

/// The address of a weight's pairs, unless it is dense.
fn pairs(weight: &WeightSpec, operand: &Bound<'_>) -> Option<u64> {
    let is_dense = matches!(weight.format, WeightFormat::Dense(_));
    (!is_dense).then(|| codes_and_pairs(weight, operand)[1])
}

/// `y = x W^T`, plus a residual if there is one.
pub(super) fn linear(
    weight: &WeightSpec,
    residual: Option<&Bound<'_>>,
    call: &Call<'_>,
) -> Result<(), ArrayError> {
    let rows = call.inputs[0].len() / weight.cols;
    match linear_kernel(weight, rows, call.select_by()) {
        LinearKernel::ExactRows => exact_rows(weight, residual, rows, call),
        LinearKernel::ExactTiled => exact_tiled(weight, residual, rows, call),
        LinearKernel::FewRows => FewRows::of(weight, call).run(residual, call),
        LinearKernel::Panels { parts } => in_panels(weight, residual, rows, parts, call),
        LinearKernel::Half => linear_half(weight, residual, rows, call),
        LinearKernel::Blas => through_blas(weight, residual, rows, call),
    }
}

impl Call<'_> {
    /// The quantity that selects the kernels of a product.
    fn select_by(&self) -> SelectBy {
        SelectBy::of(self.kernel, self.mode)
    }
}

fn address(operand: Option<&Bound<'_>>) -> u64 {
    operand.map_or(0, |operand| operand.address)
}

/// Address of a row of f32, rows `stride` elements apart; 0 if there is no operand.
fn at_row(address: u64, row: usize, stride: usize) -> u64 {
    if address == 0 { 0 } else { address + (row * stride * size_of::<f32>()) as u64 }
}

/// Whether a product runs as one of few rows, which absorbs the kernels before it.
pub(super) fn takes_few_rows(weight: &WeightSpec, kernel: &Kernel, mode: Mode) -> bool {
    let (elements, by) = (|i: usize| kernel.inputs[i].layout.shape.elements(), SelectBy::of(kernel, mode));
    matches!(arithmetic(weight, by), Arithmetic::Codes | Arithmetic::Half)
        && match kernel.op {
            Op::GatherLinear { .. } => !takes_groups(weight, elements(2), by),
            _ => linear_kernel(weight, elements(0) / weight.cols, by) == LinearKernel::FewRows,
        }
}

/// A product of one row, followed by a convolution of some of its columns, in one kernel.
pub(super) fn convolved_linear<'a>(call: &Call<'a>, convolution: Convolution<'a>) -> Result<(), ArrayError> {
    match &call.kernel.op {
        Op::Linear { weight, .. } => FewRows::of(weight, &call.bound).convolved(convolution).run(None, call),
        op => unreachable!("{} is no product", op.name()),
    }
}

/// SwiGLU after a product of few rows, in one kernel.
pub(super) fn gated_linear(call: &Call<'_>) -> Result<(), ArrayError> {
    let Some(product) = call.producer(0) else { unreachable!("the product was absorbed") };
    match &product.kernel.op {
        Op::Linear { weight, .. } | Op::GatherLinear { weight } => {
            FewRows::of(weight, product).gated().run(None, call)
        }
        op => unreachable!("{} is no product", op.name()),
    }
}

/// Warps that share the columns of a row tile in f32, in units of a column tile. This number orders the sums, so it
/// depends on the weight's shape alone, and on its columns alone if several devices may hold its rows: about eight with
/// equal shares, more if few row tiles meet long columns.
fn exact_split(weight: &WeightSpec, by: SelectBy) -> usize {
    let units = col_tiles(weight);
    let long = weight.cols > 8192 && weight.rows < 5000 && !by.spans_devices();
    let best = if long { 12..=18 } else { 5..=10 };
    // The largest number of warps that divides the units leaves none idle.
    best.rev().find(|warps| units.is_multiple_of(*warps)).unwrap_or(8).min(units)
}

/// Rows of a weight as f32.
pub(super) fn embedding(weight: &WeightSpec, call: &Call<'_>) -> Result<(), ArrayError> {
    let ids = &call.inputs[0];
    let key = weight_key(DEQUANTIZE, "embedding_rows", weight).define("INDEX", c_type(ids.dtype));
    let parameters = EmbeddingRows {
        weight: call.inputs[1].address,
        pairs: pairs(weight, &call.inputs[1]),
        ids: ids.address,
        y: call.outputs[0].address,
        fault: call.fault,
        kernel: call.index,
    };
    call.launch(&key, Geometry::rows(ids.len(), 128), &parameters)
}

/// Scratch of `Linear`. It is the same on every device, so a plan needs no device.
pub(super) fn linear_workspace_bytes(weight: &WeightSpec, kernel: &Kernel, mode: Mode) -> usize {
    let rows = kernel.inputs[0].layout.shape.elements() / weight.cols;
    match linear_kernel(weight, rows, SelectBy::of(kernel, mode)) {
        LinearKernel::ExactRows | LinearKernel::ExactTiled => 0,
        LinearKernel::FewRows => few_rows_bytes(weight, rows.min(FEW_ROWS)),
        LinearKernel::Panels { parts } => {
            let sums = if parts == 1 { 0 } else { parts * rows * weight.rows * size_of::<f32>() };
            panels_bytes(weight, rows, parts).next_multiple_of(256) + sums
        }
        LinearKernel::Half => half_bytes(weight, rows),
        LinearKernel::Blas => blas_scratch(weight, rows).end,
    }
}

/// Scratch of `GatherLinear`.
pub(super) fn gather_workspace_bytes(weight: &WeightSpec, kernel: &Kernel, mode: Mode) -> usize {
    let elements = |i: usize| kernel.inputs[i].layout.shape.elements();
    let rows = elements(2);
    match is_grouped(weight, kernel, mode) {
        true => grouped_scratch(weight, elements(0) / weight.cols, rows).end,
        false => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agreement::assert_values;
    use crate::backend::weights::Coding;
    use keel_array::BlockFormat;

    #[test]
    fn the_sources_have_the_same_tiles() {
        let affine = |(bits, group_size, scale_dtype)| WeightFormat::Affine { bits, group_size, scale_dtype };
        let affine = [(2, 128, DType::F16), (3, 32, DType::BF16), (6, 64, DType::F32)].map(affine);
        for format in affine.into_iter().chain(BlockFormat::ALL.map(WeightFormat::Blocks)) {
            let weight = WeightSpec { experts: 1, rows: 90, cols: 1280, format, compute: Compute::Auto };
            let Some(coding) = Coding::of(format) else { unreachable!("no dense weights") };
            let header = "#include \"weight_tiles.cuh\"\n".into();
            let key = KernelKey { source: header, ..weight_key(DEQUANTIZE, "dequantize", &weight) };
            let tiles = [("K_TILES", col_tiles(&weight)), ("N_TILES", row_tiles(&weight))];
            let sizes = [
                ("4 * TILE_WORDS", coding.code_bytes()),
                ("PAIR_ROW", coding.pair_bytes(col_tiles(&weight))),
                ("PARTS", coding.parts()),
                ("SHARE", coding.share()),
                ("COPY_BYTES(3)", coding.copy_bytes(3)),
            ];
            assert_values(key, &[&tiles[..], &sizes].concat());
        }
    }
}
