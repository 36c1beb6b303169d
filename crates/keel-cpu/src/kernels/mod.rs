//! Kernels by family: plain functions over slices that every worker of a pool calls at once.
//!
//! Inside a kernel the work is handed out among the workers; the caller places a barrier after it. A row's
//! bits never depend on how many rows, sequences or workers there are.
