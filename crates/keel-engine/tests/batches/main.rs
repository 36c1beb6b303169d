//! Many sequences in one batch.

#[path = "../common/mod.rs"]
mod common;

mod ahead;
mod crowd;
mod faults;
mod long_turns;
mod masks;
mod prefixes;
mod readouts;
