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
    transformer::load(loader, config, traits(json)?)
}

fn traits(json: &Value) -> Result<Traits> {
    let fields = Fields::new(json);
    Ok(Traits {
        qkv_bias: fields.flag_or("attention_bias", true),
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
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn queries_have_biases_unless_the_config_says_otherwise() {
        for (json, expected) in [
            (json!({}), true),
            (json!({"attention_bias": true}), true),
            (json!({"attention_bias": false}), false),
        ] {
            assert_eq!(traits(&json).expect("the rest are defaults").qkv_bias, expected, "{json}");
        }
    }
}
