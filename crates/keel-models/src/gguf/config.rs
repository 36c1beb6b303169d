//! Converts GGUF metadata to a config.json.

use keel_weights::TensorSource;
use keel_weights::gguf::{GgufFile, GgufValue};
use serde_json::{Map, Value, json};

use super::{ARCHITECTURES, DIVISORS, LONG_DIVISORS, SHORT_DIVISORS, SMOLLM3_INTERVAL};
use crate::model_types::transformer::LAYERS_MAX;
use crate::{ModelError, Result};

/// The config that a Hugging Face checkpoint of the same model would have.
///
/// # Errors
/// For an architecture that is not supported, or a key that is missing or of the wrong type.
pub fn config(file: &GgufFile) -> Result<Value> {
    let metadata = file.metadata();
    let arch = metadata.get("general.architecture").and_then(GgufValue::as_str).unwrap_or_default();
    let keys = Keys { file, arch };
    let mut config = keys.common()?;
    let own = match arch {
        "llama" => keys.llama()?,
        "mistral3" => keys.mistral3(),
        "smollm3" => json!({"model_type": "smollm3", "no_rope_layer_interval": SMOLLM3_INTERVAL}),
        "phi3" => keys.phi3()?,
        "olmo2" => keys.olmo2()?,
        "glm4" => keys.glm4()?,
        "qwen2" => json!({"model_type": "qwen2"}),
        "qwen3" => json!({"model_type": "qwen3"}),
        "qwen3vl" => json!({"model_type": "qwen3_vl"}),
        "qwen3vlmoe" => merged(json!({"model_type": "qwen3_vl_moe"}), keys.experts()?),
        "qwen3moe" => merged(json!({"model_type": "qwen3_moe"}), keys.experts()?),
        "gemma3" => keys.gemma3()?,
        "qwen35" => merged(json!({"model_type": "qwen3_5"}), keys.recurrent()?),
        "qwen35moe" | "qwen3next" => {
            merged(merged(json!({"model_type": "qwen3_5_moe"}), keys.recurrent()?), keys.experts()?)
        }
        other => {
            let supported = ARCHITECTURES.join(", ");
            let reason = format!("GGUF architecture {other:?} is not supported; supported are {supported}");
            return Err(ModelError::Config(reason));
        }
    };
    config = merged(merged(config, keys.biases()?), own);
    let rope = match (keys.rope_scaling()?, keys.sections()) {
        (None, Some(sections)) => Some(merged(json!({"rope_type": "default"}), sections)),
        (Some(scaling), Some(sections)) => Some(merged(scaling, sections)),
        (scaling, None) => scaling,
    };
    if let Some(rope) = rope {
        config["rope_scaling"] = rope;
    }
    Ok(config)
}

/// Layers of attention that may have biases.
const QKV: [&str; 3] = ["attn_q", "attn_k", "attn_v"];

/// The first object with the second object's entries added.
fn merged(mut into: Value, from: Value) -> Value {
    if let (Value::Object(into), Value::Object(from)) = (&mut into, from) {
        into.extend(from);
    }
    into
}

/// The kinds of layers from a list of booleans: true stands for `kind`, false for full attention.
fn kinds(is: &[GgufValue], layers: u64, kind: &str) -> Value {
    let kind = |is: &GgufValue| if is.as_bool() == Some(true) { kind } else { "full_attention" };
    is.iter().take(layers as usize).map(kind).collect()
}

/// Metadata of one architecture.
struct Keys<'a> {
    file: &'a GgufFile,
    arch: &'a str,
}

