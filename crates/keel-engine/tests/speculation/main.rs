//! Rounds of drafts.

#[path = "../common/mod.rs"]
mod common;

mod choosers;
mod faults;
mod hidden;
mod mtp_heads;
mod queued;
mod rounds;
