//! Reductions, sorting and running sums of the last axis.

use super::{Call, Geometry};
use crate::backend::operand::c_type;
use crate::kernels::{KernelKey, REDUCE, SORT};
use crate::parameters::{LayerNorm, Reduce, SortGather, SortNumber, SortStage, TopK, Wide};
use keel_array::{ArrayError, DType, Kernel, Op, Reduction};

/// Threads of a block that works on a row.
const BLOCK: usize = 256;

pub(super) fn run(call: &Call<'_>) -> Result<(), ArrayError> {
    let (x, y) = (&call.inputs[0], &call.outputs[0]);
    let (width, wide) = (Wide(x.width()), wide(x.dtype));
    let key = |entry| KernelKey::new(REDUCE, entry).define("ELEM", c_type(x.dtype));
    let rows = Reduce { x: x.address, y: y.address, width };
    match &call.kernel.op {
        Op::Reduce(reduction) => {
            let [first, combine, finish] = reduction_code(*reduction, x.dtype);
            let key = key("reduce").define("REDUCTION", 1).define("ACC", wide);
            let key = key.define("FIRST", first).define("COMBINE", combine).define("FINISH", finish);
            call.launch(&key, Geometry::rows(y.len(), BLOCK), &rows)
        }
        Op::ArgReduce { largest } => {
            let before = if *largest { "(a > b)" } else { "(a < b)" };
            let key = key("arg_reduce").define("ARG", 1).define("KEY", wide).define("BEFORE", before);
            call.launch(&key, Geometry::rows(y.len(), BLOCK), &rows)
        }
        Op::Softmax => {
            call.launch(&key("softmax").define("SOFTMAX", 1), Geometry::rows(x.rows(), BLOCK), &rows)
        }
        Op::CumSum { reverse, exclusive } => {
            let key = key("cumsum").define("CUMSUM", 1).define("ACC", wide);
            let key = key.define("REVERSE", u8::from(*reverse)).define("EXCLUSIVE", u8::from(*exclusive));
            call.launch(&key, Geometry::rows(x.rows(), BLOCK), &rows)
        }
        Op::LayerNorm { eps } => {
            let [weight, bias] = [1, 2].map(|i| call.inputs[i].address);
            let parameters = LayerNorm { x: x.address, weight, bias, y: y.address, width, eps: eps.get() };
            let key = key("layer_norm").define("LAYER_NORM", 1);
            call.launch(&key, Geometry::rows(x.rows(), BLOCK), &parameters)
        }
        Op::Sort { descending } => sort(call, *descending),
        Op::TopK { k } => {
            let indices = call.outputs[1].address;
            let parameters = TopK { x: x.address, values: y.address, indices, width, k: *k };
            call.launch(&sort_key(call, "top_k", true), Geometry::rows(x.rows(), BLOCK), &parameters)
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
    let (x, order) = (&call.inputs[0], call.scratch);
    let [values, indices] = [0, 1].map(|i| call.outputs[i].address);
    let length = padded(x.width());
    let elements = Geometry::every_element(x.rows() * length);
    let (total, width, padded) = (Wide(x.rows() * length), Wide(x.width()), Wide(length));
    let key = |entry| sort_key(call, entry, descending);
    call.launch(&key("number"), elements, &SortNumber { order, total, padded })?;
    let mut run = 2;
    while run <= length {
        let mut step = run / 2;
        while step > 0 {
            let parameters =
                SortStage { x: x.address, order, total, width, padded, run: Wide(run), step: Wide(step) };
            call.launch(&key("stage"), elements, &parameters)?;
            step /= 2;
        }
        run *= 2;
    }
    let total = Wide(x.len());
    let parameters = SortGather { x: x.address, order, values, indices, total, width, padded };
    call.launch(&key("gather"), Geometry::every_element(x.len()), &parameters)
}
