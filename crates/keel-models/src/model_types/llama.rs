//! `llama`: Llama 2 and 3, and models with the same layers (Touvron et al., 2023; Grattafiori et al., 2024).
//!
//! Reference: `modeling_llama.py` of transformers.

use serde_json::Value;

use crate::config::fields::Fields;
use crate::model_types::transformer::{self, Defaults, Traits};
use crate::{HybridConfig, Result};

/// The numbers.
pub(crate) fn config(config: &Value) -> Result<HybridConfig> {
    let fields = Fields::new(config);
    let mut config = transformer::config(&fields, Defaults::default())?;
    config.window = None;
    config.traits = traits(&fields, config.traits);
    Ok(config)
}

/// The traits of blocks, also of `smollm3`. `common` are those that the config gives every model type.
pub(crate) fn traits(fields: &Fields<'_>, common: Traits) -> Traits {
    let bias = fields.flag("attention_bias");
    Traits { qkv_bias: bias, output_bias: bias, mlp_bias: fields.flag("mlp_bias"), ..common }
}
