//! Constants, progressions, random numbers.

use super::{Call, Geometry};
use crate::backend::operand::c_type;
use crate::driver::Arguments;
use crate::kernels::{CREATE, KernelKey};
use keel_array::{ArrayError, Op, RandomKind};

pub(super) fn run(call: &Call<'_>) -> Result<(), ArrayError> {
    let y = &call.outputs[0];
    let key = |entry| KernelKey::new(CREATE, entry).define("ELEM", c_type(y.dtype));
    let arguments = Arguments::default().pointer(y.address).u64(y.len());
    let (entry, arguments) = match call.kernel.op {
        Op::Fill(value) => ("fill", arguments.f32(value.get())),
        Op::Arange { start, step } => {
            ("arange", arguments.f64(f64::from(start.get())).f64(f64::from(step.get())))
        }
        Op::Random { kind, seed } => {
            let entry = match kind {
                RandomKind::Bits => "bits",
                RandomKind::Uniform => "uniform",
                RandomKind::Normal => "normal",
            };
            (entry, arguments.words(&[seed]))
        }
        ref op => unreachable!("{} creates nothing", op.name()),
    };
    call.launch(&key(entry), Geometry::every_element(y.len()), arguments)
}
