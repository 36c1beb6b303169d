//! How a product of few rows is cut. `split` and `unit` order the sums, so they follow from the weight's shape and from
//! the absorbed kernels, never from the number of rows of x. A row therefore has the same bits in every batch. Where
//! several devices may hold rows of a weight, they follow from the columns and their coding alone. The figures are
//! those that measured best on an H100, and on an H200 for the shapes of 27b and its shares.

use super::super::BLOCKS_WANTED;
use super::{SelectBy, col_tiles, row_tiles};
use crate::backend::weights::Coding;
use crate::driver::Device;
use keel_array::WeightSpec;

/// The cut of a product of few rows; see `linear_few_rows.cu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tuning {
    /// Warps that share the columns of a row tile.
    pub split: usize,
    /// Column tiles that a warp loads at once.
    pub unit: usize,
    /// Row tiles that a block takes one after the other.
    pub passes: usize,
    /// Row tiles that a block takes at a time.
    pub row_warps: usize,
    /// Fetches under way through shared memory; 0 for loads into registers.
    pub stages: usize,
    /// Blocks that a multiprocessor has to have room for.
    pub blocks_min: usize,
}

/// Row tiles beyond which a product is large: more than the blocks that a device runs at a time.
pub(super) const LARGE: usize = 4 * BLOCKS_WANTED;

/// Rows of x up to which loading the weight limits a product: one row, or those of drafts or of a small batch.
const FETCH_BOUND_ROWS: usize = 4;

impl Tuning {
    /// The cut of a product of `rows` rows; with SwiGLU if `gated`, with experts if it `gathers`.
    pub fn of(weight: &WeightSpec, rows: usize, gated: bool, gathers: bool, by: SelectBy) -> Tuning {
        let fastest = Tuning::fastest(weight, rows, gated, gathers);
        let (split, unit) = order_by_columns(weight);
        if !by.spans_devices() || (split, unit) == (fastest.split, fastest.unit) {
            return fastest;
        }
        // At most 16 warps a block. Registers suffice for two blocks of 10 warps.
        let (row_warps, blocks_min) = (fastest.row_warps.min(16 / split).max(1), fastest.blocks_min.min(2));
        Tuning { split, unit, row_warps, blocks_min, ..fastest }
    }

