//! Products with packed weights. Which kernel multiplies depends on shapes alone:
//!
//! | rows | affine weight | dense bf16 weight | f32 arithmetic, other dense weights |
//! |---|---|---|---|
//! | up to [`FEW_ROWS`] | integer products, one pass over the weight | bf16 products | `exact_rows` |
//! | up to [`TILED_ROWS_MAX`] | widened on the way into the tensor cores (Hopper) | cuBLASLt | `exact_tiled` |
//! | more | widened to bf16 in scratch, then cuBLASLt | cuBLASLt | `exact_tiled` |

use super::{Bound, Call, Geometry};
use crate::backend::operand::c_type;
use crate::backend::weights::Layout;
use crate::driver::{Arguments, BLAS_WORKSPACE_BYTES, Product};
use crate::kernels::{DEQUANTIZE, EXACT_MATMUL, KernelKey, LINEAR_TILED, QUANTIZED_MATMUL, Source};
use keel_array::{ArrayError, Compute, DType, Kernel, WeightFormat, WeightSpec};

/// Rows that are multiplied in one pass over the weight, whose bits do not depend on how many they are.
const FEW_ROWS: usize = 16;

/// Rows up to which widening the weight in registers, for each 128 rows anew, is faster than widening it once in memory.
const TILED_ROWS_MAX: usize = 256;

/// Columns of a tile of a packed weight, and rows.
const TILE_COLS: usize = 64;
const TILE_ROWS: usize = 16;

/// Rows of a weight from which on tensor cores are worth the preparation of x.
const TENSOR_ROWS_MIN: usize = 64;

/// Elements of x up to which each block rounds x for itself instead of reading what another kernel has prepared.
const FUSED_MAX: usize = 1 << 15;

/// Blocks that fill a device, for products on tensor cores.
const BLOCKS_WANTED: usize = 132;

/// How a weight is multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arithmetic {
    /// f32 throughout.
    Exact,
    /// Affine codes.
    Affine,
    /// bf16 as stored.
    Half,
}

