//! `mistral`: Mistral 7B, Nemo, Small, and models with the same layers (Jiang et al., 2023): Llama's layers. In the
//! first models all layers see a window.
//!
//! Reference: `modeling_mistral.py` of transformers.

use serde_json::Value;

use crate::config::fields::Fields;
use crate::model_types::transformer::{self, Defaults};
use crate::{HybridConfig, Result};

/// Window of a config without the key. Configs of models without a window contain null.
const WINDOW: usize = 4096;

/// The numbers.
pub(crate) fn config(config: &Value) -> Result<HybridConfig> {
    let fields = Fields::new(config);
    let defaults =
        Defaults { kv_heads: Some(8), context: 131_072, window: Some(WINDOW), ..Defaults::default() };
    let mut config = transformer::config(&fields, defaults)?;
    transformer::windows_everywhere(&mut config);
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MixerKind;
    use serde_json::json;

    fn with_window(window: Option<Value>) -> HybridConfig {
        let mut json = json!({"model_type": "mistral", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 100,
            "num_hidden_layers": 2, "num_attention_heads": 8, "max_position_embeddings": 32768,
            "layer_types": ["full_attention", "sliding_attention"]});
        if let Some(window) = window {
            json["sliding_window"] = window;
        }
        config(&json).expect("the rest are defaults")
    }

    #[test]
    fn the_window_is_for_all_layers_or_for_none() {
        for (window, expected) in [
            (None, Some(4096)),
            (Some(Value::Null), None),
            (Some(16.into()), Some(16)),
            (Some(32768.into()), None),
        ] {
            let c = with_window(window);
            let kind = if expected.is_none() { MixerKind::Attention } else { MixerKind::SlidingAttention };
            assert_eq!((c.window, &c.layers[..]), (expected, &[kind; 2][..]));
            assert_eq!((c.kv_heads, c.head_dim), (8, 8));
        }
    }
}
