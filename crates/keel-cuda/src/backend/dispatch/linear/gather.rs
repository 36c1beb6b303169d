//! Products with an expert for each row: one by one, or sorted by expert where there are many.

use super::super::fast::swiglu;
use super::super::{Bound, Call, Geometry};
use super::few_rows::FewRows;
use super::tiled::{half_rows_bytes, tile_of, tiled_key, tiled_shared_bytes, to_half_tiles};
use super::{Arithmetic, arithmetic, exact_split, packed, row_tiles, takes_groups, weight_key};
use crate::driver::Arguments;
use crate::kernels::{EXACT_MATMUL, KernelKey};
use keel_array::{ArrayError, Op, WeightSpec};

/// `y[t, j] = x[t or t, j] W[e[t, j]]^T`.
pub(in crate::backend::dispatch) fn gather(weight: &WeightSpec, call: &Call<'_>) -> Result<(), ArrayError> {
    let experts = &call.inputs[2];
    let fanout = experts.len() / (call.inputs[0].len() / weight.cols);
    let widens = matches!(arithmetic(weight), Arithmetic::Codes | Arithmetic::WidenedCodes);
    if widens && takes_groups(weight, experts.len(), call.choice()) && call.gpu.has_wgmma() {
        return grouped(weight, fanout, call);
    }
    let made = made_input(call)?;
    match arithmetic(weight) {
        Arithmetic::Exact | Arithmetic::WidenedCodes => {
            let split = exact_split(weight);
            let key = weight_key(EXACT_MATMUL, "exact_rows", weight)
                .define("DIM_T", 1)
                .define("SPLIT", split)
                .define("GATHER", fanout);
            let arguments = packed(Arguments::default(), weight, &call.inputs[1])
                .pointer(made.unwrap_or(call.inputs[0]).address)
                .pointer(experts.address)
                .u32(weight.experts)
                .pointer(call.fault)
                .u32(call.index)
                .pointer(0)
                .pointer(call.outputs[0].address);
            let grid = (row_tiles(weight), experts.len(), 1);
            call.launch(&key, Geometry { grid, block: (32 * split, 1, 1), shared_bytes: 0 }, arguments)
        }
        _ => match made {
            Some(x) => FewRows::over(weight, call, x).run(None, call),
            None => FewRows::of(weight, call).run(None, call),
        },
    }
}

/// The rows that are multiplied, in scratch, where SwiGLU was absorbed: only groups of rows take it in.
fn made_input<'a>(call: &Call<'a>) -> Result<Option<Bound<'a>>, ArrayError> {
    match call.maker(0) {
        Some(maker) if matches!(maker.kernel.op, Op::SwiGlu) => {
            let made = Bound { address: call.scratch, ..call.inputs[0] };
            swiglu(&maker.inputs[0], &made, call)?;
            Ok(Some(made))
        }
        _ => Ok(None),
    }
}

/// Tiles of rows that the sort may find at most.
fn tiles_max(weight: &WeightSpec, rows: usize) -> usize {
    rows.min(rows.div_ceil(tile_of(rows.div_ceil(weight.experts))) + weight.experts)
}

/// Where the scratch of grouped rows lies: x as f16, the rows by expert, the tiles.
pub(super) fn grouped_scratch(weight: &WeightSpec, inputs: usize, rows: usize) -> [usize; 3] {
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