impl Keys<'_> {
    fn get(&self, key: &str) -> Option<&GgufValue> {
        self.file.metadata().get(&format!("{}.{key}", self.arch))
    }

    /// A size. A list with one entry for each layer is accepted if all entries are equal.
    fn size_or_none(&self, key: &str) -> Result<Option<u64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let one = match value.as_array() {
            Some([first, rest @ ..]) if rest.iter().all(|other| other == first) => first.as_u64(),
            Some(_) => None,
            None => value.as_u64(),
        };
        one.map(Some).ok_or_else(|| {
            ModelError::Config(format!("{}.{key} is not a whole number, the same for all layers", self.arch))
        })
    }

    fn size(&self, key: &str) -> Result<u64> {
        let missing = || ModelError::Config(format!("the GGUF metadata has no {}.{key}", self.arch));
        self.size_or_none(key)?.ok_or_else(missing)
    }

    fn number(&self, key: &str) -> Option<f64> {
        self.get(key)?.as_f64()
    }

    fn head_dim(&self) -> Result<u64> {
        let (width, heads) = (self.size("embedding_length")?, self.size("attention.head_count")?);
        Ok(self.size_or_none("attention.key_length")?.unwrap_or(width / heads.max(1)))
    }

    /// Elements of a head that rotate: all of them, if the file does not say.
    fn turning(&self) -> Result<u64> {
        Ok(self.size_or_none("rope.dimension_count")?.unwrap_or(self.head_dim()?))
    }

    /// Number of layers of the multi-token-prediction head.
    fn mtp_layers(&self) -> Result<u64> {
        Ok(self.size_or_none("nextn_predict_layers")?.unwrap_or(0))
    }

    /// Number of layers of the model without that head.
    fn layers(&self) -> Result<u64> {
        let blocks = self.size("block_count")?;
        if blocks > LAYERS_MAX as u64 {
            let reason = format!("{}.block_count is {blocks}, at most {LAYERS_MAX} are read", self.arch);
            return Err(ModelError::Config(reason));
        }
        Ok(blocks.saturating_sub(self.mtp_layers()?))
    }

    fn common(&self) -> Result<Value> {
        let vocab = self.file.linear_info("token_embd")?.rows;
        let layers = self.layers()?;
        let heads = self.size("attention.head_count")?;
        let mut config = json!({
            "hidden_size": self.size("embedding_length")?,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self.size_or_none("attention.head_count_kv")?.unwrap_or(heads),
            "head_dim": self.head_dim()?,
            "vocab_size": vocab,
            "max_position_embeddings": self.size("context_length")?,
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon").unwrap_or(1e-6),
            "rope_theta": self.number("rope.freq_base").unwrap_or(10_000.0),
            "tie_word_embeddings": !self.file.contains("output.weight"),
        });
        if let Some(width) = self.size_or_none("feed_forward_length")? {
            config["intermediate_size"] = width.into();
        }
        // Written also where all elements turn: model types differ in their defaults.
        config["partial_rotary_factor"] = (self.turning()? as f64 / self.head_dim()?.max(1) as f64).into();
        for (key, id) in [("bos_token_id", "bos"), ("eos_token_id", "eos")] {
            let id = self.file.metadata().get(&format!("tokenizer.ggml.{id}_token_id"));
            if let Some(id) = id.and_then(GgufValue::as_u64) {
                config[key] = id.into();
            }
        }
        Ok(config)
    }

    fn llama(&self) -> Result<Value> {
        if self.size_or_none("expert_count")?.unwrap_or(0) > 0 {
            return Err(ModelError::Config("llama with experts is not supported".into()));
        }
        Ok(json!({"model_type": "llama"}))
    }

    /// Whether attention and feed-forward layers have biases. An error for those that the model type does not have:
    /// without them the model would be another.
    fn biases(&self) -> Result<Value> {
        let found = self.file.names().filter_map(|name| {
            let (_, part) = name.strip_prefix("blk.")?.strip_suffix(".bias")?.split_once('.')?;
            // A parameter of recurrent layers, which is always there.
            (part != "ssm_dt").then_some((name, part))
        });
        let allowed = match self.arch {
            "llama" | "smollm3" => [&QKV[..], &["attn_output"], &["ffn_gate", "ffn_up", "ffn_down"]].concat(),
            "qwen3" | "qwen3moe" | "qwen3vl" | "qwen3vlmoe" | "olmo2" => {
                [&QKV[..], &["attn_output"]].concat()
            }
            "qwen2" | "glm4" => QKV.to_vec(),
            _ => Vec::new(),
        };
        let (mut attention, mut mlp) = (false, false);
        for (name, part) in found {
            if !allowed.contains(&part) {
                let reason = format!(
                    "the GGUF file has {name}; files of {} with this bias are not supported",
                    self.arch
                );
                return Err(ModelError::Config(reason));
            }
            attention |= part.starts_with("attn");
            mlp |= part.starts_with("ffn");
        }
        Ok(json!({"attention_bias": attention, "mlp_bias": mlp}))
    }

    /// Mistral's models from Small 3.1 on, and Ministral 3, which has growing queries.
    fn mistral3(&self) -> Value {
        let grows = self.number("attention.temperature_scale").is_some();
        json!({"model_type": if grows { "ministral3" } else { "mistral" }, "sliding_window": null})
    }

    fn phi3(&self) -> Result<Value> {
        let window = self.size_or_none("attention.sliding_window")?.filter(|window| *window > 0);
        Ok(json!({"model_type": "phi3", "sliding_window": window}))
    }

    /// OLMo 3, and OLMo 2, which has no windows.
    fn olmo2(&self) -> Result<Value> {
        let layers = self.layers()?;
        let window = self.size_or_none("attention.sliding_window")?.filter(|window| *window > 0);
        let pattern = self.get("attention.sliding_window_pattern");
        let kinds = match pattern.and_then(GgufValue::as_array) {
            _ if window.is_none() => (0..layers).map(|_| "full_attention").collect(),
            Some(slides) => kinds(slides, layers, "sliding_attention"),
            None => {
                let every = pattern.and_then(GgufValue::as_u64).unwrap_or(4).max(1);
                let slides = |i: &u64| !(i + 1).is_multiple_of(every);
                (0..layers).map(|i| if slides(&i) { "sliding_attention" } else { "full_attention" }).collect()
            }
        };
        Ok(json!({"model_type": "olmo3", "sliding_window": window, "layer_types": kinds}))
    }

    fn glm4(&self) -> Result<Value> {
        // If positions have several axes, files have another order of rows.
        let axes = self.get("rope.dimension_sections").and_then(GgufValue::as_array).unwrap_or_default();
        if axes.iter().filter(|axis| axis.as_u64() != Some(0)).count() > 1 {
            let reason = "glm4.rope.dimension_sections is given: GLM-4V is not supported";
            return Err(ModelError::Config(reason.into()));
        }
        Ok(json!({"model_type": "glm4"}))
    }

    fn gemma3(&self) -> Result<Value> {
        let layers = self.layers()?;
        let per_head = self.size("embedding_length")? / self.size("attention.head_count")?.max(1);
        let query_scalar = super::query_scalar(self.arch, layers, per_head, self.head_dim()?);
        let pattern = self.get("attention.sliding_window_pattern");
        let mut config = json!({
            "model_type": "gemma3_text",
            "sliding_window": self.size("attention.sliding_window")?,
            "sliding_window_pattern": pattern.and_then(GgufValue::as_u64).unwrap_or(6),
            "query_pre_attn_scalar": query_scalar,
            "rope_local_base_freq": self.number("rope.freq_base_swa").unwrap_or(10_000.0),
        });
        if let Some(slides) = pattern.and_then(GgufValue::as_array) {
            config["layer_types"] = kinds(slides, layers, "sliding_attention");
        }
        for cap in ["attn_logit_softcapping", "final_logit_softcapping"] {
            if let Some(most) = self.number(cap).filter(|most| *most != 0.0) {
                config[cap] = most.into();
            }
        }
        Ok(config)
    }

    fn experts(&self) -> Result<Value> {
        const SHARED: &str = "blk.0.ffn_gate_shexp";
        let shared = match self.size_or_none("expert_shared_feed_forward_length")? {
            None if self.file.contains(&format!("{SHARED}.weight")) => {
                self.file.linear_info(SHARED)?.rows as u64
            }
            width => width.unwrap_or(0),
        };
        Ok(json!({
            "num_experts": self.size("expert_count")?,
            "num_experts_per_tok": self.size("expert_used_count")?,
            "moe_intermediate_size": self.size("expert_feed_forward_length")?,
            "shared_expert_intermediate_size": shared,
            "norm_topk_prob": true,
        }))
    }

    fn recurrent(&self) -> Result<Value> {
        let (heads, width) = (self.size("ssm.time_step_rank")?, self.size("ssm.inner_size")?);
        let (layers, mtp_layers) = (self.layers()?, self.mtp_layers()?);
        let mut config = json!({
            "linear_num_key_heads": self.size("ssm.group_count")?,
            "linear_num_value_heads": heads,
            "linear_key_head_dim": self.size("ssm.state_size")?,
            "linear_value_head_dim": width / heads.max(1),
            "linear_conv_kernel_dim": self.size("ssm.conv_kernel")?,
            "full_attention_interval": self.size_or_none("full_attention_interval")?.unwrap_or(4),
            "mtp_num_hidden_layers": mtp_layers,
        });
        if let Some(recurrent) = self.get("attention.recurrent_layers").and_then(GgufValue::as_array) {
            config["layer_types"] = kinds(recurrent, layers, "linear_attention");
        }
        Ok(config)
    }

    /// A table with a divisor for each rotary frequency. Its values are checked with the config.
    fn divisors(&self, name: &str) -> Result<Vec<f32>> {
        let expected = [usize::try_from(self.turning()? / 2).unwrap_or(usize::MAX)];
        let table = self.file.tensor(name)?.expect_shape(&expected)?.to_f32()?;
        self.file.check_intact()?;
        Ok(table)
    }

    /// Two tables of divisors: for short and for long sequences.
    fn long_rope(&self) -> Result<Value> {
        let mut scaling = json!({
            "rope_type": "longrope",
            "short_factor": self.divisors(SHORT_DIVISORS)?,
            "long_factor": self.divisors(LONG_DIVISORS)?,
            "original_max_position_embeddings": self.size("rope.scaling.original_context_length")?,
        });
        if let Some(factor) = self.number("rope.scaling.attn_factor") {
            scaling["attention_factor"] = factor.into();
        }
        Ok(scaling)
    }

    /// How many frequencies turn with time, row and column of a picture. They alternate in models that may see.
    fn sections(&self) -> Option<Value> {
        if !super::tower::may_see(self.file) {
            return None;
        }
        let sections = self.get("rope.dimension_sections")?.as_array()?;
        let counts: Vec<u64> = sections.iter().take(3).filter_map(GgufValue::as_u64).collect();
        Some(json!({"mrope_section": counts, "mrope_interleaved": true}))
    }

    fn rope_scaling(&self) -> Result<Option<Value>> {
        if self.file.contains(DIVISORS) {
            return Ok(Some(json!({"rope_type": "divisors", "divisors": self.divisors(DIVISORS)?})));
        }
        if self.file.contains(LONG_DIVISORS) {
            return self.long_rope().map(Some);
        }
        // Old files have only a factor, which is linear.
        let has_factor = ["rope.scaling.factor", "rope.scale_linear"]
            .iter()
            .any(|key| self.number(key).is_some_and(|factor| factor != 0.0));
        let kind = self.get("rope.scaling.type").and_then(GgufValue::as_str);
        let kind = match kind.unwrap_or(if has_factor { "linear" } else { "none" }) {
            // The growth of queries is told with the scaling. Without one, `ministral3` takes its published models'.
            "none" if self.number("attention.temperature_scale").is_some() => "default",
            "none" => return Ok(None),
            kind => kind,
        };
        let mut scaling = Map::from_iter([("rope_type".to_string(), kind.into())]);
        let mut copy = |to: &str, from: &[&str]| {
            if let Some(number) = from.iter().find_map(|key| self.number(key)) {
                scaling.insert(to.into(), number.into());
            }
        };
        copy("factor", &["rope.scaling.factor", "rope.scale_linear"]);
        copy("original_max_position_embeddings", &["rope.scaling.original_context_length", "context_length"]);
        copy("attention_factor", &["rope.scaling.yarn_attn_factor", "rope.scaling.attn_factor"]);
        copy("mscale", &["rope.scaling.yarn_log_multiplier"]);
        copy("mscale_all_dim", &["rope.scaling.yarn_log_multiplier"]);
        copy("llama_4_scaling_beta", &["attention.temperature_scale"]);
        copy("beta_fast", &["rope.scaling.yarn_beta_fast"]);
        copy("beta_slow", &["rope.scaling.yarn_beta_slow"]);
        Ok(Some(Value::Object(scaling)))
    }
}
