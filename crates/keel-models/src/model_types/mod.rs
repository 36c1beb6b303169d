//! One file per `model_type`, and the code that plain transformers share.

pub(crate) mod gemma3_text;
mod glm4;
mod llama;
mod ministral;
mod ministral3;
mod mistral;
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
pub const MODEL_TYPES: [&str; 15] = [
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
    "olmo3",
    "glm4",
];

/// The functions that read models of one type.
pub(crate) struct Family {
    pub config: fn(&Value) -> Result<HybridConfig>,
    pub load: fn(&Loader<'_>, &Value, HybridConfig) -> Result<HybridModel>,
}

macro_rules! family {
    ($module:ident) => {
        Ok(Family { config: $module::config, load: $module::load })
    };
}

pub(crate) fn family_of(config: &Value) -> Result<Family> {
    let hybrid = HybridConfig::from_json;
    match config["model_type"].as_str().unwrap_or_default() {
        "qwen3_5" | "qwen3_5_moe" | "qwen3_5_text" | "qwen3_5_moe_text" => {
            Ok(Family { config: hybrid, load: qwen3_5::load })
        }
        "qwen3_next" => Ok(Family { config: hybrid, load: qwen3_next::load }),
        "llama" => family!(llama),
        "qwen2" => family!(qwen2),
        "qwen3" | "qwen3_vl" | "qwen3_vl_text" => family!(qwen3),
        "qwen3_moe" => family!(qwen3_moe),
        "qwen3_vl_moe" | "qwen3_vl_moe_text" => family!(qwen3_vl_moe),
        "gemma3_text" | "gemma3" => family!(gemma3_text),
        "mistral" => family!(mistral),
        "ministral" => family!(ministral),
        "ministral3" => family!(ministral3),
        // A checkpoint with a vision tower and one of two language models.
        "mistral3" if config["text_config"]["model_type"] == "ministral3" => family!(ministral3),
        "mistral3" => family!(mistral),
        "smollm3" => family!(smollm3),
        "phi3" => family!(phi3),
        "olmo3" => family!(olmo3),
        "glm4" => family!(glm4),
        other => {
            let supported = MODEL_TYPES.join(", ");
            Err(ModelError::UnknownModelType { found: other.into(), supported })
        }
    }
}
