//! Products whose weight is widened on its way into the tensor cores, with x in panels.

use super::super::{Bound, Call, Geometry};
use super::half_operands::absorbed_to_half;
use super::{BLOCKS_WANTED, TILE_COLS, address, codes_and_pairs, col_tiles, row_tiles, weight_key};
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

/// Rows of x of a panel, and of a block, where they fit.
pub(super) fn panel_of(rows: usize) -> usize {
    match rows {
        0..=32 => 32,
        33..=64 => 64,
        _ => 128,
    }
}

/// Blocks of rows of W.
fn row_blocks(weight: &WeightSpec, groups: usize) -> usize {
    row_tiles(weight).div_ceil(ROW_TILES * groups)
}

/// How a product is cut into blocks on Hopper. Other devices take the parts of K from it, so that the order of a row's
/// sums and the scratch are the same on every device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    /// Warpgroups of a block.
    groups: usize,
    /// Parts of K, whose sums are added up by another kernel.
    parts: usize,
}

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
    /// The fastest cut with `parts` parts of K. The number of warpgroups does not change the bits of the result.
    fn of(weight: &WeightSpec, rows: usize, parts: usize) -> Cut {
        let [wide, narrow] = [3, 2].map(|groups| Cut { groups, parts });
        if wide.nanoseconds(weight, rows) <= narrow.nanoseconds(weight, rows) { wide } else { narrow }
    }

    /// Time on an H100, as fitted to products in 4 bits: blocks run in waves of one for each multiprocessor.
    fn nanoseconds(self, weight: &WeightSpec, rows: usize) -> usize {
        let panel = panel_of(rows);
        let blocks = rows.div_ceil(panel) * row_blocks(weight, self.groups) * self.parts;
        // For a column tile.
        let tile = match (panel, self.groups) {
            (128, 3) => 640,
            (128, _) => 430,
            (64, 3) => 458,
            (64, _) => 322,
            (_, 3) => 391,
            _ => 281,
        };
        let wave = 4_000 + tile * col_tiles(weight).div_ceil(self.parts);
        // Another launch takes 3,000 ns. Sums of parts are written and read at about 3,000 bytes a nanosecond (3 TB/s).
        let adding = match self.parts {
            1 => 0,
            parts => 3_000 + rows * weight.rows * 8 * parts / 3_000,
        };
        blocks.div_ceil(BLOCKS_WANTED) * wave + adding
    }
}

/// The sizes of a block. They do not change the bits of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Block {
    /// Rows of x.
    panel: usize,
    /// Warpgroups.
    groups: usize,
    /// Fetches in the rings.
    stages: usize,
}

impl Block {
    /// The block of a cut on Hopper.
    fn of_hopper(weight: &WeightSpec, rows: usize, cut: Cut) -> Block {
        let panel = panel_of(rows);
        let stages = (RING_BYTES_MAX / stage_bytes(weight, panel, cut.groups)).min(STAGES_MAX);
        Block { panel, groups: cut.groups, stages }
    }

    /// The block on a device without Hopper's matrix instructions: half as many rows if two fetches of the whole panel
    /// do not fit its shared memory.
    fn within(weight: &WeightSpec, rows: usize, shared_bytes_max: usize) -> Block {
        let (rings, groups) = (shared_bytes_max.min(RING_BYTES_MAX + RING_ALIGN) - RING_ALIGN, 2);
        let stages = |panel| (rings / stage_bytes(weight, panel, groups)).min(STAGES_MAX);
        let whole = panel_of(rows);
        let panel = if stages(whole) < 2 { whole / 2 } else { whole };
        Block { panel, groups, stages: stages(panel) }
    }

    /// The key of an entry of `linear_panels.cu`, whose constants all entries share.
    fn key(self, entry: &'static str, weight: &WeightSpec, parts: usize) -> KernelKey {
        weight_key(LINEAR_PANELS, entry, weight)
            .define("BT", self.panel)
            .define("HALF_PANEL", self.panel)
            .define("GROUPS", self.groups)
            .define("SPLITS", parts)
            .define("STAGES", self.stages)
    }

