//! Model definitions, one file per `model_type`.
//!
//! [`load`] reads a model: numbers from the config, then weights into a [`keel_array::Runtime`]. On a planning backend
//! the same code counts bytes and reads nothing. A [`HybridModel`] builds the lazy graph of a step. It does not run
//! anything.

#![forbid(unsafe_code)]

pub mod blocks;
mod columns;
mod config;
mod error;
mod fields;
mod gemma3_text;
pub mod gguf;
mod glm4;
mod hybrid;
mod llama;
pub mod loading;
mod ministral;
mod ministral3;
mod mistral;
mod naming;
mod olmo3;
mod part;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen3_5;
mod qwen3_moe;
mod qwen3_next;
mod qwen3_vl_moe;
mod rope;
mod rope_config;
mod shapes;
mod shard;
mod sharded_parameters;
mod smollm3;
mod sums;
mod transformer;
mod unknown;
pub mod vision;

pub use config::{HybridConfig, MixerKind, MoeConfig, RecurrentConfig, RopeSections};
pub use error::{ModelError, Result};
pub use hybrid::{Block, GrowingQueries, HybridModel, Mixer, MtpHead, Output};
pub use part::Part;
pub use rope::RopeScaling;
pub use rope_config::QueryGrowth;
pub use shapes::{NAMES as SHAPE_NAMES, shape, shape_with_head};
pub use shard::{MixtureCut, Shard, VocabularyShare};
use sharded_parameters::ShardedParameters;
pub use sums::{SumOrder, Sums};

use loading::Loader;
use serde_json::Value;

/// The model types that [`load`] supports.
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

/// The numbers of a config whose model type [`load`] supports.
///
/// # Errors
/// For an unknown `model_type`, or a config that is incomplete or contradicts itself.
pub fn read_config(config: &Value) -> Result<HybridConfig> {
    let parsed = (family_of(config)?.config)(config)?;
    parsed.check()?;
    Ok(parsed)
}

/// As [`read_config`], with the parameters at hand: if an unknown type's tensors have Llama's names, the error lists
/// the fields that are not supported.
///
/// # Errors
/// As [`read_config`].
pub fn read_config_of(config: &Value, parameters: &dyn loading::Parameters) -> Result<HybridConfig> {
    read_config(config).map_err(|error| match error {
        ModelError::UnknownModelType { .. } => unknown::error(config, parameters),
        error => error,
    })
}

/// Reads the model that a config describes, or the loader's [part](Part) of it.
///
/// # Errors
/// For an unknown `model_type`, a config that is incomplete, parameters that are missing or misshapen, or a memory
/// limit that is too small.
pub fn load(loader: &Loader<'_>, config: &Value) -> Result<HybridModel> {
    let parsed = read_config_of(config, loader.parameters())?;
    let (family, shard) = (family_of(config)?, loader.part().shard);
    if shard.count == 1 {
        return (family.load)(loader, config, parsed);
    }
    let own = shard.config(&parsed)?;
    let parameters = ShardedParameters::new(loader.parameters(), &parsed, shard, loader.order())?;
    (family.load)(&loader.reading(&parameters), config, own)
}

/// Whether the config has a multi-token-prediction head and the checkpoint contains it: some converters drop it.
pub fn has_mtp_head(config: &HybridConfig, parameters: &dyn loading::Parameters) -> bool {
    config.mtp_layers > 0 && parameters.contains("mtp.fc.weight")
}

/// The functions that read models of one type.
struct Family {
    config: fn(&Value) -> Result<HybridConfig>,
    load: fn(&Loader<'_>, &Value, HybridConfig) -> Result<HybridModel>,
}

macro_rules! family {
    ($module:ident) => {
        Ok(Family { config: $module::config, load: $module::load })
    };
}

fn family_of(config: &Value) -> Result<Family> {
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