    fn fastest(weight: &WeightSpec, rows: usize, gated: bool, gathers: bool) -> Tuning {
        let tiles = col_tiles(weight);
        let plain = Tuning { split: 1, unit: 4, passes: 1, row_warps: 1, stages: 0, blocks_min: 1 };
        let Some(coding) = Coding::of(weight.format) else {
            let unit = if gated { 1 } else { 2 };
            let passes = if gathers { 1 } else { passes(weight, rows) };
            return Tuning { split: divisor(tiles.div_ceil(unit), 5, 8), unit, passes, ..plain };
        };
        if gathers && !gated {
            let split = divisor(tiles.div_ceil(2), 4, 4);
            // Short columns leave a block of one row tile with too few warps.
            let row_warps = if tiles > 16 { 1 } else { 4 };
            let stages = if row_warps > 1 { 4 } else { 0 };
            return Tuning { split, unit: 2, row_warps, stages, ..plain };
        }
        if gated {
            let short = tiles < 64;
            let split = divisor(tiles.div_ceil(2), 5, if short { 10 } else { 8 });
            if gathers {
                // The same as without experts: a shared expert runs in the launch of the chosen ones, or by itself.
                return Tuning { split, unit: 2, ..plain };
            }
            let (stages, passes) = match rows <= FETCH_BOUND_ROWS && row_tiles(weight) > LARGE {
                // Two blocks with this much under way fit a multiprocessor. All blocks that run at once then take all
                // row tiles.
                true if short && coding.bits <= 4 => (4, 3),
                large => (if short { 2 } else { 3 }, if large { 2 } else { 1 }),
            };
            // Room for two blocks makes the compiler use fewer registers. The next kernel's blocks wait for free
            // registers, so they start sooner.
            return Tuning { split, unit: 2, passes, stages, blocks_min: 2, ..plain };
        }
        if weight.cols > 8192 && row_tiles(weight) <= 3 * BLOCKS_WANTED {
            let split = divisor(tiles.div_ceil(2), 12, 18);
            let stages = match tiles {
                // Three blocks of a multiprocessor run at once.
                _ if row_tiles(weight) > 2 * BLOCKS_WANTED => 2,
                ..=144 => 3,
                _ => 4,
            };
            let blocks_min = if rows <= 8 { 2 } else { 1 };
            return Tuning { split, unit: 2, stages, blocks_min, ..plain };
        }
        // Large products go through shared memory, in units that give each warp two of a row tile.
        let large = row_tiles(weight) > LARGE && row_tiles(weight) < 8 * BLOCKS_WANTED;
        let (unit, most) = match coding.bits {
            _ if large && tiles < 64 => (2, 10),
            8 => (2, 8),
            _ if coding.group == 16 => (2, 8),
            _ => (4, 8),
        };
        let (split, blocks_min) = (divisor(tiles.div_ceil(unit), 5, most), if rows > 1 { 3 } else { 1 });
        // Nearly as many blocks as a device runs at a time, with long rows.
        let is_medium = tiles >= 64 && (3 * BLOCKS_WANTED < row_tiles(weight) && row_tiles(weight) <= LARGE);
        if (large || is_medium) && rows <= FETCH_BOUND_ROWS {
            let stages = if tiles < 64 { 2 } else { 3 };
            return Tuning { split, unit, passes: if large { 2 } else { 1 }, stages, blocks_min, ..plain };
        }
        Tuning { split, unit, passes: passes(weight, rows), blocks_min, ..plain }
    }

    /// Drops fetches through shared memory if the device cannot do them: they came with Hopper and need enough of that
    /// memory.
    pub fn for_device(self, device: &Device, shared_bytes: impl Fn(&Tuning) -> usize) -> Tuning {
        let takes = device.capability >= (9, 0) && shared_bytes(&self) <= device.shared_bytes_max;
        if takes { self } else { Tuning { stages: 0, ..self } }
    }

    /// Warps of a block.
    pub fn warps(&self) -> usize {
        self.split * self.row_warps
    }

    /// `RING_BYTES` of the source, for a warp that works on `halves` row tiles at once.
    pub fn ring_bytes(&self, weight: &WeightSpec, halves: usize) -> usize {
        let (Some(coding), 1..) = (Coding::of(weight.format), self.stages) else { return 0 };
        let slot = halves * coding.copy_bytes(self.unit);
        let fetches = self.warps() * self.stages;
        fetches * slot + (fetches * 8).next_multiple_of(16)
    }
}

/// `split` and `unit` where several devices may hold rows of a weight. They are those of the product with SwiGLU, which
/// has registers for the smallest units.
fn order_by_columns(weight: &WeightSpec) -> (usize, usize) {
    let tiles = col_tiles(weight);
    match Coding::of(weight.format) {
        None => (divisor(tiles, 5, 8), 1),
        Some(_) => (divisor(tiles.div_ceil(2), 5, if tiles < 64 { 10 } else { 8 }), 2),
    }
}

/// Row tiles of a block. If there are many, a block takes several, so that its start is paid once.
fn passes(weight: &WeightSpec, rows: usize) -> usize {
    match row_tiles(weight) / BLOCKS_WANTED {
        _ if rows > FETCH_BOUND_ROWS => 1,
        0..8 => 1,
        8..64 => 3,
        _ => 4,
    }
}

/// The largest number from `least` to `most` that divides `units`, so that no warp is idle; else `most`. At most
/// `units`.
fn divisor(units: usize, least: usize, most: usize) -> usize {
    (least..=most).rev().find(|warps| units.is_multiple_of(*warps)).unwrap_or(most).min(units)
}

