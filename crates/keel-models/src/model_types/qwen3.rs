//! `qwen3`: norms on each query and key head instead of biases (Yang et al., 2025).
//!
//! Reference: `modeling_qwen3.py` of transformers.

use serde_json::Value;

use crate::config::fields::Fields;
use crate::hybrid::HybridModel;
use crate::loading::Loader;
use crate::model_types::transformer::{self, Defaults, HeadNorms, Traits};
use crate::{HybridConfig, Result};

/// The numbers.
pub(crate) fn config(config: &Value) -> Result<HybridConfig> {
    let fields = Fields::new(config);
    let mut config = transformer::config(&fields, Defaults::default())?;
    transformer::windows_on_request(&fields, &mut config)?;
    Ok(config)
}

/// Reads a model.
pub(crate) fn load(loader: &Loader<'_>, json: &Value, config: HybridConfig) -> Result<HybridModel> {
    let bias = Fields::new(json).flag("attention_bias");
    let traits =
        Traits { qkv_bias: bias, output_bias: bias, head_norms: HeadNorms::Each, ..Traits::default() };
    transformer::load(loader, config, traits)
}
