//! Products with an expert for each row: row by row, or sorted by expert if there are many rows.

use super::super::support::{GRID_MAX, SHARED_BYTES};
use super::super::{Call, Geometry};
use super::exact::expect_readable;
use super::few_rows::FewRows;
use super::grouped::{Tile, half_rows_bytes, to_half_tiles};
use super::{
    Arithmetic, arithmetic, at_row, codes_and_pairs, exact_split, is_grouped, pairs, row_tiles, weight_key,
};
use crate::kernels::{KernelKey, LINEAR_EXACT};
use crate::parameters::{ExactRows, GroupRows, LinearGrouped};
use keel_array::{ArrayError, WeightSpec};
use std::ops::Range;

/// `y[t, j] = x[t or t, j] W[e[t, j]]^T`.
pub(in crate::backend::dispatch) fn gather(weight: &WeightSpec, call: &Call<'_>) -> Result<(), ArrayError> {
    let experts = &call.inputs[2];
    let fanout = experts.len() / (call.inputs[0].len() / weight.cols);
    if is_grouped(weight, call.kernel, call.mode) {
        return grouped(weight, fanout, call);
    }
    match arithmetic(weight, call.select_by()) {
        Arithmetic::Exact | Arithmetic::WidenedCodes | Arithmetic::ManyHalf => {
            expect_readable(weight, call)?;
            let split = exact_split(weight, call.select_by());
            let key = weight_key(LINEAR_EXACT, "exact_rows", weight)
                .define("DIM_T", 1)
                .define("SPLIT", split)
                .define("GATHER", fanout);
            launches(experts.len(), fanout).try_for_each(|rows| {
                let first = (rows.start * size_of::<u32>()) as u64;
                let parameters = ExactRows {
                    weight: call.inputs[1].address,
                    pairs: pairs(weight, &call.inputs[1]),
                    x: at_row(call.inputs[0].address, rows.start / fanout, weight.cols),
                    experts: Some(experts.address + first),
                    stack: Some(weight.experts),
                    fault: Some(call.fault),
                    kernel: Some(call.index),
                    residual: 0,
                    y: at_row(call.outputs[0].address, rows.start, weight.rows),
                };
                let grid = (row_tiles(weight), rows.len(), 1);
                call.launch(&key, Geometry { grid, block: (32 * split, 1, 1), shared_bytes: 0 }, &parameters)
            })
        }
        _ => FewRows::of(weight, call).run(None, call),
    }
}

/// The rows of y that each launch computes: at most as many as a grid has blocks along y. A launch begins with the
/// first choice of a row of x, or has choices of one row of x alone. So choice i of a launch multiplies row i /
/// `fanout` of its rows of x.
pub(super) fn launches(rows: usize, fanout: usize) -> impl Iterator<Item = Range<usize>> {
    let from = move |first: usize| {
        let count = match GRID_MAX / fanout {
            0 => GRID_MAX.min(fanout - first % fanout),
            whole => whole * fanout,
        };
        (first < rows).then(|| first..rows.min(first + count))
    };
    std::iter::successors(from(0), move |before| from(before.end))
}

/// Rows of an expert, if all have as many.
fn rows_per_expert(weight: &WeightSpec, rows: usize) -> usize {
    rows.div_ceil(weight.experts)
}

/// Tiles of rows that the sort may produce, at most.
fn tiles_max(weight: &WeightSpec, rows: usize, tile: Tile) -> usize {
    rows.min(rows.div_ceil(tile.rows) + weight.experts)
}

/// Rows that a block counts and then places, at least: one for each of its threads. There are at most [`SHARES_MAX`]
/// such shares, since each block adds up the counts of all shares.
const SHARE_MIN: usize = 1024;
const SHARES_MAX: usize = 64;

fn share_of(rows: usize) -> usize {
    rows.div_ceil(SHARES_MAX).max(1).next_multiple_of(SHARE_MIN)
}

/// Where the scratch of grouped rows lies: x as f16 from the start on, then the rows by expert, the tiles, and the
/// counts.
pub(super) struct GroupedScratch {
    row_of: usize,
    tiles: usize,
    counts: usize,
    pub end: usize,
}

pub(super) fn grouped_scratch(weight: &WeightSpec, inputs: usize, rows: usize) -> GroupedScratch {
    let words = |count: usize| count * size_of::<u32>();
    let row_of = half_rows_bytes(weight, inputs).next_multiple_of(256);
    let tiles = row_of + words(rows).next_multiple_of(256);
    // The tile is smallest, and there are most, where blocks have the least shared memory.
    let tile = Tile::of(weight, rows_per_expert(weight, rows), SHARED_BYTES);
    let counts = tiles + 16 * (1 + tiles_max(weight, rows, tile));
    let end = counts + words(rows.div_ceil(share_of(rows)) * weight.experts);
    GroupedScratch { row_of, tiles, counts, end }
}

fn grouped(weight: &WeightSpec, fanout: usize, call: &Call<'_>) -> Result<(), ArrayError> {
    let rows = call.inputs[2].len();
    let scratch = grouped_scratch(weight, rows / fanout, rows);
    let [row_of, tiles, counts] =
        [scratch.row_of, scratch.tiles, scratch.counts].map(|at| call.scratch + at as u64);
    let tile = Tile::of(weight, rows_per_expert(weight, rows), call.gpu.device.shared_bytes_max);
    let key = tile.key("linear_grouped", weight).define("FANOUT", fanout).define("EXPERTS", weight.experts);
    let (chosen, share) = (call.inputs[2].address, share_of(rows));
    let groups = GroupRows { chosen, choices: rows, share, counts, row_of, tiles };
    to_half_tiles(&key, weight, rows / fanout, &groups, call)?;
    let grouping = KernelKey { entry: "group_rows", ..key.clone() };
    call.launch(&grouping, Geometry::rows(rows.div_ceil(share), 1024), &groups)?;
    let [codes, pairs] = codes_and_pairs(weight, &call.inputs[1]);
    let parameters =
        LinearGrouped { codes, pairs, x: call.scratch, row_of, tiles, y: call.outputs[0].address };
    let geometry = Geometry {
        grid: (tiles_max(weight, rows, tile), row_tiles(weight).div_ceil(8), 1),
        block: (256, 1, 1),
        shared_bytes: tile.shared_bytes(weight),
    };
    call.launch(&key, geometry, &parameters)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_fit_a_grid_and_cover_all_rows() {
        for (rows, fanout) in [
            (8, 8),
            (65_535, 1),
            (65_536, 1),
            (70_000, 8),
            (655_360, 10),
            (200_001, 66_667),
            (131_072, 131_072),
        ] {
            let mut next = 0;
            for launch in launches(rows, fanout) {
                assert_eq!(launch.start, next, "{rows} rows, {fanout} each");
                assert!((1..=GRID_MAX).contains(&launch.len()));
                let last = launch.end - 1;
                let of_launch = |row: usize| launch.start / fanout + (row - launch.start) / fanout;
                assert!(launch.start.is_multiple_of(fanout) || launch.start / fanout == last / fanout);
                assert_eq!(of_launch(last), last / fanout);
                next = launch.end;
            }
            assert_eq!(next, rows);
        }
        assert_eq!(launches(65_528, 8).count(), 1, "one launch where one is enough");
        assert_eq!(launches(0, 8).count(), 0);
    }
}
