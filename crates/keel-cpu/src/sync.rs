//! The synchronisation of files that `tests/interleavings.rs` compiles with loom's types instead.

pub(crate) use std::sync::{Arc, Condvar, Mutex, MutexGuard};
