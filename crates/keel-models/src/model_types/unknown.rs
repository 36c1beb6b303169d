//! Explains why a model of an unknown type cannot be read, if its tensors have Llama's names.

use serde_json::Value;

use crate::config::fields::Fields;
use crate::loading::Parameters;
use crate::{MODEL_TYPES, ModelError};

/// Fields that a `llama` config may have.
const UNDERSTOOD: [&str; 17] = [
    "attention_bias",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "mlp_bias",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "original_max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "tie_word_embeddings",
    "vocab_size",
];

/// Fields that do not change the model's results.
const WITHOUT_EFFECT: [&str; 22] = [
    "_name_or_path",
    "architectures",
    "auto_map",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "gradient_checkpointing",
    "initializer_range",
    "is_decoder",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "pretraining_tp",
    "quantization",
    "quantization_config",
    "return_dict",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "unk_token_id",
    "use_cache",
];

/// Tensors that each layer of Llama has.
const PARTS: [&str; 9] = [
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
];

/// Additional tensors in layers of other models.
const FURTHER_PARTS: [&str; 5] = [
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "self_attn.sinks",
    "pre_feedforward_layernorm.weight",
    "post_feedforward_layernorm.weight",
];

/// The error for a config of an unknown type. If its tensors have Llama's names, it lists the fields that are not
/// supported.
pub(crate) fn error(config: &Value, parameters: &dyn Parameters) -> ModelError {
    let found = Fields::new(config).model_type();
    let prefix = "model.layers.0.";
    let has = |part: &str| {
        ["weight", "qweight"].iter().any(|kind| parameters.contains(&format!("{prefix}{part}.{kind}")))
    };
    if !PARTS.iter().all(|part| has(part)) {
        return ModelError::UnknownModelType { found, supported: MODEL_TYPES.join(", ") };
    }
    let further = FURTHER_PARTS.iter().filter(|part| parameters.contains(&format!("{prefix}{part}")));
    let further = further.map(|part| format!("the tensor {prefix}{part}"));
    let not_understood: Vec<String> = fields(config).chain(further).collect();
    if not_understood.is_empty() {
        return ModelError::Config(format!(
            "model_type {found:?} is the only field that is not understood: the tensors and all other fields are those of \
             llama; with \"model_type\": \"llama\" in config.json the model is read"
        ));
    }
    ModelError::Config(format!(
        "model_type {found:?} is not supported; its tensors have llama's names, but {} not understood: {}",
        if not_understood.len() == 1 { "this is" } else { "these are" },
        not_understood.join(", ")
    ))
}

/// Fields that `llama` does not have, with their values. Null and false have no effect.
fn fields(config: &Value) -> impl Iterator<Item = String> {
    let known = |key: &str| {
        UNDERSTOOD.contains(&key)
            || WITHOUT_EFFECT.contains(&key)
            || key.ends_with("dropout")
            || key.ends_with("pdrop")
    };
    let asks = |value: &Value| !value.is_null() && *value != Value::Bool(false);
    let entries = config.as_object().into_iter().flatten();
    entries
        .filter(move |(key, value)| !known(key) && asks(value))
        .map(|(key, value)| format!("{key} ({value})"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loading::{Altered, RandomParameters};
    use keel_array::{DType, WeightFormat};
    use serde_json::json;

    /// Has every tensor except norms of heads.
    struct Llama(RandomParameters);

    impl Altered for Llama {
        fn inner(&self) -> &dyn Parameters {
            &self.0
        }

        fn contains(&self, name: &str) -> bool {
            !FURTHER_PARTS.iter().any(|part| name.ends_with(part))
        }
    }

    #[test]
    fn the_fields_that_are_not_understood_are_named() {
        let dense = || RandomParameters { format: WeightFormat::Dense(DType::F32) };
        let mut config = json!({"model_type": "granite", "hidden_size": 64, "num_hidden_layers": 2, "dtype": "bfloat16",
            "attention_dropout": 0.1, "attention_multiplier": 0.5, "logits_scaling": 8, "use_qk_norm": false,
            "sliding_window": null});
        let message = error(&config, &Llama(dense())).to_string();
        assert!(message.contains("attention_multiplier (0.5), logits_scaling (8)"), "{message}");
        assert!(!message.contains("dropout") && !message.contains("use_qk_norm"), "{message}");
        // Random parameters contain every tensor name.
        let message = error(&config, &dense()).to_string();
        assert!(message.contains("the tensor model.layers.0.self_attn.q_norm.weight"), "{message}");
        for key in ["attention_multiplier", "logits_scaling"] {
            config[key] = Value::Null;
        }
        let message = error(&config, &Llama(dense())).to_string();
        assert!(message.contains("the only field that is not understood"), "{message}");
    }
}
