//! `qwen2`: Qwen2 and Qwen2.5 (Yang et al., 2024): biases on queries, keys and values.
//!
//! Reference: `modeling_qwen2.py` of transformers.

use serde_json::Value;

use crate::model_types::qwen3;
use crate::model_types::transformer::Traits;
use crate::{HybridConfig, Result};

/// The numbers, which are those of `qwen3`. The biases do not depend on the config.
pub(crate) fn config(config: &Value) -> Result<HybridConfig> {
    let mut config = qwen3::config(config)?;
    config.traits = Traits { qkv_bias: true, activation: config.traits.activation, ..Traits::default() };
    Ok(config)
}
