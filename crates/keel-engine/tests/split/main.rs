//! Models on several devices.

#[path = "../common/mod.rs"]
mod common;

mod ahead;
mod bits;
mod fixtures;
mod gpu_plan;
mod microbatches;
mod overlap;
mod pipeline;
mod ready;
mod remote;
mod rounds;
mod tensor;
