//! The CUDA backend: NVIDIA GPUs of compute capability 8.0 and newer.
//!
//! Driver, run-time compiler (NVRTC) and cuBLASLt are loaded when a device is opened, and NCCL when several are: a
//! program built with this crate runs on machines without CUDA, too. Kernels (`kernels/*.cu`) are compiled for the
//! device's own architecture, with the model's shapes as constants, and kept on disk by source, constants, architecture
//! and compiler (`KEEL_CACHE_DIR`, or `keel` in the user's cache folder).
//!
//! A prepared program is captured once as a CUDA graph and then submitted with one call. What varies from step to step
//! (ids, positions, page tables, counts) is read from device memory.

#[cfg(test)]
mod agreement;
mod backend;
mod driver;
mod error;
pub mod kernels;
pub mod nccl;
mod parameters;
mod peaks;

pub use backend::{
    CudaBackend, CudaGroup, CudaOptions, Determinism, GroupIds, PeerProcesses, Precision, Role,
};
pub use driver::{Architecture, GpuFacts, Survey, Version, compile};
pub use error::CudaError;
pub use peaks::GpuPeaks;
