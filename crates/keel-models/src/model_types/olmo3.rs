//! `olmo3`: OLMo 3 (Team OLMo, 2025). Norms come after the halves of a block, not before. One norm covers all query
//! heads and one all key heads. Most layers see a window; the others have YaRN.
//!
//! Reference: `modeling_olmo3.py` of transformers.

use serde_json::Value;

use crate::config::fields::Fields;
use crate::config::rope;
use crate::model_types::transformer::{self, Defaults, HeadNorms, NormNames, Traits};
use crate::{HybridConfig, MixerKind, Result, RopeScaling};

/// Every this many layers, one has no window, if the config does not list the kinds.
const FULL_EVERY: usize = 4;

/// The numbers.
pub(crate) fn config(config: &Value) -> Result<HybridConfig> {
    let fields = Fields::new(config);
    let defaults =
        Defaults { context: 2048, eps: 1e-5, theta: 500_000.0, window: Some(4096), ..Defaults::default() };
    let mut config = common(&fields, defaults)?;
    if fields.get("layer_types").is_none() {
        for (i, kind) in config.layers.iter_mut().enumerate() {
            if !(i + 1).is_multiple_of(FULL_EVERY) {
                *kind = MixerKind::SlidingAttention;
            }
        }
    }
    transformer::drop_unused_windows(&mut config);
    Ok(config)
}

/// The numbers that do not depend on windows, also of `olmo2`.
pub(crate) fn common(fields: &Fields<'_>, defaults: Defaults) -> Result<HybridConfig> {
    let mut config = transformer::config(fields, defaults)?;
    // Published configs name the scaling without saying that it is only for layers without a window.
    if !rope::is_by_layer_type(fields) {
        config.sliding_rope_scaling = RopeScaling::None;
    }
    let bias = fields.flag("attention_bias");
    config.traits = Traits {
        qkv_bias: bias,
        output_bias: bias,
        head_norms: HeadNorms::Together,
        norms: NormNames {
            mixer: None,
            mixer_out: Some("post_attention_layernorm"),
            ff: None,
            ff_out: Some("post_feedforward_layernorm"),
        },
        ..config.traits
    };
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_layers_that_see_everything_are_stretched() {
        let mut json = json!({"model_type": "olmo3", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 100,
            "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 65536,
            "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.2,
                "original_max_position_embeddings": 8192}});
        let c = config(&json).expect("the rest are defaults");
        let (sliding, full) = (MixerKind::SlidingAttention, MixerKind::Attention);
        assert_eq!((&c.layers[..], c.window), (&[sliding, sliding, sliding, full][..], Some(4096)));
        assert_eq!((c.rope_theta, c.sliding_rope_theta, c.kv_heads), (5e5, 5e5, 4));
        assert_eq!((c.score_scale(sliding), c.score_scale(full)), (0.25, 0.25 * 1.2f64.powi(2)));
        json["rope_parameters"] = json!({"full_attention": json["rope_scaling"].take(),
            "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}});
        let c = config(&json).expect("the rest are defaults");
        assert_eq!((c.rope_theta, c.sliding_rope_theta), (5e5, 1e4));
        assert_eq!(c.sliding_rope_scaling, RopeScaling::Linear { factor: 2.0 });
    }
}
