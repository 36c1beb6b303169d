//! The laws for one sequence and for batches, and the references that every model family has. These also run on the
//! fixtures of the repository alone (`KEEL_FIXTURES=own`).

#[path = "../common/mod.rs"]
mod common;

mod batches;
mod one_sequence;
mod overcommit;
mod references;
