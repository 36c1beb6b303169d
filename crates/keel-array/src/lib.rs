//! Lazy arrays, programs, the memory ledger and the backend interface.
//!
//! An [`Array`] is a handle to a lazy node or to storage. Building an operation checks shapes and types at once.
//! [`Runtime::eval`] turns the pending graph into a [`Program`]: numbered kernels over numbered memory, with
//! fused element-wise chains, reused inputs and one arena of known size. [`Runtime::prepare`] keeps such a program
//! bound to its memory, so that a model's step is traced once and run again without being rebuilt.
//!
//! ```
//! use keel_array::{Array, Result, Runtime};
//!
//! /// `x^2 + 1` of each value. Both operations are one kernel, which runs when the values are asked for.
//! fn squares_and_one(runtime: &Runtime, values: &[f32]) -> Result<Vec<f32>> {
//!     let x = Array::from_slice(runtime, values, [values.len()])?;
//!     let one = Array::full(runtime, [1], x.dtype(), 1.0)?;
//!     x.mul(&x)?.add(&one)?.to_vec()
//! }
//! ```
//!
//! A runtime needs a backend: the page of `keel-cpu` makes one.
//!
//! All memory goes through the [`Ledger`] under a [`Category`]. The limit is hard: an allocation beyond it is an error.
//!
//! # Regimes
//! Rows of a sequence are computed in one of two ways: in *prefill* on a 64-token grid anchored at position 0
//! ([`PREFILL_GRID`]), and in *decode* token by token. Within a regime a row's bits do not depend on how the rows were
//! split into runs.

#![forbid(unsafe_code)]

mod array;
mod backend;
mod blocks;
mod buffer;
mod custom;
mod dtype;
mod error;
mod ledger;
mod ops;
mod panics;
mod program;
pub mod random;
mod runtime;
pub mod sampling;
mod shape;
mod sync;
mod usage;
mod weight;

pub use array::{Array, ArraySpec};
pub use backend::{
    Backend, DeviceMemory, LAUNCHES_MAX, Memory, MemoryAt, MemoryCopy, MemoryRange, OwnMemory, Preparations,
    Programs, RESULT_BYTES_MAX, Submission, Ticket,
};
pub use blocks::BlockFormat;
pub use buffer::{Buffer, HostBuffer};
pub use custom::{CudaSource, CustomKernel, HostCall, HostFn, HostSlice, HostSliceMut};
pub use dtype::DType;
pub use error::{ArrayError, Result};
pub use ledger::{Category, Charge, Ledger, MemoryReport};
pub use ops::{
    AddedNorm, AttentionSpec, Batch, Binary, ConvSpec, ConvWindow, DeltaState, Fused, FusedStep,
    GatedDeltaSpec, Group, KvFormat, KvPool, KvRows, Op, PREFILL_GRID, PairRotation, Peers, RandomKind, Real,
    Reduction, Regime, RopeSpec, Routing, RowLog, SharedExpert, Sorted, Source, Unary, View,
};
pub use panics::panic_message;
pub use program::{
    ALIGNMENT, Kernel, KernelGroup, Launch, Operand, OperandMemory, Place, PreparedPiece, Program,
    ProgramCacheUse, ProgramGroup, RemoteLaunch,
};
pub use runtime::{
    Element, ElementCopy, Executable, FailedRun, Gauge, PendingRun, RUNS_MAX, Runtime, RuntimeOptions,
    clear_entries, copy_all,
};
pub use shape::{Layout, Shape};
pub use usage::{DeviceReading, DeviceUsage};
pub use weight::{Compute, RowBlock, RowData, Weight, WeightFormat, WeightSpec};
