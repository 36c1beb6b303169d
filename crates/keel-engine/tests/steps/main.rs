//! How steps are made, drawn and repeated.

#[path = "../common/mod.rs"]
mod common;

mod ahead;
mod catch_up;
mod deterministic;
mod drawing;
mod early;
mod faults;
mod fixtures_on_gpu;
mod kv_bits;
mod leases;
mod packed_prompts;
mod plainly;
mod readout;
mod state_bits;
mod steady_state;