fn arithmetic(weight: &WeightSpec) -> Arithmetic {
    match weight.format {
        _ if weight.compute == Compute::F32 || weight.rows < TENSOR_ROWS_MIN => Arithmetic::Exact,
        WeightFormat::Affine { .. } => Arithmetic::Affine,
        // Lanes of the tensor cores' kernels take eight columns at a time.
        WeightFormat::Dense(DType::BF16) if weight.cols.is_multiple_of(8) => Arithmetic::Half,
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
pub(super) fn weight_key(source: Source, entry: &'static str, weight: &WeightSpec) -> KernelKey {
    let key = KernelKey::new(source, entry).define("DIM_N", weight.rows).define("DIM_K", weight.cols);
    match weight.format {
        WeightFormat::Dense(dtype) => key.define("WEIGHT_T", c_type(dtype)),
        WeightFormat::Affine { bits, group_size, scale_dtype } => {
            key.define("BITS", bits).define("GROUP", group_size).define("PAIR_T", c_type(scale_dtype))
        }
        WeightFormat::Blocks(format) => unreachable!("no weight in {format} blocks was packed"),
    }
}

/// The pointers of a packed weight: codes and pairs, or dense rows.
pub(super) fn packed(arguments: Arguments, weight: &WeightSpec, operand: &Bound<'_>) -> Arguments {
    match weight.format {
        WeightFormat::Dense(_) => arguments.pointer(operand.address),
        _ => arguments.pointer(operand.address).pointer(operand.address + Layout::of(weight).pairs as u64),
    }
}

/// `y = x W^T`, onto a residual if there is one.
pub(super) fn linear(
    weight: &WeightSpec,
    residual: Option<&Bound<'_>>,
    call: &Call<'_>,
) -> Result<(), ArrayError> {
    let rows = call.inputs[0].len() / weight.cols;
    match arithmetic(weight) {
        Arithmetic::Exact if rows <= FEW_ROWS => exact_rows(weight, residual, rows, call),
        Arithmetic::Exact => exact_tiled(weight, residual, rows, call),
        _ if rows <= FEW_ROWS => few_rows(weight, residual, rows, call),
        Arithmetic::Affine if rows <= TILED_ROWS_MAX && call.gpu.has_wgmma() => {
            tiled(weight, residual, rows, call)
        }
        _ => through_blas(weight, residual, rows, call),
    }
}

fn address(operand: Option<&Bound<'_>>) -> u64 {
    operand.map_or(0, |operand| operand.address)
}

/// Warps that share the columns of a row tile, in units of so many column tiles. A function of the weight's shape alone,
/// since it orders the sums: about eight, as many as have equal shares, and more where few row tiles meet long columns.
fn split(weight: &WeightSpec, tiles_at_once: usize) -> usize {
    let units = col_tiles(weight).div_ceil(tiles_at_once);
    let long = weight.cols > 8192 && weight.rows < 5000;
    let best = if long { 12..=18 } else { 5..=10 };
    // The largest number of warps that divides the units leaves none idle.
    best.rev().find(|warps| units.is_multiple_of(*warps)).unwrap_or(8).min(units)
}

fn exact_rows(
    weight: &WeightSpec,
    residual: Option<&Bound<'_>>,
    rows: usize,
    call: &Call<'_>,
) -> Result<(), ArrayError> {
    let split = split(weight, 1);
    let key = weight_key(EXACT_MATMUL, "exact_rows", weight).define("DIM_T", rows).define("SPLIT", split);
    let arguments = packed(Arguments::default(), weight, &call.inputs[1])
        .pointer(call.inputs[0].address)
        .pointer(address(residual))
        .pointer(call.outputs[0].address);
    call.launch(&key, Geometry::rows(row_tiles(weight), 32 * split), arguments)
}

fn exact_tiled(
    weight: &WeightSpec,
    residual: Option<&Bound<'_>>,
    rows: usize,
    call: &Call<'_>,
) -> Result<(), ArrayError> {
    let arguments = packed(Arguments::default(), weight, &call.inputs[1])
        .pointer(call.inputs[0].address)
        .pointer(address(residual))
        .pointer(call.outputs[0].address)
        .u32(rows);
    let grid = (weight.rows.div_ceil(128), rows.div_ceil(64), 1);
    let geometry = Geometry { grid, block: (256, 1, 1), shared_bytes: 53_248 };
    call.launch(&weight_key(EXACT_MATMUL, "exact_tiled", weight), geometry, arguments)
}

/// The kernel for few rows, and what it takes.
struct FewRows {
    key: KernelKey,
    split: usize,
    passes: usize,
    fused: bool,
    prepared_bytes: usize,
    shared_bytes: usize,
}

/// `gather` is the rows of y for each row of x where experts are chosen, 0 where there is one weight.
fn few_rows_kernel(weight: &WeightSpec, rows: usize, gather: usize) -> FewRows {
    let dense = matches!(weight.format, WeightFormat::Dense(_));
    let (group, bits) = match weight.format {
        WeightFormat::Affine { group_size, bits, .. } => (usize::from(group_size), bits),
        _ => (0, 0),
    };
    // Tiles that a warp loads at once: the kernel's own choice.
    let long = weight.cols > 8192 && weight.rows < 5000;
    let unit = if dense || bits == 8 || long { 2 } else { 4 };
    let split = split(weight, unit);
    let fused = gather > 0 || rows * weight.cols <= FUSED_MAX;
    let (row_bytes, parts) = if dense { (256, 0) } else { (64, if group == 32 { 2 } else { 1 }) };
    let prepared_bytes = col_tiles(weight) * rows * (row_bytes + 8 * parts);
    // Several row tiles for a block, one after the other, where there are many: its start is paid once.
    let passes = if gather == 0 { (row_tiles(weight) / (8 * BLOCKS_WANTED)).clamp(1, 4) } else { 1 };
    let partial_bytes = split * rows * 17 * size_of::<f32>() * if passes > 1 { 2 } else { 1 };
    let key = weight_key(QUANTIZED_MATMUL, "linear_rows", weight)
        .define("DENSE", u8::from(dense))
        .define("DIM_T", rows)
        .define("SPLIT", split)
        .define("UNIT", unit)
        .define("PASSES", passes)
        .define("FUSED", u8::from(fused))
        .define("GATHER", gather);
    let shared_bytes = partial_bytes + if fused { prepared_bytes } else { 0 };
    FewRows { key, split, passes, fused, prepared_bytes, shared_bytes }
}

fn few_rows(
    weight: &WeightSpec,
    residual: Option<&Bound<'_>>,
    rows: usize,
    call: &Call<'_>,
) -> Result<(), ArrayError> {
    let kernel = few_rows_kernel(weight, rows, 0);
    let mut x = call.inputs[0].address;
    if !kernel.fused {
        let tiles = 4 * col_tiles(weight);
        let block = if col_tiles(weight) >= 256 { 1024 } else { tiles.next_multiple_of(32) };
        let key = KernelKey { entry: "prepare_rows", ..kernel.key.clone() };
        call.launch(
            &key,
            Geometry::rows(rows, block),
            Arguments::default().pointer(x).pointer(call.scratch),
        )?;
        x = call.scratch;
    }
    let arguments = packed(Arguments::default(), weight, &call.inputs[1])
        .pointer(x)
        .pointer(address(residual))
        .pointer(call.outputs[0].address);
    let geometry = Geometry {
        grid: (row_tiles(weight).div_ceil(kernel.passes), 1, 1),
        block: (32 * kernel.split, 1, 1),
        shared_bytes: kernel.shared_bytes,
    };
    call.launch(&kernel.key, geometry, arguments)
}

/// Rows of x that a block of `linear_tiled` takes.
fn tile_of(rows: usize) -> usize {
    match rows {
        0..=32 => 32,
        33..=64 => 64,
        _ => 128,
    }
}

/// Parts of K that blocks share where there are too few to fill the device.
fn parts(weight: &WeightSpec, rows: usize) -> usize {
    if !(rows * weight.rows).is_multiple_of(4) {
        return 1;
    }
    let blocks = rows.div_ceil(tile_of(rows)) * row_tiles(weight).div_ceil(8);
    (BLOCKS_WANTED / blocks).clamp(1, 8).min(col_tiles(weight).div_ceil(8))
}

/// The key of an entry of `linear_tiled.cu`, whose constants all entries share.
fn tiled_key(entry: &'static str, weight: &WeightSpec, rows: usize, parts: usize) -> KernelKey {
    weight_key(LINEAR_TILED, entry, weight).define("BT", tile_of(rows)).define("SPLITS", parts)
}

/// Dynamic shared memory of `linear_tiled`: rings of fetches of two column tiles, one of x for the block, one of W for each
/// warp, and the barriers of the latter.
fn tiled_shared_bytes(weight: &WeightSpec, tile: usize) -> usize {
    let WeightFormat::Affine { bits, group_size, scale_dtype } = weight.format else {
        unreachable!("tiles of affine weights")
    };
    let pair_bytes = 32 * if group_size == 32 { 2 } else { 1 } * scale_dtype.size();
    let shared_groups = if group_size == 128 { 1 } else { 2 };
    let slot = 2 * 128 * usize::from(bits) + shared_groups * pair_bytes;
    let (x_stages, w_stages) = (if tile == 128 { 2 } else { 4 }, if tile == 32 { 8 } else { 4 });
    1024 + x_stages * 2 * tile * 128 + 8 * w_stages * (slot + 8)
}

/// Bytes of rows of x as bf16, in whole tiles of columns.
fn half_rows_bytes(weight: &WeightSpec, rows: usize) -> usize {
    rows * col_tiles(weight) * TILE_COLS * size_of::<u16>()
}

fn to_half_tiles(
    key: &KernelKey,
    weight: &WeightSpec,
    rows: usize,
    call: &Call<'_>,
) -> Result<(), ArrayError> {
    let key = KernelKey { entry: "to_bf16_tiles", ..key.clone() };
    let arguments = Arguments::default().pointer(call.inputs[0].address).pointer(call.scratch).u32(rows);
    let blocks = (rows * col_tiles(weight) * 8).div_ceil(256);
    call.launch(&key, Geometry::rows(blocks, 256), arguments)
}

fn tiled(
    weight: &WeightSpec,
    residual: Option<&Bound<'_>>,
    rows: usize,
    call: &Call<'_>,
) -> Result<(), ArrayError> {
    let parts = parts(weight, rows);
    let key = tiled_key("linear_tiled", weight, rows, parts);
    to_half_tiles(&key, weight, rows, call)?;
    let sums = call.scratch + half_rows_bytes(weight, rows).next_multiple_of(256) as u64;
    let arguments = packed(Arguments::default(), weight, &call.inputs[1]).pointer(call.scratch).u32(rows);
    let (arguments, target) = match parts {
        1 => (arguments.pointer(address(residual)), call.outputs[0].address),
        _ => (arguments, sums),
    };
    let tile = tile_of(rows);
    let geometry = Geometry {
        grid: (rows.div_ceil(tile), row_tiles(weight).div_ceil(8), parts),
        block: (256, 1, 1),
        shared_bytes: tiled_shared_bytes(weight, tile),
    };
    call.launch(&key, geometry, arguments.pointer(target))?;
    if parts == 1 {
        return Ok(());
    }
    let elements = rows * weight.rows;
    let arguments = Arguments::default()
        .pointer(sums)
        .pointer(address(residual))
        .pointer(call.outputs[0].address)
        .u32(elements);
    call.launch(
        &KernelKey { entry: "add_parts", ..key },
        Geometry::rows(elements.div_ceil(1024), 256),
        arguments,
    )
}

/// Bytes that the library's scratch is aligned to; the arena promises less.
const BLAS_ALIGN: usize = 256;

/// Where the scratch of a product through cuBLASLt lies, from a multiple of [`BLAS_ALIGN`] on: the library's own, x as
/// bf16, W as bf16. `end` includes what the alignment may take.
struct BlasScratch {
    x: usize,
    w: usize,
    end: usize,
}

fn blas_scratch(weight: &WeightSpec, rows: usize) -> BlasScratch {
    let x = BLAS_WORKSPACE_BYTES;
    let w = x + (rows * weight.cols * size_of::<u16>()).next_multiple_of(BLAS_ALIGN);
    let widened = matches!(weight.format, WeightFormat::Affine { .. });
    let end = w + if widened { weight.rows * weight.cols * size_of::<u16>() } else { 0 };
    BlasScratch { x, w, end: end + BLAS_ALIGN }
}

fn through_blas(
    weight: &WeightSpec,
    residual: Option<&Bound<'_>>,
    rows: usize,
    call: &Call<'_>,
) -> Result<(), ArrayError> {
    let scratch = blas_scratch(weight, rows);
    let own = call.scratch.next_multiple_of(BLAS_ALIGN as u64);
    let (x, mut w) = (own + scratch.x as u64, call.inputs[1].address);
    // Two columns at a time: with an odd number of columns there is no pair to end a row, nor does it matter.
    let pairs = (rows * weight.cols).div_ceil(2);
    let arguments = Arguments::default().pointer(call.inputs[0].address).pointer(x).u64(pairs);
    let key = KernelKey::new(DEQUANTIZE, "to_bf16").define("DIM_N", weight.rows).define("DIM_K", weight.cols);
    call.launch(&key, Geometry::rows(pairs.div_ceil(1024), 256), arguments)?;
    if let WeightFormat::Affine { .. } = weight.format {
        w = own + scratch.w as u64;
        let tiles = row_tiles(weight) * col_tiles(weight);
        let arguments = packed(Arguments::default(), weight, &call.inputs[1]).pointer(w).u32(1);
        call.launch(
            &weight_key(DEQUANTIZE, "dequantize", weight),
            Geometry::rows(tiles.div_ceil(8), 256),
            arguments,
        )?;
    }
    let y = &call.outputs[0];
    if let Some(residual) = residual {
        call.bring(residual, y)?;
    }
    let product = Product { rows, cols: weight.rows, inner: weight.cols, accumulate: residual.is_some() };
    // What the library refuses, our own kernel multiplies, more slowly.
    match call.multiply(product, (x, w, y.address), own) {
        Ok(()) => Ok(()),
        Err(error) => {
            tracing::debug!("{error}; multiplied without cuBLASLt");
            exact_tiled(weight, residual, rows, call)
        }
    }
}

/// `y[t, j] = x[t or t, j] W[e[t, j]]^T`.
pub(super) fn gather(weight: &WeightSpec, call: &Call<'_>) -> Result<(), ArrayError> {
    let experts = &call.inputs[2];
    let fanout = experts.len() / (call.inputs[0].len() / weight.cols);
    match arithmetic(weight) {
        Arithmetic::Affine if takes_groups(weight, experts.len()) && call.gpu.has_wgmma() => {
            grouped(weight, fanout, call)
        }
        Arithmetic::Exact => {
            let split = split(weight, 1);
            let key = weight_key(EXACT_MATMUL, "exact_rows", weight)
                .define("DIM_T", 1)
                .define("SPLIT", split)
                .define("GATHER", fanout);
            gather_rows(&key, split, 0, weight, call)
        }
        _ => {
            let kernel = few_rows_kernel(weight, 1, fanout);
            gather_rows(&kernel.key, kernel.split, kernel.shared_bytes, weight, call)
        }
    }
}

fn gather_rows(
    key: &KernelKey,
    split: usize,
    shared_bytes: usize,
    weight: &WeightSpec,
    call: &Call<'_>,
) -> Result<(), ArrayError> {
    let arguments = packed(Arguments::default(), weight, &call.inputs[1])
        .pointer(call.inputs[0].address)
        .pointer(call.inputs[2].address)
        .u32(weight.experts)
        .pointer(call.fault)
        .u32(call.index)
        .pointer(0)
        .pointer(call.outputs[0].address);
    let grid = (row_tiles(weight), call.inputs[2].len(), 1);
    call.launch(key, Geometry { grid, block: (32 * split, 1, 1), shared_bytes }, arguments)
}

/// Whether rows are sorted by expert and multiplied together: with many rows, and no more experts than the sort takes.
fn takes_groups(weight: &WeightSpec, rows: usize) -> bool {
    rows > 8 * FEW_ROWS && weight.experts <= 256
}

/// Tiles of rows that the sort may find at most.
fn tiles_max(weight: &WeightSpec, rows: usize) -> usize {
    rows.min(rows.div_ceil(tile_of(rows.div_ceil(weight.experts))) + weight.experts)
}

/// Where the scratch of grouped rows lies: x as bf16, the rows by expert, the tiles.
fn grouped_scratch(weight: &WeightSpec, inputs: usize, rows: usize) -> [usize; 3] {
    let row_of = half_rows_bytes(weight, inputs).next_multiple_of(256);
    let tiles = row_of + (rows * size_of::<u32>()).next_multiple_of(256);
    [row_of, tiles, tiles + 16 * (1 + tiles_max(weight, rows))]
}

fn grouped(weight: &WeightSpec, fanout: usize, call: &Call<'_>) -> Result<(), ArrayError> {
    let rows = call.inputs[2].len();
    let [row_of, tiles, _] = grouped_scratch(weight, rows / fanout, rows).map(|at| call.scratch + at as u64);
    // A tile holds rows of one expert; about so many there are.
    let per_expert = rows.div_ceil(weight.experts);
    let key = tiled_key("linear_tiled", weight, per_expert, 1)
        .define("GROUPED", 1)
        .define("FANOUT", fanout)
        .define("EXPERTS", weight.experts);
    to_half_tiles(&key, weight, rows / fanout, call)?;
    let arguments = Arguments::default()
        .pointer(call.inputs[2].address)
        .u32(rows)
        .pointer(row_of)
        .pointer(tiles)
        .pointer(call.fault)
        .u32(call.index);
    call.launch(&KernelKey { entry: "group_rows", ..key.clone() }, Geometry::rows(1, 1024), arguments)?;
    let arguments = packed(Arguments::default(), weight, &call.inputs[1])
        .pointer(call.scratch)
        .pointer(row_of)
        .pointer(tiles)
        .pointer(call.outputs[0].address);
    let geometry = Geometry {
        grid: (tiles_max(weight, rows), row_tiles(weight).div_ceil(8), 1),
        block: (256, 1, 1),
        shared_bytes: tiled_shared_bytes(weight, tile_of(per_expert)),
    };
    call.launch(&key, geometry, arguments)
}

/// Rows of a weight as f32.
pub(super) fn embedding(weight: &WeightSpec, call: &Call<'_>) -> Result<(), ArrayError> {
    let ids = &call.inputs[0];
    let key = weight_key(DEQUANTIZE, "embedding_rows", weight).define("INDEX", c_type(ids.dtype));
    let arguments = packed(Arguments::default(), weight, &call.inputs[1])
        .pointer(ids.address)
        .pointer(call.outputs[0].address)
        .pointer(call.fault)
        .u32(call.index);
    call.launch(&key, Geometry::rows(ids.len(), 128), arguments)
}

/// Scratch of `Linear`. The same on every device, so that a plan needs none: the largest that any takes.
pub(super) fn linear_workspace_bytes(weight: &WeightSpec, kernel: &Kernel) -> usize {
    let rows = kernel.inputs[0].layout.shape.elements() / weight.cols;
    match arithmetic(weight) {
        Arithmetic::Exact => 0,
        _ if rows <= FEW_ROWS => {
            let kernel = few_rows_kernel(weight, rows, 0);
            if kernel.fused { 0 } else { kernel.prepared_bytes }
        }
        arithmetic => {
            let blas = blas_scratch(weight, rows).end;
            if arithmetic != Arithmetic::Affine || rows > TILED_ROWS_MAX {
                return blas;
            }
            let parts = parts(weight, rows);
            let sums = if parts == 1 { 0 } else { parts * rows * weight.rows * size_of::<f32>() };
            blas.max(half_rows_bytes(weight, rows).next_multiple_of(256) + sums)
        }
    }
}

/// Scratch of `GatherLinear`.
pub(super) fn gather_workspace_bytes(weight: &WeightSpec, kernel: &Kernel) -> usize {
    let elements = |i: usize| kernel.inputs[i].layout.shape.elements();
    let rows = elements(2);
    match arithmetic(weight) {
        Arithmetic::Affine if takes_groups(weight, rows) => {
            grouped_scratch(weight, elements(0) / weight.cols, rows)[2]
        }
        _ => 0,
    }
}
