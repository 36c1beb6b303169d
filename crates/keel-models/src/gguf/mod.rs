//! Models from GGUF files: a config from their metadata, and their tensors under the names of Hugging Face checkpoints.
//!
//! The readers of the model types see no difference. All names and row orders that are particular to GGUF files are
//! mapped here, and only here.

mod config;
mod export;
mod import;
mod metadata;
mod names;
mod order;
mod parameters;
mod tower;
mod tower_tensors;

use keel_weights::gguf::{GgufFile, GgufValue};

use crate::{HybridConfig, ModelError, Result};

pub use config::config;
pub use export::CheckpointAsGguf;
pub use import::{GgufAsCheckpoint, portable_config, transformers_config};
pub use metadata::metadata;
pub use parameters::GgufParameters;
pub use tower::{add_tower, may_see, processor};

/// Architectures that [`fn@config`] reads.
pub const ARCHITECTURES: [&str; 15] = [
    "llama",
    "qwen2",
    "qwen3",
    "qwen3moe",
    "qwen3vl",
    "qwen3vlmoe",
    "gemma3",
    "qwen35",
    "qwen35moe",
    "qwen3next",
    "mistral3",
    "smollm3",
    "phi3",
    "olmo2",
    "glm4",
];

/// Tensors that become part of the config: divisors of the rotary frequencies.
const DIVISORS: &str = "rope_freqs.weight";
const SHORT_DIVISORS: &str = "rope_factors_short.weight";
const LONG_DIVISORS: &str = "rope_factors_long.weight";

/// One of this many layers of `smollm3` does not rotate queries and keys. Its files do not contain the number.
const SMOLLM3_INTERVAL: usize = 4;

/// The architecture in a file; empty if it has none.
fn architecture(file: &GgufFile) -> &str {
    file.metadata().get("general.architecture").and_then(GgufValue::as_str).unwrap_or_default()
}

/// The architecture of GGUF files for a model.
fn architecture_of(config: &HybridConfig) -> Result<&'static str> {
    let model_type = config.model_type.as_str();
    Ok(match model_type.strip_suffix("_text").unwrap_or(model_type) {
        "llama" | "mistral" | "ministral" => "llama",
        "ministral3" | "mistral3" => "mistral3",
        "smollm3" => "smollm3",
        "phi3" => "phi3",
        "olmo2" | "olmo3" => "olmo2",
        "glm4" => "glm4",
        "qwen2" => "qwen2",
        "qwen3" => "qwen3",
        "qwen3_moe" => "qwen3moe",
        "qwen3_vl" => "qwen3vl",
        "qwen3_vl_moe" => "qwen3vlmoe",
        "gemma3" => "gemma3",
        "qwen3_5" => "qwen35",
        "qwen3_5_moe" => "qwen35moe",
        "qwen3_next" => "qwen3next",
        _ => {
            let supported = crate::MODEL_TYPES.join(", ");
            return Err(ModelError::UnknownModelType { found: model_type.into(), supported });
        }
    })
}

/// `query_pre_attn_scalar` of a model. Files do not contain it. Only the largest model of `gemma3` scales queries by
/// `hidden / heads` instead of the head size.
fn query_scalar(arch: &str, layers: u64, hidden_per_head: u64, head_dim: u64) -> u64 {
    if arch == "gemma3" && layers == 62 { hidden_per_head } else { head_dim }
}

/// Whether Hugging Face checkpoints of an architecture store this norm as an offset from one. GGUF files never do.
fn is_offset_norm(arch: &str, name: &str) -> bool {
    matches!(arch, "gemma3" | "qwen35" | "qwen35moe" | "qwen3next")
        && name.contains("norm")
        && !name.contains("linear_attn.")
}
