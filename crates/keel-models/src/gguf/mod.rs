//! Models from GGUF files: their metadata as a config, their tensors under the names of Hugging Face checkpoints.
//!
//! The readers of the model types see no difference: what a file names or orders in its own way is mapped here, and only
//! here.

mod config;
mod names;
mod order;
mod parameters;

pub use config::config;
pub use parameters::GgufParameters;

/// Architectures that [`config`] reads.
pub const ARCHITECTURES: [&str; 8] =
    ["llama", "qwen2", "qwen3", "qwen3moe", "gemma3", "qwen35", "qwen35moe", "qwen3next"];
