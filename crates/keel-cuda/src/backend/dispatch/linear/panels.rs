//! Products whose weight is widened on its way into the tensor cores, with x in panels.

use super::super::{BLOCKS_WANTED, Bound, Call, Geometry};
use super::half_operands::absorbed_to_half;
use super::{TILE_COLS, address, codes_and_pairs, col_tiles, row_tiles, weight_key};
use crate::backend::weights::Coding;
use crate::kernels::{HalfForm, KernelKey, LINEAR_PANELS};
use crate::parameters::{AddParts, LinearPanels, ToHalfPanels};
use keel_array::{ArrayError, WeightSpec};

/// Row tiles of a weight that a warpgroup multiplies.
const ROW_TILES: usize = 4;

/// Shared memory of the rings of a block, of the 227 KiB that Hopper has.
const RING_BYTES_MAX: usize = 212 << 10;
const STAGES_MAX: usize = 8;

/// Bytes before the rings, so that they can begin at a multiple of as many.
pub(super) const RING_ALIGN: usize = 1024;

/// The most rows of x of a panel, with Hopper's matrix instructions and without.
const PANEL_ROWS_MAX: usize = 256;
const MMA_PANEL_ROWS_MAX: usize = 128;

/// Rows of a panel are a multiple of this.
const PANEL_STEP: usize = 32;

/// Column tiles of a fetch of W. A fetch of x has as many in panels of up to [`MMA_PANEL_ROWS_MAX`] rows, and one in
/// wider ones.
const W_UNIT: usize = 2;

/// Fetches of W in the ring, where a fetch of x has one tile.
const W_STAGES_OF_WIDE: usize = 3;

/// Rows of x of a tile without Hopper's matrix instructions, where they fit.
pub(super) fn tile_rows(rows: usize) -> usize {
    match rows {
        0..=32 => 32,
        33..=64 => 64,
        _ => MMA_PANEL_ROWS_MAX,
    }
}

/// How a product is cut into blocks on Hopper. Other devices take the parts of K from it, so that the order of a row's
/// sums is the same on every device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    /// Rows of x of a block.
    panel: usize,
    /// Warpgroups of a block.
    groups: usize,
    /// Parts of K, whose sums are added up by another kernel.
    parts: usize,
}

/// Nanoseconds for a column tile on an H200, as fitted to products in 4 bits: by rows of a panel, for blocks of three
/// and of two warpgroups.
const TILE_NANOSECONDS: [[usize; 2]; PANEL_ROWS_MAX / PANEL_STEP] =
    [[391, 281], [446, 326], [514, 372], [596, 412], [702, 502], [784, 548], [890, 604], [1108, 690]];

/// Parts of K with which a product takes least time. The order of its sums follows from them.
pub(super) fn parts(weight: &WeightSpec, rows: usize) -> usize {
    let most = match (rows * weight.rows).is_multiple_of(4) {
        true => (col_tiles(weight) / 8).clamp(1, 8),
        false => 1,
    };
    let time = |&parts: &usize| Cut::of(weight, rows, parts).nanoseconds(weight, rows);
    (1..=most).min_by_key(time).unwrap_or(1)
}

impl Cut {
    /// The fastest cut with `parts` parts of K. Panel and warpgroups do not change the bits of the result.
    fn of(weight: &WeightSpec, rows: usize, parts: usize) -> Cut {
        let panels = rows.div_ceil(PANEL_ROWS_MAX).max(1)..=rows.div_ceil(MMA_PANEL_ROWS_MAX).max(1);
        let rows_of_a_panel =
            panels.map(|panels| rows.div_ceil(panels).next_multiple_of(PANEL_STEP).max(PANEL_STEP));
        rows_of_a_panel
            .flat_map(|panel| [3, 2].map(|groups| Cut { panel, groups, parts }))
            .min_by_key(|cut| cut.nanoseconds(weight, rows))
            .unwrap_or_else(|| unreachable!("a product has a panel"))
    }

