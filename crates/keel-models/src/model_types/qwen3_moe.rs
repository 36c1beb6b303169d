//! `qwen3_moe`: as `qwen3`, with experts in most layers and no shared expert.
//!
//! Reference: `modeling_qwen3_moe.py` of transformers.

use serde_json::Value;

use crate::config::fields::Fields;
use crate::{HybridConfig, ModelError, Result};

pub(crate) use crate::model_types::qwen3::load;

/// The numbers.
pub(crate) fn config(config: &Value) -> Result<HybridConfig> {
    let fields = Fields::new(config);
    let mut config = crate::model_types::qwen3::config(config)?;
    let every = fields.size_or("decoder_sparse_step", 1)?;
    let listed = fields.get("mlp_only_layers").and_then(Value::as_array);
    let listed: Vec<u64> = listed.into_iter().flatten().filter_map(Value::as_u64).collect();
    config.moe = fields.moe()?;
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
