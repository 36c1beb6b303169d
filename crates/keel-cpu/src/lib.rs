//! CPU backend: thread pool and kernels, chosen for the machine at run time.
//!
//! ```
//! use keel_array::{Array, Runtime, RuntimeOptions};
//! use keel_cpu::{CpuBackend, CpuOptions};
//!
//! let backend = CpuBackend::new(CpuOptions { threads: Some(2), ..CpuOptions::default() });
//! let runtime = Runtime::new(std::sync::Arc::new(backend), RuntimeOptions::default());
//! let x = Array::from_slice(&runtime, &[1.0f32, 2.0, 3.0], [3])?;
//! assert_eq!(x.mul(&x)?.to_vec::<f32>()?, [1.0, 4.0, 9.0]);
//! # Ok::<(), keel_array::ArrayError>(())
//! ```

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
