//! Products whose weight is widened on its way into Hopper's tensor cores.

use super::super::{Bound, Call, Geometry};
use super::half::absorbed_to_half;
use super::{BLOCKS_WANTED, TILE_COLS, address, codes_and_pairs, col_tiles, row_tiles, weight_key};
use crate::backend::weights::Coding;
use crate::driver::Arguments;
use crate::kernels::{KernelKey, LINEAR_TILED};
use crate::parameters::LinearTiled;
use keel_array::{ArrayError, WeightSpec};

/// Rows of x of a block of `linear_tiled`.
pub(super) fn tile_of(rows: usize) -> usize {
    match rows {
        0..=32 => 32,
        33..=64 => 64,
        _ => 128,
    }
}

/// Parts of K that blocks share if there are too few blocks to fill the device.
pub(super) fn parts(weight: &WeightSpec, rows: usize) -> usize {
    if !(rows * weight.rows).is_multiple_of(4) {
        return 1;
    }
    let blocks = rows.div_ceil(tile_of(rows)) * row_tiles(weight).div_ceil(8);
    // With more than 32 rows a multiprocessor has room for two blocks.
    let wanted = if tile_of(rows) == 32 { BLOCKS_WANTED } else { 2 * BLOCKS_WANTED };
    (wanted / blocks).clamp(1, 8).min(col_tiles(weight).div_ceil(8))
}

/// The key of an entry of `linear_tiled.cu`, whose constants all entries share.
pub(super) fn tiled_key(entry: &'static str, weight: &WeightSpec, rows: usize, parts: usize) -> KernelKey {
    weight_key(LINEAR_TILED, entry, weight)
        .define("BT", tile_of(rows))
        .define("SPLITS", parts)
        .define("STAGES", stages(tile_of(rows)))
}

/// Stages of the rings of x and of W. Two blocks fit a multiprocessor.
fn stages(tile: usize) -> usize {
    match tile {
        32 => 6,
        64 => 3,
        _ => 2,
    }
}

/// Dynamic shared memory of `linear_tiled`: rings of fetches of two column tiles each, one ring of x for the block and
/// one of W for each warp.
pub(super) fn tiled_shared_bytes(weight: &WeightSpec, tile: usize) -> usize {
    let Some(coding) = Coding::of(weight.format) else { unreachable!("tiles of quantised weights") };
    1024 + stages(tile) * (2 * tile * 128 + 8 * coding.copy_bytes(2))
}

/// Bytes of rows of x as f16, in whole tiles of columns.
pub(super) fn half_rows_bytes(weight: &WeightSpec, rows: usize) -> usize {
    rows * col_tiles(weight) * TILE_COLS * size_of::<u16>()
}

/// Writes x as f16 to the scratch. The first `first` blocks of the launch have other work, for which `more` adds
/// arguments.
pub(super) fn to_half_tiles(
    key: &KernelKey,
    weight: &WeightSpec,
    rows: usize,
    (first, more): (usize, &dyn Fn(Arguments) -> Arguments),
    call: &Call<'_>,
) -> Result<(), ArrayError> {
    let mut key = KernelKey { entry: "to_half_tiles", ..key.clone() };
    let mut x = call.inputs[0].address;
    if let Some(swiglu) = call.maker(0) {
        key = key.define("SWIGLU", 1);
        x = swiglu.inputs[0].address;
    }
    let arguments = Arguments::default().pointer(x).pointer(call.scratch).u32(rows);
    let blocks = first + (rows * col_tiles(weight) * 8).div_ceil(256);
    call.launch(&key, Geometry::rows(blocks, 256), more(arguments))
}

/// The product with K in `parts` parts.
pub(super) fn tiled(
    weight: &WeightSpec,
    residual: Option<&Bound<'_>>,
    (rows, parts): (usize, usize),
    call: &Call<'_>,
) -> Result<(), ArrayError> {
    let key = tiled_key("linear_tiled", weight, rows, parts);
    match call.maker(0) {
        Some(maker) => absorbed_to_half(maker, weight, rows, (call.scratch, ("HALF_TILES", 1)), call)?,
        None => to_half_tiles(&key, weight, rows, (0, &|arguments| arguments), call)?,
    }
    let sums = call.scratch + half_rows_bytes(weight, rows).next_multiple_of(256) as u64;
    let [codes, pairs] = codes_and_pairs(weight, &call.inputs[1]);
    let is_whole = parts == 1;
    let parameters = LinearTiled {
        codes,
        pairs,
        x: call.scratch,
        row_of: None,
        tiles: None,
        rows: Some(rows),
        residual: is_whole.then(|| address(residual)),
        y: if is_whole { call.outputs[0].address } else { sums },
    };
    let tile = tile_of(rows);
    let geometry = Geometry {
        grid: (rows.div_ceil(tile), row_tiles(weight).div_ceil(8), parts),
        block: (256, 1, 1),
        shared_bytes: tiled_shared_bytes(weight, tile),
    };
    call.launch_described(&key, geometry, &parameters)?;
    if is_whole {
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
