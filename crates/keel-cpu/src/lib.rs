//! CPU backend: thread pool and kernels, chosen for the machine at run time.

mod amx;
mod backend;
pub mod error;
pub mod floors;
pub mod isa;
pub mod kernels;
pub mod memory;
pub mod pool;
pub mod process;
pub mod shared_slice;
mod simd;
mod sync;

pub use backend::{CpuBackend, CpuGroup, CpuOptions, KernelTime};
