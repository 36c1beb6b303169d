//! The memory of requests: one budget for all of them, and its counters.

pub(crate) mod charge;
pub(crate) mod requests;
