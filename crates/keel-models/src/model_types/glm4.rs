//! `glm4`: GLM-4 of 2025 (GLM Team, 2024). A block has four norms. Half of each head rotates, in pairs of neighbouring
//! elements. Gate and up are one layer.
//!
//! Reference: `modeling_glm4.py` of transformers.

use serde_json::Value;

use crate::config::fields::Fields;
use crate::model_types::transformer::{self, Defaults, NormNames, Traits};
use crate::{HybridConfig, Result};

/// The numbers.
pub(crate) fn config(config: &Value) -> Result<HybridConfig> {
    let fields = Fields::new(config);
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
    config.traits = Traits {
        qkv_bias: fields.flag_or("attention_bias", true),
        norms: NormNames {
            mixer: Some("input_layernorm"),
            mixer_out: Some("post_self_attn_layernorm"),
            ff: Some("post_attention_layernorm"),
            ff_out: Some("post_mlp_layernorm"),
        },
        fused_gate_up: true,
        rotates_neighbours: true,
        ..config.traits
    };
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn queries_have_biases_unless_the_config_says_otherwise() {
        let mut json = json!({"model_type": "glm4", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 100,
            "num_hidden_layers": 2, "num_attention_heads": 4});
        assert!(config(&json).expect("the rest are defaults").traits.qkv_bias);
        for given in [true, false] {
            json["attention_bias"] = given.into();
            assert_eq!(config(&json).expect("the rest are defaults").traits.qkv_bias, given);
        }
    }
}
