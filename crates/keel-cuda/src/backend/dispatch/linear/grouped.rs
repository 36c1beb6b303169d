//! Rows of a mixture grouped by expert, whose weights are widened on their way into the tensor cores.

use super::super::{Call, Geometry};
use super::panels::{RING_ALIGN, tile_rows};
use super::{TILE_COLS, col_tiles, weight_key};
use crate::backend::weights::Coding;
use crate::kernels::{KernelKey, LINEAR_GROUPED};
use crate::parameters::{GroupRows, ToHalfTiles};
use keel_array::{ArrayError, WeightSpec};

/// The sizes of a block. They do not change the bits of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tile {
    /// Rows of x.
    pub rows: usize,
    /// Fetches in the rings of x and of W.
    stages: usize,
}

/// Shared memory that the device reserves in each block.
const RESERVED_BYTES: usize = 1024;

impl Tile {
    /// The tile for experts with about `rows` rows each. If two fetches of it do not fit the shared memory, it is half
    /// as large. A multiprocessor has two blocks where both have two fetches.
    pub fn of(weight: &WeightSpec, rows: usize, shared_bytes_max: usize) -> Tile {
        let rows = tile_rows(rows);
        let wanted = match rows {
            32 => 6,
            64 => 3,
            _ => 2,
        };
        let half = (shared_bytes_max + RESERVED_BYTES) / 2 - RESERVED_BYTES;
        let stages = |rows, bytes: usize| (bytes - RING_ALIGN) / stage_bytes(weight, rows);
        let tries = [(rows, half), (rows, shared_bytes_max), (rows / 2, shared_bytes_max)];
        let fits = |(rows, bytes)| Tile { rows, stages: stages(rows, bytes).min(wanted) };
        let fitting = tries.map(fits).into_iter().find(|tile| tile.stages >= 2);
        fitting
            .unwrap_or_else(|| unreachable!("{} bytes of shared memory hold two fetches", shared_bytes_max))
    }

    /// The key of an entry of `linear_grouped.cu`, whose constants all entries share.
    pub fn key(self, entry: &'static str, weight: &WeightSpec) -> KernelKey {
        weight_key(LINEAR_GROUPED, entry, weight).define("BT", self.rows).define("STAGES", self.stages)
    }

    /// `GROUPED_SHARED` of the source: rings of fetches of two column tiles each, one ring of x for the block and one
    /// of W for each warp.
    pub fn shared_bytes(self, weight: &WeightSpec) -> usize {
        RING_ALIGN + self.stages * stage_bytes(weight, self.rows)
    }
}

/// Bytes of a fetch of two column tiles: of x for the block and of W for each of its warps.
fn stage_bytes(weight: &WeightSpec, rows: usize) -> usize {
    let Some(coding) = Coding::of(weight.format) else { unreachable!("tiles of quantised weights") };
    2 * rows * 128 + 8 * coding.copy_bytes(2)
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
    let mut x = &call.inputs[0];
    if let Some(swiglu) = call.producer(0) {
        key = key.define("SWIGLU", 1);
        x = &swiglu.inputs[0];
    }
    call.expect_aligned(x, 8)?;
    let &GroupRows { chosen, choices, share, counts, .. } = groups;
    let (out, fault, kernel) = (call.scratch, call.fault, call.index);
    let parameters = ToHalfTiles { x: x.address, out, rows, chosen, choices, share, counts, fault, kernel };
    let blocks = choices.div_ceil(share) + (rows * col_tiles(weight) * 8).div_ceil(256);
    call.launch(&key, Geometry::rows(blocks, 256), &parameters)
}

#[cfg(test)]
mod tests {
    use super::super::super::support::SHARED_BYTES;
    use super::*;
    use crate::agreement::assert_values;
    use keel_array::{BlockFormat, Compute, DType, WeightFormat};

    fn weight(format: WeightFormat) -> WeightSpec {
        WeightSpec { experts: 8, rows: 1024, cols: 768, format, compute: Compute::Auto }
    }

    #[test]
    fn the_source_has_the_same_rings() {
        let affine = WeightFormat::Affine { bits: 4, group_size: 128, scale_dtype: DType::BF16 };
        for (format, rows) in [(affine, 20), (affine, 200), (WeightFormat::Blocks(BlockFormat::Q2K), 64)] {
            let weight = weight(format);
            let tile = Tile::of(&weight, rows, SHARED_BYTES);
            let key = tile.key("linear_grouped", &weight).define("FANOUT", 2).define("EXPERTS", 8);
            assert_values(key, &[("GROUPED_SHARED", tile.shared_bytes(&weight))]);
        }
    }

    #[test]
    fn tiles_fit_a_block_of_every_generation() {
        let affine = [(2, 32, DType::F16), (4, 64, DType::BF16), (8, 128, DType::BF16), (8, 32, DType::F32)]
            .map(|(bits, group_size, scale_dtype)| WeightFormat::Affine { bits, group_size, scale_dtype });
        for weight in affine.into_iter().chain(BlockFormat::ALL.map(WeightFormat::Blocks)).map(weight) {
            for rows in [1, 40, 200] {
                let tile = Tile::of(&weight, rows, SHARED_BYTES);
                assert!(tile.shared_bytes(&weight) <= SHARED_BYTES, "{weight:?}: {tile:?}");
            }
        }
        let wide = weight(affine[3]);
        assert_eq!(Tile::of(&wide, 200, SHARED_BYTES), Tile { rows: 64, stages: 2 }, "half a tile");
        assert_eq!(Tile::of(&wide, 200, 227 << 10), Tile { rows: 128, stages: 2 });
        let narrow = weight(affine[1]);
        assert_eq!(Tile::of(&narrow, 20, SHARED_BYTES).stages, 2, "two blocks");
        assert_eq!(Tile::of(&narrow, 20, 227 << 10).stages, 6);
    }
}
