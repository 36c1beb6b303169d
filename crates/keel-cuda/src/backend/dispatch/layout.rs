//! Copies, joins, block replacement.

use super::{Bound, Call, Geometry};
use crate::backend::operand::{bits_type, strides};
use crate::kernels::{KernelKey, LAYOUT};
use crate::parameters::{CopyStrided, Join, Scatter, Wide};
use keel_array::{ArrayError, Layout, Op};

pub(super) fn run(call: &Call<'_>) -> Result<(), ArrayError> {
    let y = &call.outputs[0];
    match &call.kernel.op {
        Op::Copy => copy(call, &call.inputs[0]),
        Op::Concatenate { axis } => {
            let width: usize = y.layout.shape[*axis..].iter().product();
            let mut at = 0;
            for x in &call.inputs {
                let run: usize = x.layout.shape[*axis..].iter().product();
                if x.len() > 0 {
                    let parameters = Join {
                        x: x.address,
                        from: x.strides(),
                        y: y.address,
                        n: Wide(x.len()),
                        run: Wide(run),
                        width: Wide(width),
                        at: Wide(at),
                    };
                    call.launch(&key(y, "join"), Geometry::elements(x.len()), &parameters)?;
                }
                at += run;
            }
            Ok(())
        }
        Op::SliceUpdate { starts } => {
            let (x, update) = (&call.inputs[0], &call.inputs[1]);
            if x.address != y.address {
                copy(call, x)?;
            }
            if update.len() == 0 {
                return Ok(());
            }
            let block = Layout { offset: 0, ..y.layout.clone() }.slice(starts, &update.layout.shape);
            let parameters = Scatter {
                x: update.address,
                from: update.strides(),
                y: y.address,
                n: Wide(update.len()),
                first: Wide(block.offset),
                to: strides(&Layout { offset: 0, ..block }),
            };
            call.launch(&key(y, "scatter"), Geometry::elements(update.len()), &parameters)
        }
        op => unreachable!("{} moves no elements", op.name()),
    }
}

fn key(y: &Bound<'_>, entry: &'static str) -> KernelKey {
    KernelKey::new(LAYOUT, entry).define("ELEM", bits_type(y.dtype))
}

fn copy(call: &Call<'_>, x: &Bound<'_>) -> Result<(), ArrayError> {
    let y = &call.outputs[0];
    let parameters = CopyStrided { x: x.address, from: x.strides(), y: y.address, n: Wide(y.len()) };
    call.launch(&key(y, "copy"), Geometry::elements(y.len()), &parameters)
}
