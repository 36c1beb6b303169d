//! `phi3`: Phi-3, Phi-3.5, Phi-4 and Phi-4-mini (Abdin et al., 2024). Queries, keys and values are one layer, gate and
//! up another. Models with a long context have LongRoPE.
//!
//! Reference: `modeling_phi3.py` of transformers.

use serde_json::Value;

use crate::config::fields::Fields;
use crate::model_types::transformer::{self, Defaults};
use crate::{HybridConfig, Result};

/// The numbers.
pub(crate) fn config(config: &Value) -> Result<HybridConfig> {
    let fields = Fields::new(config);
    let defaults = Defaults { context: 4096, eps: 1e-5, ..Defaults::default() };
    let mut config = transformer::config(&fields, defaults)?;
    transformer::windows_everywhere(&mut config);
    (config.traits.fused_qkv, config.traits.fused_gate_up) = (true, true);
    Ok(config)
}
