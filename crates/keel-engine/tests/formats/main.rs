//! Checkpoints in every form that is read, and their plans.

#[path = "../common/mod.rs"]
mod common;

mod built_in_model;
mod gguf;
mod gguf_written;
mod hostile_configs;
mod other_transformers;
mod packed_checkpoints;
mod planning;
mod quick_plan;
mod reference;
