//! The thin layer over the driver, the run-time compiler and cuBLASLt. Outside this folder, `unsafe` is only in
//! `peaks.rs` and where a backend launches, copies or exchanges: `backend/call.rs`, `backend/launch.rs`,
//! `backend/transfer.rs`, `backend/dispatch/exchange.rs` and `backend/group/connecting.rs`.

mod arguments;
mod blas;
mod compiler;
mod device;
mod event;
mod graph;
mod kernel_cache;
mod mailbox;
mod memory;
mod modules;
mod nccl;
mod nvml;
mod reservation;
mod shortage;
mod stand_in;
mod survey;

pub(crate) use arguments::Arguments;
pub(crate) use blas::{
    Blas, FactorType, Product, ProductOperands, ResultType, ScaleAddresses,
    WORKSPACE_BYTES as BLAS_WORKSPACE_BYTES,
};
pub(crate) use compiler::cached;
use compiler::has_compiler;
pub use compiler::{Architecture, compile};
pub use device::MemoryInfo;
pub(crate) use device::{DRAIN, Delivery, Device, overlap};
pub(crate) use event::Event;
pub(crate) use graph::{Graph, capture};
pub(crate) use mailbox::{
    MAILBOXES_MAX, Mailboxes, ONE_SHOT_BYTES_MAX, ONE_SHOT_GROUPS, ONE_SHOT_THREADS, mailbox_bytes,
    one_shot_blocks,
};
pub(crate) use memory::{CudaMemory, PinnedBuffer};
pub(crate) use modules::{Modules, SizedKernel};
pub(crate) use nccl::{
    Communicator, Extent, ID_BYTES, Membership, Messages, Nccl, apply_settings, communicator_bytes,
};
pub(crate) use reservation::GRANULE;
use reservation::Reservation;
pub(crate) use shortage::{OPENING, Purpose, explained};
pub use survey::{GpuFacts, Survey, Version};

use crate::CudaError;
use cudarc::driver::sys::{self, CUresult};
use std::ffi::CStr;

/// An error if the driver refused `call`.
pub(crate) fn check(call: &'static str, code: CUresult) -> Result<(), CudaError> {
    if code == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    if code == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
        return Err(CudaError::OutOfMemory { call });
    }
    let text = |f: unsafe fn(CUresult, *mut *const std::ffi::c_char) -> CUresult| {
        let mut text = std::ptr::null();
        // SAFETY: both functions store a pointer to a constant string, or null.
        let code = unsafe { f(code, &mut text) };
        if code != CUresult::CUDA_SUCCESS || text.is_null() {
            return format!("{code:?}");
        }
        // SAFETY: a constant string of the driver.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    };
    let reason = format!("{}: {}", text(sys::cuGetErrorName), text(sys::cuGetErrorString));
    match is_lasting(code) {
        true => Err(CudaError::ContextLost { call, reason }),
        false => Err(CudaError::Driver { call, reason }),
    }
}

/// Whether the context returns this error for all calls from now on. The driver's manual says so of each.
fn is_lasting(code: CUresult) -> bool {
    use CUresult::*;
    matches!(
        code,
        CUDA_ERROR_ECC_UNCORRECTABLE
            | CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUDA_ERROR_CONTAINED
            | CUDA_ERROR_ILLEGAL_ADDRESS
            | CUDA_ERROR_LAUNCH_TIMEOUT
            | CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUDA_ERROR_ASSERT
            | CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUDA_ERROR_MISALIGNED_ADDRESS
            | CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUDA_ERROR_INVALID_PC
            | CUDA_ERROR_LAUNCH_FAILED
            | CUDA_ERROR_TENSOR_MEMORY_LEAK
            | CUDA_ERROR_EXTERNAL_DEVICE
    )
}

/// Calls a function of the driver and checks its result.
macro_rules! driver {
    ($f:ident ( $($arg:expr),* $(,)? )) => {
        $crate::driver::check(stringify!($f), cudarc::driver::sys::$f($($arg),*))
    };
}
pub(crate) use driver;
