//! Gathering by index, from arrays and from packed weights.

use super::{Call, Geometry, linear};
use crate::backend::operand::{bits_type, c_type};
use crate::kernels::{INDEXING, KernelKey};
use crate::parameters::{Take, Wide};
use keel_array::{ArrayError, Op};

pub(super) fn run(call: &Call<'_>) -> Result<(), ArrayError> {
    let (x, y) = (&call.inputs[0], &call.outputs[0]);
    if let Op::Embedding { weight } = &call.kernel.op {
        return linear::embedding(weight, call);
    }
    let indices = &call.inputs[1];
    let key = |entry| {
        let key = KernelKey::new(INDEXING, entry).define("ELEM", bits_type(x.dtype));
        key.define("INDEX", c_type(indices.dtype))
    };
    let (entry, width, entries) = match &call.kernel.op {
        Op::Take => {
            let entries = x.layout.shape.first().copied().unwrap_or(0);
            ("take", x.layout.shape[1..].iter().product(), entries)
        }
        Op::TakeAlong => ("take_along", y.width(), x.width()),
        op => unreachable!("{} takes no indices", op.name()),
    };
    let parameters = Take {
        x: x.address,
        indices: indices.address,
        y: y.address,
        n: Wide(y.len()),
        width: Wide(width),
        entries,
        fault: call.fault,
        kernel: call.index,
    };
    call.launch(&key(entry), Geometry::elements(y.len()), &parameters)
}
