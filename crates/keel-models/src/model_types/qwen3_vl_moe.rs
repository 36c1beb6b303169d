//! `qwen3_vl_moe`, text part: as `qwen3_moe`, but the weights of the chosen experts always add up to 1.
//!
//! Reference: `modeling_qwen3_vl_moe.py` of transformers. Published files store the experts' matrices by columns, which
//! keel-weights hides.

use serde_json::Value;

use crate::model_types::transformer;
use crate::{HybridConfig, Result};

/// The numbers.
pub(crate) fn config(config: &Value) -> Result<HybridConfig> {
    let mut config = crate::model_types::qwen3_moe::config(config)?;
    transformer::windows_nowhere(&mut config);
    if let Some(moe) = &mut config.moe {
        moe.normalise = true;
    }
    Ok(config)
}
