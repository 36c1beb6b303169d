//! Reductions, sorting and running sums of the last axis.

use super::{Call, Geometry};
use crate::backend::operand::c_type;
use crate::driver::Arguments;
use crate::kernels::{KernelKey, REDUCE, SORT};
use keel_array::{ArrayError, DType, Kernel, Op, Reduction};

/// Threads of a block that works on a row.
const BLOCK: usize = 256;

pub(super) fn run(call: &Call<'_>) -> Result<(), ArrayError> {
    let (x, y) = (&call.inputs[0], &call.outputs[0]);
    let width = x.width();
    let wide = wide(x.dtype);
    let key = |entry| KernelKey::new(REDUCE, entry).define("ELEM", c_type(x.dtype));
    let both = || Arguments::default().pointer(x.address).pointer(y.address).u64(width);
    match &call.kernel.op {
        Op::Reduce(reduction) => {
            let [first, combine, finish] = reduction_code(*reduction, x.dtype);
            let key = key("reduce").define("REDUCTION", 1).define("ACC", wide);
            let key = key.define("FIRST", first).define("COMBINE", combine).define("FINISH", finish);
            call.launch(&key, Geometry::rows(y.len(), BLOCK), both())
        }
        Op::ArgReduce { largest } => {
            let before = if *largest { "(a > b)" } else { "(a < b)" };
            let key = key("arg_reduce").define("ARG", 1).define("KEY", wide).define("BEFORE", before);
            call.launch(&key, Geometry::rows(y.len(), BLOCK), both())
        }
        Op::Softmax => {
            call.launch(&key("softmax").define("SOFTMAX", 1), Geometry::rows(x.rows(), BLOCK), both())
        }
        Op::CumSum { reverse, exclusive } => {
            let key = key("cumsum").define("CUMSUM", 1).define("ACC", wide);
            let key = key.define("REVERSE", u8::from(*reverse)).define("EXCLUSIVE", u8::from(*exclusive));
            call.launch(&key, Geometry::rows(x.rows(), BLOCK), both())
        }
        Op::LayerNorm { eps } => {
            let arguments = Arguments::default()
                .pointer(x.address)
                .pointer(call.inputs[1].address)
                .pointer(call.inputs[2].address)
                .pointer(y.address)
                .u64(width)
                .f32(eps.get());
            call.launch(
                &key("layer_norm").define("LAYER_NORM", 1),
                Geometry::rows(x.rows(), BLOCK),
                arguments,
            )
        }
        Op::Sort { descending } => sort(call, *descending),
        Op::TopK { k } => {
            let arguments = Arguments::default()
                .pointer(x.address)
                .pointer(y.address)
                .pointer(call.outputs[1].address)
                .u64(width)
                .u32(*k);
            call.launch(&sort_key(call, "top_k", true), Geometry::rows(x.rows(), BLOCK), arguments)
        }
        op => unreachable!("{} is not a reduction", op.name()),
    }
}

/// The type in which elements are summed and compared.
fn wide(dtype: DType) -> &'static str {
    if dtype.is_float() { "float" } else { "i64" }
}

/// Neutral element, combination of a and b, and the result of the total.
fn reduction_code(reduction: Reduction, dtype: DType) -> [&'static str; 3] {
    let float = dtype.is_float();
    match reduction {
        Reduction::Sum => ["0", "a + b", "total"],
        Reduction::Mean => ["0", "a + b", "total / (float)width"],
        Reduction::Prod => ["1", "a * b", "total"],
        Reduction::Max if float => ["-INFINITY", "(a > b || a != a ? a : b)", "total"],
        Reduction::Min if float => ["INFINITY", "(a < b || a != a ? a : b)", "total"],
        Reduction::Max => ["(-9223372036854775807ll - 1)", "(a > b ? a : b)", "total"],
        Reduction::Min => ["9223372036854775807ll", "(a < b ? a : b)", "total"],
        Reduction::Any => ["0", "(a | b)", "total"],
        Reduction::All => ["1", "(a & b)", "total"],
    }
}

fn sort_key(call: &Call<'_>, entry: &'static str, descending: bool) -> KernelKey {
    let dtype = call.inputs[0].dtype;
    let key = KernelKey::new(SORT, entry).define("ELEM", c_type(dtype)).define("KEY", wide(dtype));
    key.define("DESCENDING", u8::from(descending))
}

/// Length of a row in the sorting network.
fn padded(width: usize) -> usize {
    width.next_power_of_two()
}

pub(super) fn workspace_bytes(kernel: &Kernel) -> usize {
    let shape = &kernel.inputs[0].layout.shape;
    let width = shape.last().copied().unwrap_or(1);
    shape.elements().checked_div(width).unwrap_or(0).saturating_mul(padded(width)) * size_of::<u32>()
}

fn sort(call: &Call<'_>, descending: bool) -> Result<(), ArrayError> {
    let (x, values, indices) = (&call.inputs[0], &call.outputs[0], &call.outputs[1]);
    let (width, padded) = (x.width(), padded(x.width()));
    let total = x.rows() * padded;
    let key = |entry| sort_key(call, entry, descending);
    let order = Arguments::default().pointer(call.scratch);
    call.launch(&key("number"), Geometry::every_element(total), order.u64(total).u64(padded))?;
    let mut run = 2;
    while run <= padded {
        let mut step = run / 2;
        while step > 0 {
            let arguments = Arguments::default().pointer(x.address).pointer(call.scratch);
            let arguments = arguments.u64(total).u64(width).u64(padded).u64(run).u64(step);
            call.launch(&key("stage"), Geometry::every_element(total), arguments)?;
            step /= 2;
        }
        run *= 2;
    }
    let arguments = Arguments::default()
        .pointer(x.address)
        .pointer(call.scratch)
        .pointer(values.address)
        .pointer(indices.address)
        .u64(x.len())
        .u64(width)
        .u64(padded);
    call.launch(&key("gather"), Geometry::every_element(x.len()), arguments)
}
