//! Copies, joins, block replacement.

use super::{Bound, Call, Geometry};
use crate::backend::operand::{bits_type, strides};
use crate::driver::Arguments;
use crate::kernels::{KernelKey, LAYOUT};
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
                    let arguments = from(x).pointer(y.address).u64(x.len()).u64(run).u64(width).u64(at);
                    call.launch(&key(y, "join"), Geometry::elements(x.len()), arguments)?;
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
            let first = block.offset;
            let arguments = from(update)
                .pointer(y.address)
                .u64(update.len())
                .words(&strides(&Layout { offset: 0, ..block }))
                .u64(first);
            call.launch(&key(y, "scatter"), Geometry::elements(update.len()), arguments)
        }
        op => unreachable!("{} moves no elements", op.name()),
    }
}

fn key(y: &Bound<'_>, entry: &'static str) -> KernelKey {
    KernelKey::new(LAYOUT, entry).define("ELEM", bits_type(y.dtype))
}

fn from(x: &Bound<'_>) -> Arguments {
    Arguments::default().pointer(x.address).words(&x.strides())
}

fn copy(call: &Call<'_>, x: &Bound<'_>) -> Result<(), ArrayError> {
    let y = &call.outputs[0];
    call.launch(&key(y, "copy"), Geometry::elements(y.len()), from(x).pointer(y.address).u64(y.len()))
}
