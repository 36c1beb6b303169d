//! `glm4`: GLM-4 of 2025 (GLM Team, 2024). A block has four norms. Half of each head rotates, in pairs of neighbouring
//! elements. Gate and up are one layer.
//!
//! Reference: `modeling_glm4.py` of transformers.

use serde_json::Value;

use crate::config::fields::Fields;
use crate::hybrid::HybridModel;
use crate::loading::Loader;
use crate::model_types::transformer::{self, Defaults, NormNames, Traits};
use crate::{HybridConfig, Result};

/// The numbers.
pub(crate) fn config(config: &Value) -> Result<HybridConfig> {
    let fields = Fields::new(config);
    transformer::activation(&fields)?;
    let defaults = Defaults {
        kv_heads: Some(2),
        head_dim: Some(128),
        context: 131_072,
        eps: 1.5625e-7,
        rotary: 0.5,
        ..Defaults::default()
    };
    let mut config = transformer::config(&fields, defaults)?;
    config.window = None;
    Ok(config)
}

/// Reads a model.
pub(crate) fn load(loader: &Loader<'_>, json: &Value, config: HybridConfig) -> Result<HybridModel> {
    let fields = Fields::new(json);
    let traits = Traits {
        qkv_bias: fields.flag("attention_bias"),
        norms: NormNames {
            mixer: Some("input_layernorm"),
            mixer_out: Some("post_self_attn_layernorm"),
            ff: Some("post_attention_layernorm"),
            ff_out: Some("post_mlp_layernorm"),
        },
        fused_gate_up: true,
        turns_neighbours: true,
        activation: transformer::activation(&fields)?,
        ..Traits::default()
    };
    transformer::load(loader, config, traits)
}