#[cfg(test)]
mod tests {
    use super::super::exact_split;
    use super::*;
    use keel_array::{BlockFormat, Compute, DType, Regime, WeightFormat};

    #[test]
    fn rows_do_not_change_the_order_of_sums() {
        let affine = |(bits, group_size)| WeightFormat::Affine { bits, group_size, scale_dtype: DType::BF16 };
        let formats = [(4, 64), (3, 32), (8, 128)].map(affine).into_iter();
        let dense = [WeightFormat::Dense(DType::BF16)];
        for format in formats.chain(BlockFormat::ALL.map(WeightFormat::Blocks)).chain(dense) {
            for (rows, cols) in [
                (12_352, 2560),
                (18_432, 2560),
                (2560, 9216),
                (4096, 12_288),
                (5120, 8704),
                (8240, 5120),
                (1024, 1024),
            ] {
                let spec = WeightSpec { experts: 1, rows, cols, format, compute: Compute::Auto };
                for gated in [false, true] {
                    let of = |rows| Tuning::of(&spec, rows, gated, false, SelectBy::Rows);
                    assert!((2..=16).all(|t| (of(t).split, of(t).unit) == (of(1).split, of(1).unit)));
                }
            }
        }
    }

    #[test]
    fn on_several_devices_columns_alone_order_the_sums() {
        let affine = |(bits, group_size)| WeightFormat::Affine { bits, group_size, scale_dtype: DType::BF16 };
        let formats = [(4, 64), (3, 32), (8, 128)].map(affine).into_iter();
        let dense = [WeightFormat::Dense(DType::BF16), WeightFormat::Dense(DType::F32)];
        let by = SelectBy::RegimeOnDevices(Regime::Decode);
        for format in formats.chain(BlockFormat::ALL.map(WeightFormat::Blocks)).chain(dense) {
            for cols in [128, 768, 2304, 4352, 9216, 17_408] {
                let spec = |experts, rows| WeightSpec { experts, rows, cols, format, compute: Compute::Auto };
                let of = |rows, gated, gathers| {
                    let tuning = Tuning::of(&spec(if gathers { 8 } else { 1 }, rows), 1, gated, gathers, by);
                    assert!(tuning.warps() <= 32, "{format:?}: {tuning:?}");
                    (tuning.split, tuning.unit)
                };
                let whole = of(18_432, false, false);
                for rows in [32, 96, 2560, 4608, 9216, 248_320] {
                    for (gated, gathers) in [(false, false), (true, false), (false, true), (true, true)] {
                        assert_eq!(of(rows, gated, gathers), whole, "{format:?}, {rows} x {cols}");
                    }
                    let exact = [rows, 18_432].map(|rows| exact_split(&spec(1, rows), by));
                    assert_eq!(exact[0], exact[1]);
                }
            }
        }
    }

    #[test]
    fn a_shared_expert_is_summed_as_the_chosen_ones() {
        for (bits, cols) in [(4, 2048), (4, 3072), (8, 4096), (3, 320)] {
            let format = WeightFormat::Affine { bits, group_size: 64, scale_dtype: DType::BF16 };
            let spec = WeightSpec { experts: 256, rows: 1024, cols, format, compute: Compute::Auto };
            let [alone, chosen] =
                [false, true].map(|gathers| Tuning::of(&spec, 1, true, gathers, SelectBy::Rows));
            assert_eq!((alone.split, alone.unit), (chosen.split, chosen.unit));
        }
    }

    #[test]
    fn warps_share_evenly_where_they_can() {
        assert_eq!([divisor(10, 5, 8), divisor(16, 5, 8), divisor(72, 12, 18)], [5, 8, 18]);
        assert_eq!([divisor(11, 5, 8), divisor(2, 5, 8)], [8, 2]);
    }
}
