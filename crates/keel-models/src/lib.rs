//! Model definitions, one file per `model_type`.
//!
//! A model is read with [`load`]: config numbers, then weights into a [`keel_array::Runtime`]. On a planning
//! backend the same code counts bytes and reads nothing. A [`HybridModel`] builds the lazy graph of a step; it
//! does not run anything.

#![forbid(unsafe_code)]

pub mod blocks;
mod config;
mod error;
mod hybrid;
pub mod loading;
mod naming;
mod qwen3_5;
mod qwen3_next;
mod shapes;

pub use config::{HybridConfig, MixerKind, MoeConfig};
pub use error::{ModelError, Result};
pub use hybrid::{Block, HybridModel, Mixer, MtpHead};
pub use shapes::{NAMES as SHAPE_NAMES, shape};

use loading::Loader;
use serde_json::Value;

/// The model types that [`load`] knows.
pub const MODEL_TYPES: [&str; 3] = ["qwen3_5", "qwen3_5_moe", "qwen3_next"];

/// The numbers of a config, if the model is one that [`load`] knows.
///
/// # Errors
/// An unknown `model_type`, a config that is incomplete or contradicts itself.
pub fn read_config(config: &Value) -> Result<HybridConfig> {
    reader_of(config)?;
    HybridConfig::from_json(config)
}

/// Reads the model that a config describes.
///
/// # Errors
/// An unknown `model_type`, a config that is incomplete, parameters that are missing or misshapen, or a memory
/// limit that is too small.
pub fn load(loader: &Loader<'_>, config: &Value) -> Result<HybridModel> {
    reader_of(config)?(loader, HybridConfig::from_json(config)?)
}

/// Reads a model of one family.
type Reader = fn(&Loader<'_>, HybridConfig) -> Result<HybridModel>;

fn reader_of(config: &Value) -> Result<Reader> {
    match config["model_type"].as_str().unwrap_or_default() {
        "qwen3_5" | "qwen3_5_moe" | "qwen3_5_text" | "qwen3_5_moe_text" => Ok(qwen3_5::load),
        "qwen3_next" => Ok(qwen3_next::load),
        other => {
            let supported = MODEL_TYPES.join(", ");
            Err(ModelError::UnknownModelType { found: other.into(), supported })
        }
    }
}
