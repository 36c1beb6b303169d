//! One file per `model_type`, and the code that plain transformers share.

pub(crate) mod gemma3_text;
mod glm4;
mod llama;
mod ministral;
mod ministral3;
mod mistral;
mod olmo2;
mod olmo3;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen3_5;
mod qwen3_moe;
mod qwen3_next;
mod qwen3_vl_moe;
mod smollm3;
pub(crate) mod transformer;
pub(crate) mod unknown;

use serde_json::Value;

use crate::loading::Loader;
use crate::{HybridConfig, HybridModel, ModelError, Result};

/// The model types that [`crate::load`] supports.
pub const MODEL_TYPES: [&str; 16] = [
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "llama",
    "gemma3_text",
    "mistral",
    "ministral",
    "ministral3",
    "smollm3",
    "phi3",
    "olmo2",
    "olmo3",
    "glm4",
];

/// The functions that read models of one type.
pub(crate) struct Family {
    pub config: fn(&Value) -> Result<HybridConfig>,
    pub load: fn(&Loader<'_>, HybridConfig) -> Result<HybridModel>,
}

pub(crate) fn family_of(config: &Value) -> Result<Family> {
    let plain: fn(&Value) -> Result<HybridConfig> = match config["model_type"].as_str().unwrap_or_default() {
        "qwen3_5" | "qwen3_5_moe" | "qwen3_5_text" | "qwen3_5_moe_text" => {
            return Ok(Family { config: HybridConfig::from_json, load: qwen3_5::load });
        }
        "qwen3_next" => return Ok(Family { config: HybridConfig::from_json, load: qwen3_next::load }),
        "llama" => llama::config,
        "qwen2" => qwen2::config,
        "qwen3" | "qwen3_vl" | "qwen3_vl_text" => qwen3::config,
        "qwen3_moe" => qwen3_moe::config,
        "qwen3_vl_moe" | "qwen3_vl_moe_text" => qwen3_vl_moe::config,
        "gemma3_text" | "gemma3" => gemma3_text::config,
        "mistral" => mistral::config,
        "ministral" => ministral::config,
        "ministral3" => ministral3::config,
        // A checkpoint with a vision tower and one of two language models.
        "mistral3" if config["text_config"]["model_type"] == "ministral3" => ministral3::config,
        "mistral3" => mistral::config,
        "smollm3" => smollm3::config,
        "phi3" => phi3::config,
        "olmo2" => olmo2::config,
        "olmo3" => olmo3::config,
        "glm4" => glm4::config,
        other => {
            let supported = MODEL_TYPES.join(", ");
            return Err(ModelError::UnknownModelType { found: other.into(), supported });
        }
    };
    Ok(Family { config: plain, load: transformer::load })
}
