//! `qwen2`: Qwen2 and Qwen2.5 (Yang et al., 2024): biases on queries, keys and values.
//!
//! Reference: `modeling_qwen2.py` of transformers.

use serde_json::Value;

use crate::config::fields::Fields;
use crate::hybrid::HybridModel;
use crate::loading::Loader;
use crate::model_types::transformer::{self, Defaults, Traits};
use crate::{HybridConfig, Result};

/// The numbers.
pub(crate) fn config(config: &Value) -> Result<HybridConfig> {
    let fields = Fields::new(config);
    transformer::activation(&fields)?;
    let defaults = Defaults { window: transformer::WINDOW_ON_REQUEST, ..Defaults::default() };
    let mut config = transformer::config(&fields, defaults)?;
    transformer::windows_on_request(&fields, &mut config)?;
    Ok(config)
}

/// Reads a model.
pub(crate) fn load(loader: &Loader<'_>, json: &Value, config: HybridConfig) -> Result<HybridModel> {
    let activation = transformer::activation(&Fields::new(json))?;
    transformer::load(loader, config, Traits { qkv_bias: true, activation, ..Traits::default() })
}
