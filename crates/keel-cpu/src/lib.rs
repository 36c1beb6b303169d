//! CPU backend: thread pool and kernels, chosen for the machine at run time.

pub mod pool;
pub mod shared_slice;
