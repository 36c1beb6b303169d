//! `gemma3_text`, and the text part of `gemma3` (Gemma Team, 2025). Most layers see a window and have separate rotary
//! frequencies. A block has four norms, whose scales are stored as offsets from one. Embeddings are scaled.
//!
//! Reference: `modeling_gemma3.py` of transformers.

use serde_json::Value;

use crate::blocks::Activation;
use crate::config::fields::Fields;
use crate::config::rope;
use crate::model_types::transformer::{self, ActivationKey, Defaults, HeadNorms, NormNames, Traits};
use crate::{HybridConfig, MixerKind, Result, RopeScaling};

/// Where configs give the function of the feed-forward half.
pub(crate) const ACTIVATION: ActivationKey =
    ActivationKey { key: "hidden_activation", default: Activation::GeluTanh };

/// The numbers. Published configs leave out keys whose value is the reference's default.
pub(crate) fn config(config: &Value) -> Result<HybridConfig> {
    let defaults = [
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
        ("head_dim", 256),
        ("vocab_size", 262_208),
        ("max_position_embeddings", 131_072),
        ("sliding_window", 4096),
    ];
    let mut config = config.clone();
    let text = if config["text_config"].is_object() { &mut config["text_config"] } else { &mut config };
    for (key, value) in defaults {
        if text[key].is_null() {
            text[key] = value.into();
        }
    }
    let fields = Fields::new(&config);
    for key in
        ["attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention", "attention_bias"]
    {
        transformer::refuse(&fields, key)?;
    }
    let defaults = Defaults { activation: ACTIVATION, ..Defaults::default() };
    let mut parsed = transformer::config(&fields, defaults)?;
    parsed.tied = fields.get("tie_word_embeddings").is_none_or(|tied| *tied != Value::Bool(false));
    let scalar = fields.number_or("query_pre_attn_scalar", 256.0)?;
    parsed.attention_scale = scalar.powf(-0.5);
    let theta = |layer_type: &str, older: &str, default: f64| {
        let nested = rope::parameters(&fields, layer_type).and_then(|p| p["rope_theta"].as_f64());
        nested.map_or_else(|| fields.number_or(older, default), Ok)
    };
    parsed.rope_theta = theta("full_attention", "rope_theta", 1e6)?;
    parsed.sliding_rope_theta = theta("sliding_attention", "rope_local_base_freq", 1e4)?;
    // In older configs, the scaling is only for layers without a window.
    if !rope::is_by_layer_type(&fields) {
        parsed.sliding_rope_scaling = RopeScaling::None;
    }
    if fields.get("layer_types").is_none() {
        let every =
            fields.size_or("sliding_window_pattern", fields.size_or("_sliding_window_pattern", 6)?)?;
        for (i, kind) in parsed.layers.iter_mut().enumerate() {
            if every == 0 || !(i + 1).is_multiple_of(every) {
                *kind = MixerKind::SlidingAttention;
            }
        }
    }
    if !parsed.layers.contains(&MixerKind::SlidingAttention) {
        parsed.window = None;
    }
    parsed.traits = Traits {
        head_norms: HeadNorms::Each,
        norms: NormNames {
            mixer: Some("input_layernorm"),
            mixer_out: Some("post_attention_layernorm"),
            ff: Some("pre_feedforward_layernorm"),
            ff_out: Some("post_feedforward_layernorm"),
        },
        offset_norms: true,
        scaled_embedding: true,
        ..parsed.traits
    };
    Ok(parsed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn older_configs_leave_out_defaults_and_name_rope_otherwise() {
        let older = json!({"model_type": "gemma3", "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}});
        let c = config(&older).expect("the rest are defaults");
        assert_eq!((c.heads, c.kv_heads, c.head_dim, c.window, c.tied), (8, 4, 256, Some(1024), true));
        assert_eq!((c.rope_theta, c.sliding_rope_theta), (1e6, 1e4));
        assert_eq!(c.rope_scaling, RopeScaling::Linear { factor: 8.0 });
        assert_eq!((c.layers[4], c.layers[5]), (MixerKind::SlidingAttention, MixerKind::Attention));
        assert_eq!(c.attention_scale, 1.0 / 16.0);
    }

    #[test]
    fn what_is_not_done_here_is_refused() {
        let capped = json!({"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 2, "final_logit_softcapping": 30.0});
        let message = config(&capped).expect_err("logits would be wrong").to_string();
        assert!(message.contains("final_logit_softcapping is 30.0"), "{message}");
        let exact = json!({"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 2, "hidden_activation": "gelu"});
        let message = config(&exact).expect_err("activations would be wrong").to_string();
        assert!(message.contains("hidden_activation is \"gelu\""), "{message}");
    }
}
