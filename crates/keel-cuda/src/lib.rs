//! The CUDA backend: NVIDIA GPUs of compute capability 8.0 and newer.
//!
//! Driver, run-time compiler (NVRTC) and cuBLASLt are loaded when a device is opened, and NCCL when several are: a
//! program built with this crate runs on machines without CUDA, too. Kernels (`kernels/*.cu`) are compiled for the
//! device's own architecture, with the model's shapes as constants, and kept on disk by source, constants, architecture
//! and compiler (`KEEL_CACHE_DIR`, or `keel` in the user's cache folder).
//!
//! A prepared program is captured once as a CUDA graph and then submitted with one call. Values that vary from step to
//! step (ids, positions, page tables, counts) are read from device memory.
//!
//! A plan needs no GPU:
//!
//! ```
//! use keel_array::{Array, Category, DType, Runtime, RuntimeOptions};
//! use keel_cuda::{CudaBackend, CudaOptions};
//!
//! let backend = CudaBackend::planning(&CudaOptions::default());
//! let runtime = Runtime::new(std::sync::Arc::new(backend), RuntimeOptions::default());
//! let _counted = Array::persistent(&runtime, Category::User, [1024, 1024], DType::F32)?;
//! assert_eq!(runtime.ledger().active().get(Category::User), 4 << 20);
//! # Ok::<(), keel_array::ArrayError>(())
//! ```

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
pub use driver::{Architecture, GpuFacts, MemoryInfo, Survey, Version, compile};
pub use error::CudaError;
pub use peaks::GpuPeaks;
