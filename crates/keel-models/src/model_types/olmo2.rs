//! `olmo2`: OLMo 2 (Team OLMo, 2024): as `olmo3`, but no layer has a window.
//!
//! Reference: `modeling_olmo2.py` of transformers.

use serde_json::Value;

use crate::config::fields::Fields;
use crate::model_types::olmo3;
use crate::model_types::transformer::{self, Defaults};
use crate::{HybridConfig, Result};

/// The numbers.
pub(crate) fn config(config: &Value) -> Result<HybridConfig> {
    let defaults = Defaults { context: 2048, eps: 1e-5, ..Defaults::default() };
    let mut config = olmo3::common(&Fields::new(config), defaults)?;
    transformer::windows_nowhere(&mut config);
    Ok(config)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    #[test]
    fn it_is_olmo3_without_windows() {
        let mut json = json!({"model_type": "olmo2", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 100,
            "num_hidden_layers": 2, "num_attention_heads": 4});
        let defaults = crate::read_config(&json).expect("the rest are defaults");
        assert_eq!((defaults.context_max, defaults.eps, defaults.rope_theta), (2048, 1e-5, 1e4));
        json["rope_theta"] = 5e5.into();
        let olmo2 = crate::read_config(&json).expect("the rest are defaults");
        assert_eq!(olmo2.window, None);
        json["model_type"] = "olmo3".into();
        json["layer_types"] = json!(["full_attention", "full_attention"]);
        let mut olmo3 = crate::read_config(&json).expect("the rest are defaults");
        olmo3.model_type.clone_from(&olmo2.model_type);
        assert_eq!(olmo2, olmo3);
    }
}
