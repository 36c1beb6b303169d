//! Constants, progressions, random numbers.

use super::{Call, Geometry};
use crate::backend::operand::c_type;
use crate::kernels::{CREATE, KernelKey};
use crate::parameters::{Arange, Fill, Random, Wide};
use keel_array::{ArrayError, Op, RandomKind};

pub(super) fn run(call: &Call<'_>) -> Result<(), ArrayError> {
    let y = &call.outputs[0];
    let key = |entry| KernelKey::new(CREATE, entry).define("ELEM", c_type(y.dtype));
    let (y, n, geometry) = (y.address, Wide(y.len()), Geometry::every_element(y.len()));
    match call.kernel.op {
        Op::Fill(value) => call.launch(&key("fill"), geometry, &Fill { y, n, value: value.get() }),
        Op::Arange { start, step } => {
            let [start, step] = [start, step].map(|number| f64::from(number.get()));
            call.launch(&key("arange"), geometry, &Arange { y, n, start, step })
        }
        Op::Random { kind, seed } => {
            let entry = match kind {
                RandomKind::Bits => "bits",
                RandomKind::Uniform => "uniform",
                RandomKind::Normal => "normal",
            };
            call.launch(&key(entry), geometry, &Random { y, n, seed: Wide(seed as usize) })
        }
        ref op => unreachable!("{} creates nothing", op.name()),
    }
}
