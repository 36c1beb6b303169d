//! The thread that owns an engine, its handle and its view. Also its work for a request: grammars, and values that are
//! read instead of an answer.

pub(crate) mod grammar;
pub(crate) mod mask_ahead;
pub(crate) mod readout;
pub(crate) mod view;
pub(crate) mod worker;
