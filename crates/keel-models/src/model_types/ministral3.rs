//! `ministral3`: Ministral 3 and the text part of Mistral 3 (Mistral AI, 2025): as `mistral`, with YaRN and with
//! queries that grow with their position.
//!
//! Reference: `modeling_ministral3.py` of transformers.

use serde_json::{Value, json};

use crate::config::fields::Fields;
use crate::config::rope_config::QueryGrowth;
use crate::model_types::transformer::{self, Defaults};
use crate::{HybridConfig, ModelError, Result};

/// The numbers.
pub(crate) fn config(config: &Value) -> Result<HybridConfig> {
    let mut config = config.clone();
    let text = if config["text_config"].is_object() { &mut config["text_config"] } else { &mut config };
    if text["rope_parameters"].is_null() && text["rope_scaling"].is_null() {
        text["rope_parameters"] = json!({"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0,
            "original_max_position_embeddings": 16384, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1});
    }
    let fields = Fields::new(&config);
    let defaults = Defaults {
        kv_heads: Some(8),
        head_dim: Some(128),
        context: 262_144,
        eps: 1e-5,
        theta: 1e6,
        ..Defaults::default()
    };
    let mut parsed = transformer::config(&fields, defaults)?;
    parsed.query_growth = growth(&fields)?;
    transformer::windows_everywhere(&mut parsed);
    Ok(parsed)
}

/// The growth of queries, if the config has one.
fn growth(fields: &Fields<'_>) -> Result<Option<QueryGrowth>> {
    let beta = fields.rope("llama_4_scaling_beta", 0.0)?;
    if beta == 0.0 {
        return Ok(None);
    }
    let original = fields.rope("original_max_position_embeddings", 0.0)?;
    if original < 1.0 {
        let reason = "llama_4_scaling_beta needs original_max_position_embeddings next to it";
        return Err(ModelError::Config(reason.into()));
    }
    Ok(Some(QueryGrowth { beta, original: original as usize }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RopeScaling;

    fn minimal() -> Value {
        json!({"model_type": "ministral3", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 100,
            "num_hidden_layers": 2, "num_attention_heads": 8})
    }

    #[test]
    fn a_config_without_rope_has_that_of_the_published_models() {
        let c = config(&minimal()).expect("the rest are defaults");
        assert_eq!(c.query_growth, Some(QueryGrowth { beta: 0.1, original: 16384 }));
        assert!(matches!(c.rope_scaling, RopeScaling::Yarn { factor: 16.0, attention: 1.0, .. }));
        assert_eq!((c.rope_theta, c.head_dim, c.window), (1e6, 128, None));
    }

    #[test]
    fn growth_needs_a_context_to_begin_at() {
        let mut json = minimal();
        json["rope_parameters"] = json!({"rope_type": "default", "llama_4_scaling_beta": 0.1});
        let message = config(&json).expect_err("no length to divide by").to_string();
        assert!(message.contains("original_max_position_embeddings"), "{message}");
        json["rope_parameters"] = json!({"rope_type": "default"});
        assert_eq!(config(&json).expect("nothing grows").query_growth, None);
    }
}
