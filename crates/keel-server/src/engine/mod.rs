//! The thread that owns an engine, and what it needs from a request: its handle, its view, grammars, values that are
//! read instead of an answer.

pub(crate) mod grammar;
pub(crate) mod mask_ahead;
pub(crate) mod readout;
pub(crate) mod view;
pub(crate) mod worker;
