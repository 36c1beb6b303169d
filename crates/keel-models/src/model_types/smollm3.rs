//! `smollm3`: SmolLM3 (Hugging Face, 2025): as `llama`, but some layers do not rotate queries and keys.
//!
//! Reference: `modeling_smollm3.py` of transformers.

use serde_json::Value;

use crate::config::fields::Fields;
use crate::model_types::llama;
use crate::model_types::transformer::{self, Defaults};
use crate::{HybridConfig, MixerKind, ModelError, Result};

/// The numbers.
pub(crate) fn config(config: &Value) -> Result<HybridConfig> {
    let fields = Fields::new(config);
    let defaults = Defaults { kv_heads: Some(4), theta: 2e6, tied: true, ..Defaults::default() };
    let mut config = transformer::config(&fields, defaults)?;
    config.traits = llama::traits(&fields, config.traits);
    config.unrotated_layers = unrotated_layers(&fields, config.layers.len())?;
    let slides = fields.flag("use_sliding_window") && config.window.is_some();
    if !slides && fields.get("layer_types").is_none() {
        config.layers.fill(MixerKind::Attention);
    } else if fields.get("layer_types").is_none() {
        config.unrotated_layers.iter().for_each(|&layer| config.layers[layer] = MixerKind::SlidingAttention);
    }
    transformer::drop_unused_windows(&mut config);
    Ok(config)
}

/// The layers without rotation: those with 0 in `no_rope_layers`, or every `no_rope_layer_interval`th.
fn unrotated_layers(fields: &Fields<'_>, layers: usize) -> Result<Vec<usize>> {
    let Some(rotated) = fields.get("no_rope_layers") else {
        let every = fields.size_or("no_rope_layer_interval", 4)?;
        if every == 0 {
            return Err(ModelError::Config("no_rope_layer_interval is 0, expected at least 1".into()));
        }
        return Ok((0..layers).filter(|layer| (layer + 1).is_multiple_of(every)).collect());
    };
    let listed = rotated.as_array().filter(|list| list.len() >= layers).ok_or_else(|| {
        ModelError::Config(format!(
            "no_rope_layers is {rotated}, expected a number for each of {layers} layers"
        ))
    })?;
    let is_unrotated = |layer: &usize| listed[*layer] == 0 || listed[*layer] == false;
    Ok((0..layers).filter(is_unrotated).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(more: Value) -> Result<HybridConfig> {
        let mut json = json!({"model_type": "smollm3", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 100,
            "num_hidden_layers": 8, "num_attention_heads": 4});
        more.as_object().into_iter().flatten().for_each(|(key, value)| json[key] = value.clone());
        config(&json)
    }

    #[test]
    fn layers_without_positions_are_listed_or_come_at_an_interval() {
        let c = read(json!({})).expect("defaults");
        assert_eq!((&c.unrotated_layers[..], c.tied, c.rope_theta), (&[3, 7][..], true, 2e6));
        let listed = json!({"no_rope_layers": [1, 0, 1, 1, 1, 1, 1, 0], "no_rope_layer_interval": 2});
        assert_eq!(read(listed).expect("complete").unrotated_layers, [1, 7]);
        let message = read(json!({"no_rope_layers": [1]})).expect_err("too short").to_string();
        assert!(message.contains("no_rope_layers"), "{message}");
    }

    #[test]
    fn windows_are_for_layers_without_positions() {
        let c = read(json!({"use_sliding_window": true, "sliding_window": 32})).expect("complete");
        let sliding: Vec<usize> =
            (0..8).filter(|&layer| c.layers[layer] == MixerKind::SlidingAttention).collect();
        assert_eq!((c.window, sliding), (Some(32), vec![3, 7]));
        assert_eq!(read(json!({"sliding_window": 32})).expect("complete").window, None);
    }
}
