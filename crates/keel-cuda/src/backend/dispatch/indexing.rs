//! Gathering by index, from arrays and from packed weights.

use super::{Call, Geometry, linear};
use crate::backend::operand::{bits_type, c_type};
use crate::driver::Arguments;
use crate::kernels::{INDEXING, KernelKey};
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
    let arguments =
        Arguments::default().pointer(x.address).pointer(indices.address).pointer(y.address).u64(y.len());
    let (entry, arguments) = match &call.kernel.op {
        Op::Take => {
            let entries = x.layout.shape.first().copied().unwrap_or(0);
            let width: usize = x.layout.shape[1..].iter().product();
            ("take", arguments.u64(width).u32(entries))
        }
        Op::TakeAlong => ("take_along", arguments.u64(y.width()).u32(x.width())),
        op => unreachable!("{} takes no indices", op.name()),
    };
    call.launch(&key(entry), Geometry::elements(y.len()), arguments.pointer(call.fault).u32(call.index))
}
