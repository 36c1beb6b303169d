//! `ministral`: Ministral 8B of 2024: as `mistral`, but only some layers see a window.
//!
//! Reference: `modeling_ministral.py` of transformers.

use serde_json::Value;

use crate::config::fields::Fields;
use crate::model_types::transformer::{self, Defaults};
use crate::{HybridConfig, Result};

/// The numbers.
pub(crate) fn config(config: &Value) -> Result<HybridConfig> {
    let fields = Fields::new(config);
    let defaults =
        Defaults { kv_heads: Some(8), context: 131_072, window: Some(4096), ..Defaults::default() };
    let mut config = transformer::config(&fields, defaults)?;
    if fields.get("layer_types").is_none() {
        transformer::windows_everywhere(&mut config);
    }
    transformer::drop_unused_windows(&mut config);
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MixerKind::{Attention, SlidingAttention};
    use serde_json::json;

    #[test]
    fn layer_types_say_which_layers_see_the_window() {
        let mut json = json!({"model_type": "ministral", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 100,
            "num_hidden_layers": 2, "num_attention_heads": 8, "sliding_window": 16,
            "layer_types": ["full_attention", "sliding_attention"]});
        let c = config(&json).expect("complete");
        assert_eq!((c.window, &c.layers[..]), (Some(16), &[Attention, SlidingAttention][..]));
        json["layer_types"] = Value::Null;
        assert_eq!(config(&json).expect("complete").layers, [SlidingAttention; 2]);
        json["sliding_window"] = Value::Null;
        let c = config(&json).expect("complete");
        assert_eq!((c.window, &c.layers[..]), (None, &[Attention; 2][..]));
    }
}
