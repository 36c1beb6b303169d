//! `qwen2`: Qwen2 and Qwen2.5 (Yang et al., 2024): biases on queries, keys and values.
//!
//! Reference: `modeling_qwen2.py` of transformers.

use serde_json::Value;

use crate::config::fields::Fields;
use crate::hybrid::HybridModel;
use crate::loading::Loader;
use crate::model_types::transformer::{self, Traits};
use crate::{HybridConfig, Result};

pub(crate) use crate::model_types::qwen3::config;

/// Reads a model.
pub(crate) fn load(loader: &Loader<'_>, json: &Value, config: HybridConfig) -> Result<HybridModel> {
    let activation = transformer::activation(&Fields::new(json))?;
    transformer::load(loader, config, Traits { qkv_bias: true, activation, ..Traits::default() })
}
