//! Model definitions, one file per `model_type`.
//!
//! [`load`] reads a model: numbers from the config, then weights into a [`keel_array::Runtime`]. On a planning backend
//! the same code counts bytes and reads nothing. A [`HybridModel`] builds the lazy graph of a step. It does not run
//! anything.
//!
//! ```
//! use keel_models::{read_config, shape};
//!
//! let config = read_config(&shape("qwen3.5-4b").expect("a published size"))?;
//! assert_eq!((config.hidden, config.layers.len()), (2560, 32));
//! # Ok::<(), keel_models::ModelError>(())
//! ```

#![forbid(unsafe_code)]

pub mod blocks;
mod config;
mod error;
pub mod gguf;
mod hybrid;
pub mod loading;
mod model_types;
mod naming;
mod split;
pub mod vision;

pub use config::rope::RopeScaling;
pub use config::rope_config::QueryGrowth;
pub use config::shapes::{NAMES as SHAPE_NAMES, shape, shape_with_mtp_head};
pub use config::{HybridConfig, MixerKind, MixtureConfig, RecurrentConfig, RopeSections};
pub use error::{ModelError, Result};
pub use hybrid::{Block, GrowingQueries, HybridModel, Mixer, MtpHead, Output};
pub use model_types::MODEL_TYPES;
pub use split::part::Part;
pub use split::share::{MixtureCut, Share, VocabularyShare};
use split::share_parameters::ShareParameters;
pub use split::sums::{SumOrder, Sums};

use config::fields::Fields;
use loading::Loader;
use serde_json::Value;

/// The numbers of a config whose model type [`load`] supports.
///
/// # Errors
/// For an unknown `model_type`, or a config that is incomplete or contradicts itself.
pub fn read_config(config: &Value) -> Result<HybridConfig> {
    let parsed = (model_types::family_of(config)?.config)(config)?;
    parsed.check()?;
    Ok(parsed)
}

/// As [`read_config`], with the parameters at hand. If there is no output head, the embedding is used as one: embedding
/// models are saved without a head. If an unknown type's tensors have Llama's names, the error lists the fields that
/// are not supported.
///
/// # Errors
/// As [`read_config`].
pub fn read_config_of(config: &Value, parameters: &dyn loading::Parameters) -> Result<HybridConfig> {
    let mut parsed = read_config(config).map_err(|error| match error {
        ModelError::UnknownModelType { .. } => model_types::unknown::error(config, parameters),
        error => error,
    })?;
    // Published configs of Qwen3-Next do not count the layers of their head.
    if parsed.model_type == "qwen3_next" && Fields::new(config).get("mtp_num_hidden_layers").is_none() {
        parsed.mtp_layers = naming::mtp_layers(parameters);
    }
    parsed.tied |= !naming::OUTPUT_HEADS.iter().any(|head| naming::has_linear(parameters, head));
    Ok(parsed)
}

/// Reads the model that a config describes, or the loader's [part](Part) of it.
///
/// # Errors
/// For an unknown `model_type`, a config that is incomplete, parameters that are missing or misshapen, or a memory
/// limit that is too small.
pub fn load(loader: &Loader<'_>, config: &Value) -> Result<HybridModel> {
    let parsed = read_config_of(config, loader.parameters())?;
    let (family, share) = (model_types::family_of(config)?, loader.part().share);
    if share.count == 1 {
        return (family.load)(loader, parsed);
    }
    let own = share.config(&parsed)?;
    let parameters = ShareParameters::new(loader.parameters(), &parsed, share, loader.order());
    (family.load)(&loader.reading(&parameters), own)
}

/// Whether the config has a multi-token-prediction head and the checkpoint contains it, under any of its names: some
/// converters move it, and others drop it.
pub fn has_mtp_head(config: &HybridConfig, parameters: &dyn loading::Parameters) -> bool {
    config.mtp_layers > 0 && naming::mtp_root(parameters).is_some()
}