    /// Time on an H200: blocks run in waves of one for each multiprocessor.
    fn nanoseconds(self, weight: &WeightSpec, rows: usize) -> usize {
        let blocks = rows.div_ceil(self.panel) * self.row_blocks(weight) * self.parts;
        let [wide, narrow] = TILE_NANOSECONDS[self.panel / PANEL_STEP - 1];
        let tile = if self.groups == 3 { wide } else { narrow };
        let wave = 4_000 + tile * col_tiles(weight).div_ceil(self.parts);
        // Another launch takes 3,000 ns. Sums of parts are written and read at about 3,000 bytes a nanosecond (3 TB/s).
        let adding = match self.parts {
            1 => 0,
            parts => 3_000 + rows * weight.rows * 8 * parts / 3_000,
        };
        blocks.div_ceil(BLOCKS_WANTED) * wave + adding
    }

    /// Blocks of rows of W.
    fn row_blocks(self, weight: &WeightSpec) -> usize {
        row_tiles(weight).div_ceil(ROW_TILES * self.groups)
    }
}

/// The sizes of a block. They do not change the bits of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Block {
    /// Rows of x.
    panel: usize,
    /// Warpgroups.
    groups: usize,
    /// Fetches in the ring of x.
    x_stages: usize,
    /// Fetches in the rings of W.
    w_stages: usize,
}

impl Block {
    /// The block of a cut on Hopper.
    fn of_hopper(weight: &WeightSpec, Cut { panel, groups, .. }: Cut) -> Block {
        if panel <= MMA_PANEL_ROWS_MAX {
            return Block::with_rings(weight, panel, groups, RING_BYTES_MAX);
        }
        let w_stages = W_STAGES_OF_WIDE;
        let left = RING_BYTES_MAX - w_stages * w_fetch_bytes(weight, groups);
        Block { panel, groups, x_stages: (left / tile_bytes(panel)).min(STAGES_MAX), w_stages }
    }

    /// The block on a device without Hopper's matrix instructions: half as many rows if two fetches of the whole panel
    /// do not fit its shared memory.
    fn within(weight: &WeightSpec, rows: usize, shared_bytes_max: usize) -> Block {
        let rings = shared_bytes_max.min(RING_BYTES_MAX + RING_ALIGN) - RING_ALIGN;
        let whole = Block::with_rings(weight, tile_rows(rows), 2, rings);
        if whole.w_stages < 2 { Block::with_rings(weight, tile_rows(rows) / 2, 2, rings) } else { whole }
    }

    /// A block whose fetches of x have as many tiles as those of W, with as many of them as fit.
    fn with_rings(weight: &WeightSpec, panel: usize, groups: usize, bytes: usize) -> Block {
        let both = W_UNIT * tile_bytes(panel) + w_fetch_bytes(weight, groups);
        let stages = (bytes / both).min(STAGES_MAX);
        Block { panel, groups, x_stages: stages, w_stages: stages }
    }

    /// The key of an entry of `linear_panels.cu`, whose constants all entries share.
    fn key(self, entry: &'static str, weight: &WeightSpec, parts: usize) -> KernelKey {
        weight_key(LINEAR_PANELS, entry, weight)
            .define("BT", self.panel)
            .define("HALF_PANEL", self.panel)
            .define("GROUPS", self.groups)
            .define("SPLITS", parts)
            .define("X_STAGES", self.x_stages)
            .define("W_STAGES", self.w_stages)
    }

    /// `PANELS_SHARED` of the source.
    fn shared_bytes(self, weight: &WeightSpec) -> usize {
        let x_unit = if self.panel > MMA_PANEL_ROWS_MAX { 1 } else { W_UNIT };
        let x = self.x_stages * x_unit * tile_bytes(self.panel);
        RING_ALIGN + x + self.w_stages * w_fetch_bytes(weight, self.groups)
    }
}

/// Bytes of a column tile of a panel of x.
fn tile_bytes(panel: usize) -> usize {
    panel * TILE_COLS * size_of::<u16>()
}

