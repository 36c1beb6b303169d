//! Models that read pictures.

#[path = "../common/mod.rs"]
mod common;

mod batch;
mod drafts;
mod experts;
mod kept_features;
mod laws;
mod mmproj;
mod tower_forms;
mod tower_thread;
