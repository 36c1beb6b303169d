//! `qwen3_moe`: as `qwen3`, with experts in most layers and no shared expert.
//!
//! Reference: `modeling_qwen3_moe.py` of transformers.

use serde_json::Value;

use crate::config::fields::Fields;
use crate::model_types::qwen3;
use crate::model_types::transformer::{self, Defaults};
use crate::{HybridConfig, ModelError, Result};

/// The numbers.
pub(crate) fn config(config: &Value) -> Result<HybridConfig> {
    let fields = Fields::new(config);
    transformer::silu_alone(&fields)?;
    let defaults = Defaults { window: transformer::WINDOW_ON_REQUEST, ..Defaults::default() };
    let mut config = transformer::config(&fields, defaults)?;
    config.traits = qwen3::traits(&fields, config.traits);
    // All layers see the window, unlike those of `qwen3`.
    if fields.flag("use_sliding_window") {
        transformer::windows_everywhere(&mut config);
    } else {
        transformer::windows_nowhere(&mut config);
    }
    let every = fields.size_or("decoder_sparse_step", 1)?;
    let listed = fields.get("mlp_only_layers").and_then(Value::as_array);
    let listed: Vec<u64> = listed.into_iter().flatten().filter_map(Value::as_u64).collect();
    config.moe = fields.moe(0)?;
    let Some(moe) = &mut config.moe else {
        return Err(ModelError::Config("num_experts is missing".into()));
    };
    // The reference's default, which differs from the hybrid models'.
    moe.normalise = fields.flag("norm_topk_prob");
    let is_dense = |i: &usize| listed.contains(&(*i as u64)) || every == 0 || !(*i + 1).is_multiple_of(every);
    moe.dense_layers = (0..config.layers.len()).filter(is_dense).collect();
    if !moe.dense_layers.is_empty() && config.intermediate.is_none() {
        return Err(ModelError::Config(
            "intermediate_size is missing, but some layers have no experts".into(),
        ));
    }
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MixerKind;
    use serde_json::json;

    fn plain(more: Value) -> Result<HybridConfig> {
        let mut json = json!({"model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 100,
            "num_hidden_layers": 30, "num_attention_heads": 4, "max_position_embeddings": 32768,
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48});
        more.as_object().into_iter().flatten().for_each(|(key, value)| json[key] = value.clone());
        config(&json)
    }

    #[test]
    fn all_layers_see_the_window_where_it_is_enabled() {
        let all = |json: Value, kind: MixerKind, window: Option<usize>| {
            let c = plain(json.clone()).expect("complete");
            assert_eq!((c.window, &c.layers[..]), (window, &[kind; 30][..]), "{json}");
            assert_eq!(c.moe.expect("it has experts").shared_intermediate, None, "{json}");
        };
        all(json!({"sliding_window": 16}), MixerKind::Attention, None);
        all(json!({"use_sliding_window": true}), MixerKind::SlidingAttention, Some(4096));
        let asked = json!({"use_sliding_window": true, "sliding_window": 16, "max_window_layers": 20});
        all(asked, MixerKind::SlidingAttention, Some(16));
    }

    #[test]
    fn experts_have_one_activation() {
        let message =
            plain(json!({"hidden_act": "gelu_pytorch_tanh"})).expect_err("another model").to_string();
        assert!(message.contains("hidden_act is \"gelu_pytorch_tanh\", which is not supported"), "{message}");
    }
}
