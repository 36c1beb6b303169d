//! Lazy arrays, programs, the memory ledger and the backend interface.

mod dtype;

pub use dtype::DType;
