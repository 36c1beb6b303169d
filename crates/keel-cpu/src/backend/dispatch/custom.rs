//! The user's kernels: run by one worker, over typed slices.

use super::{Bound, Call};
use crate::kernels::generic::scalar::{Plain, Scalar};
use crate::pool::Worker;
use keel_array::{ArrayError, CustomKernel, DType, HostCall, HostSlice, HostSliceMut, panic_message};
use std::panic::{AssertUnwindSafe, catch_unwind};

pub(super) fn run(kernel: &CustomKernel, call: &Call<'_>, worker: &Worker<'_>) -> Result<(), ArrayError> {
    if worker.index != 0 {
        return Ok(());
    }
    let mut host = HostCall {
        inputs: call.inputs.iter().map(input).collect(),
        input_shapes: call.inputs.iter().map(|x| &x.layout.shape).collect(),
        outputs: call.outputs.iter().map(|y| output(y, kernel.initial())).collect(),
        output_shapes: call.outputs.iter().map(|y| &y.layout.shape).collect(),
    };
    // A panic in the user's code is the user's error, not the end of the pool.
    catch_unwind(AssertUnwindSafe(|| kernel.call(&mut host)))
        .unwrap_or_else(|panic| Err(call.error(format!("the kernel panicked: {}", panic_message(&*panic)))))
}

fn input<'a>(x: &Bound<'a>) -> HostSlice<'a> {
    match x.dtype {
        DType::Bool | DType::U8 => HostSlice::U8(x.values()),
        DType::U32 => HostSlice::U32(x.values()),
        DType::I32 => HostSlice::I32(x.values()),
        DType::I64 => HostSlice::I64(x.values()),
        DType::F16 => HostSlice::F16(x.values()),
        DType::BF16 => HostSlice::BF16(x.values()),
        DType::F32 => HostSlice::F32(x.values()),
    }
}

fn output<'a>(y: &Bound<'a>, initial: f32) -> HostSliceMut<'a> {
    match y.dtype {
        DType::Bool | DType::U8 => HostSliceMut::U8(filled(y, initial)),
        DType::U32 => HostSliceMut::U32(filled(y, initial)),
        DType::I32 => HostSliceMut::I32(filled(y, initial)),
        DType::I64 => HostSliceMut::I64(filled(y, initial)),
        DType::F16 => HostSliceMut::F16(filled(y, initial)),
        DType::BF16 => HostSliceMut::BF16(filled(y, initial)),
        DType::F32 => HostSliceMut::F32(filled(y, initial)),
    }
}

fn filled<'a, T: Plain + Scalar>(y: &Bound<'a>, initial: f32) -> &'a mut [T] {
    let shared = y.shared::<T>();
    // SAFETY: only this worker touches the output.
    let values = unsafe { shared.range(0..shared.len()) };
    values.fill(T::from_f32(initial));
    values
}
