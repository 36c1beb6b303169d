//! The synchronisation of files that `tests/interleavings.rs` compiles with a channel of loom's types instead.

pub(crate) use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
