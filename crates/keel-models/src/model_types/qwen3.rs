//! `qwen3`: norms on each query and key head instead of biases (Yang et al., 2025).
//!
//! Reference: `modeling_qwen3.py` of transformers.

use serde_json::Value;

use crate::config::fields::Fields;
use crate::model_types::transformer::{self, Defaults, HeadNorms, Traits};
use crate::{HybridConfig, Result};

/// The numbers.
pub(crate) fn config(config: &Value) -> Result<HybridConfig> {
    let fields = Fields::new(config);
    let defaults = Defaults { window: transformer::WINDOW_ON_REQUEST, ..Defaults::default() };
    let mut config = transformer::config(&fields, defaults)?;
    transformer::windows_on_request(&fields, &mut config)?;
    config.traits = traits(&fields, config.traits);
    Ok(config)
}

/// The traits of blocks, also of those with experts. `common` are those that the config gives every model type.
pub(crate) fn traits(fields: &Fields<'_>, common: Traits) -> Traits {
    let bias = fields.flag("attention_bias");
    Traits { qkv_bias: bias, output_bias: bias, head_norms: HeadNorms::Each, ..common }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MixerKind;
    use serde_json::json;

    /// The config of a dense model type of Qwen; windows and activations are the same in both.
    fn plain(model_type: &str, more: &Value) -> Result<HybridConfig> {
        let mut json = json!({"model_type": model_type, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 100,
            "num_hidden_layers": 30, "num_attention_heads": 4, "max_position_embeddings": 32768});
        more.as_object().into_iter().flatten().for_each(|(key, value)| json[key] = value.clone());
        crate::read_config(&json)
    }

    const TYPES: [&str; 2] = ["qwen2", "qwen3"];

    #[test]
    fn windows_are_for_the_last_layers_where_they_are_enabled() {
        for (json, expected) in [
            (json!({}), (None, 0)),
            (json!({"sliding_window": 16}), (None, 0)),
            (json!({"use_sliding_window": true}), (Some(4096), 2)),
            (
                json!({"use_sliding_window": true, "sliding_window": 16, "max_window_layers": 27}),
                (Some(16), 3),
            ),
            (json!({"use_sliding_window": true, "max_window_layers": 30}), (None, 0)),
            (json!({"use_sliding_window": true, "sliding_window": null}), (None, 0)),
        ] {
            for model_type in TYPES {
                let c = plain(model_type, &json).expect("complete");
                let sliding = c.layers.iter().rev().take_while(|kind| **kind == MixerKind::SlidingAttention);
                assert_eq!((c.window, sliding.count()), expected, "{model_type}: {json}");
            }
        }
    }

    #[test]
    fn activations_that_are_not_supported_are_refused() {
        for model_type in TYPES {
            plain(model_type, &json!({"hidden_act": "gelu_pytorch_tanh"})).expect("it is supported");
            let refused = plain(model_type, &json!({"hidden_act": "relu"})).expect_err("another model");
            assert!(refused.to_string().contains("hidden_act is \"relu\""), "{refused}");
        }
    }
}
