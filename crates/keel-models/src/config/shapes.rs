//! Sizes of published models, for `keel bench --shape`: a config without a checkpoint.

use serde_json::{Value, json};

/// Names that [`shape`] knows.
pub const NAMES: [&str; 9] = [
    "qwen3.5-0.8b",
    "qwen3.5-4b",
    "qwen3.5-9b",
    "qwen3.5-27b",
    "qwen3.5-35b-a3b",
    "qwen3.5-122b-a10b",
    "qwen3.5-397b-a17b",
    "qwen3-8b",
    "qwen3-30b-a3b",
];

/// Numbers that differ between sizes of the family.
struct Size {
    hidden: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    key_heads: usize,
    value_heads: usize,
    intermediate: usize,
    experts: Option<Experts>,
    tied: bool,
}

/// Numbers of a mixture.
struct Experts {
    count: usize,
    /// Experts per token.
    chosen: usize,
}

/// The config of a published size; `None` for an unknown name.
pub fn shape(name: &str) -> Option<Value> {
    let dense = |hidden, layers, heads, kv_heads, value_heads, intermediate, tied| Size {
        hidden,
        layers,
        heads,
        kv_heads,
        key_heads: 16,
        value_heads,
        intermediate,
        experts: None,
        tied,
    };
    let sparse = |hidden, layers, heads, value_heads, intermediate, count, chosen| Size {
        hidden,
        layers,
        heads,
        kv_heads: 2,
        key_heads: 16,
        value_heads,
        intermediate,
        experts: Some(Experts { count, chosen }),
        tied: false,
    };
    let size = match name {
        "qwen3.5-0.8b" => dense(1024, 24, 8, 2, 16, 3584, true),
        "qwen3.5-4b" => dense(2560, 32, 16, 4, 32, 9216, true),
        "qwen3.5-9b" => dense(4096, 32, 16, 4, 32, 12288, false),
        "qwen3.5-27b" => dense(5120, 64, 24, 4, 48, 17408, false),
        "qwen3.5-35b-a3b" => sparse(2048, 40, 16, 32, 512, 256, 8),
        "qwen3.5-122b-a10b" => sparse(3072, 48, 32, 64, 1024, 256, 8),
        "qwen3.5-397b-a17b" => sparse(4096, 60, 32, 64, 1024, 512, 10),
        "qwen3-8b" => return Some(qwen3_8b()),
        "qwen3-30b-a3b" => return Some(qwen3_30b_a3b()),
        _ => return None,
    };
    Some(config(&size))
}

/// The same with its multi-token-prediction head of one layer, as published; `None` if the model has no such head.
pub fn shape_with_mtp_head(name: &str) -> Option<Value> {
    let mut config = shape(name)?;
    config["model_type"].as_str()?.starts_with("qwen3_5").then(|| {
        config["mtp_num_hidden_layers"] = 1.into();
        config
    })
}

fn qwen3_8b() -> Value {
    json!({
        "model_type": "qwen3",
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151_936,
        "tie_word_embeddings": false,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0
    })
}

fn qwen3_30b_a3b() -> Value {
    json!({
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": true,
        "vocab_size": 151_936,
        "tie_word_embeddings": false,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0
    })
}

fn config(size: &Size) -> Value {
    let mut config = json!({
        "model_type": if size.experts.is_some() { "qwen3_5_moe" } else { "qwen3_5" },
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "full_attention_interval": 4,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": 256,
        "linear_num_key_heads": size.key_heads,
        "linear_num_value_heads": size.value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "intermediate_size": size.intermediate,
        "vocab_size": 248_320,
        "tie_word_embeddings": size.tied,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25}
    });
    if let Some(Experts { count, chosen }) = size.experts {
        config["num_experts"] = count.into();
        config["num_experts_per_tok"] = chosen.into();
        config["moe_intermediate_size"] = size.intermediate.into();
        config["shared_expert_intermediate_size"] = size.intermediate.into();
    }
    config
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_name_has_a_sound_config() {
        for name in super::NAMES {
            let config = super::shape(name).expect("listed");
            crate::read_config(&config).unwrap_or_else(|e| panic!("{name}: {e}"));
        }
        assert!(super::shape("qwen9").is_none());
        let layers =
            |name| Some(crate::read_config(&super::shape_with_mtp_head(name)?).expect("sound").mtp_layers);
        assert_eq!(["qwen3.5-4b", "qwen3.5-35b-a3b", "qwen3-8b"].map(layers), [Some(1), Some(1), None]);
    }
}