    /// `PANELS_SHARED` of the source.
    fn shared_bytes(self, weight: &WeightSpec) -> usize {
        RING_ALIGN + self.stages * stage_bytes(weight, self.panel, self.groups)
    }
}

/// Bytes of a fetch of two column tiles: of x for the block and of W for each of its warps.
fn stage_bytes(weight: &WeightSpec, panel: usize, groups: usize) -> usize {
    let Some(coding) = Coding::of(weight.format) else { unreachable!("tiles of quantised weights") };
    2 * panel * 128 + ROW_TILES * groups * coding.copy_bytes(2)
}

/// Bytes of rows of x as f16, in whole panels of the largest size.
pub(super) fn panels_bytes(weight: &WeightSpec, rows: usize) -> usize {
    rows.next_multiple_of(panel_of(rows)) * col_tiles(weight) * TILE_COLS * size_of::<u16>()
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
        Block::of_hopper(weight, rows, Cut::of(weight, rows, parts))
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
    let sums = call.scratch + panels_bytes(weight, rows).next_multiple_of(256) as u64;
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
        grid: (rows.div_ceil(block.panel), row_blocks(weight, block.groups), parts),
        block: (128 * block.groups, 1, 1),
        shared_bytes: block.shared_bytes(weight),
    };
    call.launch(&key, geometry, &parameters)?;
    if is_whole {
        return Ok(());
    }
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
        let of = |groups, parts| Cut { groups, parts };
        // Nothing is added up where blocks of all of K fill the device.
        assert_eq!(cut(24_576, 4096, 128), of(3, 1));
        assert_eq!(cut(24_576, 4096, 256), of(3, 1));
        assert_eq!(cut(18_432, 2560, 128), of(3, 1));
        assert_eq!(cut(4096, 12_288, 128), of(2, 4));
        assert_eq!(cut(2560, 9216, 128).groups, 2);
        assert!(cut(64, 128, 17).parts == 1 && cut(4096, 12_288, 17).parts > 1);
    }

    #[test]
    fn the_source_has_the_same_rings() {
        for (format, rows, groups) in [
            (affine(4, 64), 128, 3),
            (affine(3, 128), 64, 2),
            (WeightFormat::Blocks(BlockFormat::Q6K), 32, 3),
            (WeightFormat::Blocks(BlockFormat::IQ4XS), 128, 2),
        ] {
            let weight = weight(4096, 4096, format);
            for block in [
                Block::of_hopper(&weight, rows, Cut { groups, parts: 1 }),
                Block::within(&weight, rows, 99 << 10),
            ] {
                let warps = ROW_TILES * block.groups;
                let expected = [("WARPS", warps), ("PANELS_SHARED", block.shared_bytes(&weight))];
                assert_values(block.key("linear_panels", &weight, 1), &expected);
            }
        }
    }

    #[test]
    fn rings_fit_a_block_and_have_a_slot_to_spare() {
        let formats =
            [2, 3, 4, 5, 6, 8].into_iter().flat_map(|bits| [32, 64, 128].map(|group| affine(bits, group)));
        let in_f32 = WeightFormat::Affine { bits: 8, group_size: 32, scale_dtype: DType::F32 };
        for format in formats.chain(BlockFormat::ALL.map(WeightFormat::Blocks)).chain([in_f32]) {
            let weight = weight(4096, 4096, format);
            for rows in [32, 64, 128] {
                for groups in [2, 3] {
                    let block = Block::of_hopper(&weight, rows, Cut { groups, parts: 1 });
                    assert!(block.stages >= 3, "{format:?}: {block:?}");
                    assert!(block.shared_bytes(&weight) + 256 <= 227 << 10);
                }
                // The smallest and the largest shared memory of the generations that are supported.
                for most in [99 << 10, 163 << 10, 227 << 10] {
                    let block = Block::within(&weight, rows, most);
                    assert!(block.stages >= 2, "{format:?}: {block:?}");
                    assert!(block.shared_bytes(&weight) <= most);
                }
            }
        }
    }
}
