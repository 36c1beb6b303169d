//! `llama`: Llama 2 and 3, and models with the same layers (Touvron et al., 2023; Grattafiori et al., 2024).
//!
//! Reference: `modeling_llama.py` of transformers.

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
    let mut config = transformer::config(&fields, Defaults::default())?;
    config.window = None;
    Ok(config)
}

/// Reads a model.
pub(crate) fn load(loader: &Loader<'_>, json: &Value, config: HybridConfig) -> Result<HybridModel> {
    let fields = Fields::new(json);
    let bias = fields.flag("attention_bias");
    let traits = Traits {
        qkv_bias: bias,
        output_bias: bias,
        mlp_bias: fields.flag("mlp_bias"),
        activation: transformer::activation(&fields)?,
        ..Traits::default()
    };
    transformer::load(loader, config, traits)
}
