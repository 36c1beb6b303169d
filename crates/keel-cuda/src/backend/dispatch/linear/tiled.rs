//! Rows of a mixture grouped by expert, whose weights are widened on their way into Hopper's tensor cores.

use super::super::{Call, Geometry};
use super::panels::panel_of;
use super::{TILE_COLS, col_tiles, weight_key};
use crate::backend::weights::Coding;
use crate::kernels::{KernelKey, LINEAR_TILED};
use crate::parameters::{GroupRows, ToHalfTiles};
use keel_array::{ArrayError, WeightSpec};

/// The key of an entry of `linear_tiled.cu`, whose constants all entries share. `rows` is the number of rows of an
/// expert.
pub(super) fn tiled_key(entry: &'static str, weight: &WeightSpec, rows: usize) -> KernelKey {
    let tile = panel_of(rows);
    weight_key(LINEAR_TILED, entry, weight).define("BT", tile).define("STAGES", stages(tile))
}

/// Stages of the rings of x and of W. Two blocks fit a multiprocessor.
fn stages(tile: usize) -> usize {
    match tile {
        32 => 6,
        64 => 3,
        _ => 2,
    }
}

/// `TILED_SHARED` of the source: rings of fetches of two column tiles each, one ring of x for the block and
/// one of W for each warp.
pub(super) fn tiled_shared_bytes(weight: &WeightSpec, tile: usize) -> usize {
    let Some(coding) = Coding::of(weight.format) else { unreachable!("tiles of quantised weights") };
    1024 + stages(tile) * (2 * tile * 128 + 8 * coding.copy_bytes(2))
}

/// Bytes of rows of x as f16, in whole tiles of columns.
pub(super) fn half_rows_bytes(weight: &WeightSpec, rows: usize) -> usize {
    rows * col_tiles(weight) * TILE_COLS * size_of::<u16>()
}

/// Writes x as f16 to the scratch. The first blocks of the launch each count a share of the rows by expert, for
/// `group_rows`.
pub(super) fn to_half_tiles(
    key: &KernelKey,
    weight: &WeightSpec,
    rows: usize,
    groups: &GroupRows,
    call: &Call<'_>,
) -> Result<(), ArrayError> {
    let mut key = KernelKey { entry: "to_half_tiles", ..key.clone() };
    let mut x = call.inputs[0].address;
    if let Some(swiglu) = call.producer(0) {
        key = key.define("SWIGLU", 1);
        x = swiglu.inputs[0].address;
    }
    let &GroupRows { chosen, choices, share, counts, .. } = groups;
    let (out, fault, kernel) = (call.scratch, call.fault, call.index);
    let parameters = ToHalfTiles { x, out, rows, chosen, choices, share, counts, fault, kernel };
    let blocks = choices.div_ceil(share) + (rows * col_tiles(weight) * 8).div_ceil(256);
    call.launch(&key, Geometry::rows(blocks, 256), &parameters)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agreement::assert_values;
    use keel_array::{BlockFormat, Compute, DType, WeightFormat};

    #[test]
    fn the_source_has_the_same_rings() {
        let affine = WeightFormat::Affine { bits: 4, group_size: 128, scale_dtype: DType::BF16 };
        for (format, rows) in [(affine, 20), (affine, 200), (WeightFormat::Blocks(BlockFormat::Q2K), 64)] {
            let weight = WeightSpec { experts: 8, rows: 1024, cols: 768, format, compute: Compute::Auto };
            let key = tiled_key("linear_tiled", &weight, rows).define("FANOUT", 2).define("EXPERTS", 8);
            assert_values(key, &[("TILED_SHARED", tiled_shared_bytes(&weight, panel_of(rows)))]);
        }
    }
}