/// Bytes of a fetch of W for all warps of a block.
fn w_fetch_bytes(weight: &WeightSpec, groups: usize) -> usize {
    let Some(coding) = Coding::of(weight.format) else { unreachable!("tiles of quantised weights") };
    ROW_TILES * groups * coding.copy_bytes(W_UNIT)
}

/// Bytes of rows of x as f16, in whole panels, on whichever device needs more.
pub(super) fn panels_bytes(weight: &WeightSpec, rows: usize, parts: usize) -> usize {
    let [here, elsewhere] =
        [Cut::of(weight, rows, parts).panel, tile_rows(rows)].map(|panel| rows.next_multiple_of(panel));
    here.max(elsewhere) * col_tiles(weight) * TILE_COLS * size_of::<u16>()
}

/// The product with K in `parts` parts.
pub(super) fn in_panels(
    weight: &WeightSpec,
    residual: Option<&Bound<'_>>,
    rows: usize,
    parts: usize,
    call: &Call<'_>,
) -> Result<(), ArrayError> {
    let block = if call.gpu.has_wgmma() {
        Block::of_hopper(weight, Cut::of(weight, rows, parts))
    } else {
        Block::within(weight, rows, call.gpu.device.shared_bytes_max)
    };
    let key = block.key("linear_panels", weight, parts);
    match call.producer(0) {
        Some(producer) => {
            let form = HalfForm::Panels { rows: block.panel };
            absorbed_to_half(producer, weight, rows, call.scratch, form, call)?
        }
        None => {
            call.expect_aligned(&call.inputs[0], 8)?;
            call.launch(
                &KernelKey { entry: "to_half_panels", ..key.clone() },
                Geometry::rows((rows * col_tiles(weight) * 8).div_ceil(256), 256),
                &ToHalfPanels { x: call.inputs[0].address, out: call.scratch, rows },
            )?
        }
    }
    let sums = call.scratch + panels_bytes(weight, rows, parts).next_multiple_of(256) as u64;
    let [codes, pairs] = codes_and_pairs(weight, &call.inputs[1]);
    let is_whole = parts == 1;
    let parameters = LinearPanels {
        codes,
        pairs,
        x: call.scratch,
        rows,
        residual: is_whole.then(|| address(residual)),
        y: if is_whole { call.outputs[0].address } else { sums },
    };
    let geometry = Geometry {
        grid: (rows.div_ceil(block.panel), row_tiles(weight).div_ceil(ROW_TILES * block.groups), parts),
        block: (128 * block.groups, 1, 1),
        shared_bytes: block.shared_bytes(weight),
    };
    call.launch(&key, geometry, &parameters)?;
    if is_whole {
        return Ok(());
    }
    call.expect_aligned(&call.outputs[0], 16)?;
    residual.map_or(Ok(()), |residual| call.expect_aligned(residual, 16))?;
    let elements = rows * weight.rows;
    let (residual, y) = (address(residual), call.outputs[0].address);
    call.launch(
        &KernelKey { entry: "add_parts", ..key },
        Geometry::rows(elements.div_ceil(1024), 256),
        &AddParts { parts: sums, residual, y, elements },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agreement::assert_values;
    use keel_array::{BlockFormat, Compute, DType, WeightFormat};

    fn weight(rows: usize, cols: usize, format: WeightFormat) -> WeightSpec {
        WeightSpec { experts: 1, rows, cols, format, compute: Compute::Auto }
    }

    fn affine(bits: u32, group_size: usize) -> WeightFormat {
        WeightFormat::Affine { bits: bits as _, group_size: group_size as _, scale_dtype: DType::BF16 }
    }

    #[test]
    fn cuts_are_those_that_measured_best() {
        let cut = |rows, cols, tokens| {
            let weight = weight(rows, cols, affine(4, 64));
            Cut::of(&weight, tokens, parts(&weight, tokens))
        };
        let of = |panel, groups, parts| Cut { panel, groups, parts };
        // Nothing is added up where blocks of all of K fill the device.
        assert_eq!(cut(24_576, 4096, 128), of(128, 3, 1));
        assert_eq!(cut(24_576, 4096, 160), of(160, 3, 1));
        assert_eq!(cut(24_576, 4096, 256), of(256, 3, 1));
        assert_eq!(cut(24_576, 4096, 1024), of(256, 2, 1));
        assert_eq!(cut(18_432, 2560, 128), of(128, 3, 1));
        assert_eq!(cut(18_432, 2560, 512), of(128, 3, 1));
        assert_eq!(cut(18_432, 2560, 768), of(192, 3, 1));
        assert_eq!(cut(4096, 12_288, 128), of(128, 2, 4));
        assert_eq!(cut(4096, 12_288, 256), of(256, 2, 4));
        assert_eq!(cut(4096, 4096, 256), of(128, 2, 2));
        assert_eq!(cut(2560, 9216, 128).groups, 2);
        assert!(cut(64, 128, 17).parts == 1 && cut(4096, 12_288, 17).parts > 1);
    }

    fn formats() -> impl Iterator<Item = WeightFormat> {
        let bits = [2, 3, 4, 5, 6, 8].into_iter();
        let in_f32 = WeightFormat::Affine { bits: 8, group_size: 32, scale_dtype: DType::F32 };
        bits.flat_map(|bits| [32, 64, 128].map(|group| affine(bits, group)))
            .chain(BlockFormat::ALL.map(WeightFormat::Blocks))
            .chain([in_f32])
    }

    #[test]
    fn the_source_has_the_same_rings() {
        for (format, panel, groups) in [
            (affine(4, 64), 128, 3),
            (affine(4, 64), 256, 3),
            (affine(8, 32), 160, 2),
            (affine(3, 128), 64, 2),
            (WeightFormat::Blocks(BlockFormat::Q6K), 32, 3),
            (WeightFormat::Blocks(BlockFormat::IQ4XS), 192, 2),
        ] {
            let weight = weight(4096, 4096, format);
            for block in [
                Block::of_hopper(&weight, Cut { panel, groups, parts: 1 }),
                Block::within(&weight, panel, 99 << 10),
            ] {
                let warps = ROW_TILES * block.groups;
                let expected = [("WARPS", warps), ("PANELS_SHARED", block.shared_bytes(&weight))];
                assert_values(block.key("linear_panels", &weight, 1), &expected);
            }
        }
    }

    #[test]
    fn rings_fit_a_block_and_have_a_slot_to_spare() {
        for format in formats() {
            let weight = weight(4096, 4096, format);
            for panel in (PANEL_STEP..=PANEL_ROWS_MAX).step_by(PANEL_STEP) {
                for groups in [2, 3] {
                    let block = Block::of_hopper(&weight, Cut { panel, groups, parts: 1 });
                    assert!(block.x_stages >= 3 && block.w_stages >= 3, "{format:?}: {block:?}");
                    assert!(block.shared_bytes(&weight) + 256 <= 227 << 10, "{format:?}: {block:?}");
                }
                // The smallest and the largest shared memory of the generations that are supported.
                for most in [99 << 10, 163 << 10, 227 << 10] {
                    let block = Block::within(&weight, panel, most);
                    assert!(block.w_stages >= 2 && block.w_stages == block.x_stages, "{format:?}: {block:?}");
                    assert!(block.panel <= MMA_PANEL_ROWS_MAX && block.shared_bytes(&weight) <= most);
                }
            }
        }
    }

    #[test]
    fn whole_panels_fit_the_scratch() {
        let weight = weight(4096, 4096, affine(4, 64));
        let row = col_tiles(&weight) * TILE_COLS * size_of::<u16>();
        for rows in 1..=2048 {
            for parts in [1, parts(&weight, rows)] {
                let blocks = [99 << 10, 227 << 10].map(|most| Block::within(&weight, rows, most)).into_iter();
                for block in blocks.chain([Block::of_hopper(&weight, Cut::of(&weight, rows, parts))]) {
                    let whole = rows.next_multiple_of(block.panel);
                    assert!(whole * row <= panels_bytes(&weight, rows, parts), "{rows} rows: {block:?}");
                }
            }
        }
    }
}
