//! Fixtures written as GGUF files by the rules of the common converters also give the reference logits.

use std::path::Path;

use crate::common::{all_logits, exact, expected, fixture, relative_error, runtime};
use keel_engine::Engine;
use keel_models::gguf::GgufParameters;
use keel_testkit::fixtures::{GgufBuilder, GgufTensor};
use keel_testkit::fixtures_plain::{OTHERS, other_fixture};
use keel_weights::gguf::GgufFile;
use keel_weights::{Checkpoint, TensorSource};
use serde_json::Value;

/// Reorders blocks of `block` values: the new block `i` is the old block `from(i)`.
fn reorder(values: &mut [f32], block: usize, from: impl Fn(usize) -> usize) {
    let before = values.to_vec();
    for (i, out) in values.chunks_exact_mut(block).enumerate() {
        out.copy_from_slice(&before[from(i) * block..][..block]);
    }
}

/// The converters' rules for one architecture.
struct Rules {
    arch: &'static str,
    text: Value,
}

impl Rules {
    fn size(&self, key: &str) -> usize {
        self.text[key].as_u64().unwrap_or(0) as usize
    }

    fn head_dim(&self) -> usize {
        let computed = self.size("hidden_size") / self.size("num_attention_heads");
        if self.text["head_dim"].is_u64() { self.size("head_dim") } else { computed }
    }

    fn name(&self, name: &str) -> String {
        let layers = self.size("num_hidden_layers");
        let name = name.replace("model.language_model.", "model.");
        let name = name.replace("mtp.layers.0.", &format!("model.layers.{layers}."));
        for (from, to) in [
            ("mtp.fc.", "eh_proj."),
            ("mtp.pre_fc_norm_embedding.", "enorm."),
            ("mtp.pre_fc_norm_hidden.", "hnorm."),
            ("mtp.norm.", "shared_head_norm."),
        ] {
            if let Some(rest) = name.strip_prefix(from) {
                return format!("blk.{layers}.nextn.{to}{rest}");
            }
        }
        let post_attention = if matches!(self.arch, "gemma3" | "olmo2" | "qwen35" | "qwen35moe") {
            "post_attention_norm"
        } else {
            "ffn_norm"
        };
        let mut name = name.replace("model.layers.", "blk.");
        for (from, to) in [
            ("lm_head", "output"),
            ("model.embed_tokens", "token_embd"),
            ("model.norm", "output_norm"),
            ("post_self_attn_layernorm", "post_attention_norm"),
            ("post_mlp_layernorm", "post_ffw_norm"),
            ("self_attn.qkv_proj", "attn_qkv"),
            ("mlp.gate_up_proj", "ffn_up"),
            ("input_layernorm", "attn_norm"),
            ("post_attention_layernorm", post_attention),
            ("pre_feedforward_layernorm", "ffn_norm"),
            ("post_feedforward_layernorm", "post_ffw_norm"),
            ("self_attn.o_proj", "attn_output"),
            ("self_attn.q_", "attn_q_"),
            ("self_attn.k_", "attn_k_"),
            ("self_attn.v_", "attn_v_"),
            ("_q_proj", "_q"),
            ("_k_proj", "_k"),
            ("_v_proj", "_v"),
            ("linear_attn.in_proj_qkv", "attn_qkv"),
            ("linear_attn.in_proj_z", "attn_gate"),
            ("linear_attn.in_proj_a", "ssm_alpha"),
            ("linear_attn.in_proj_b", "ssm_beta"),
            ("linear_attn.conv1d", "ssm_conv1d"),
            ("linear_attn.A_log", "ssm_a"),
            ("linear_attn.dt_bias", "ssm_dt.bias"),
            ("linear_attn.norm", "ssm_norm"),
            ("linear_attn.out_proj", "ssm_out"),
            ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
            ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
            ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
            ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
            ("mlp.gate_proj", "ffn_gate"),
            ("mlp.up_proj", "ffn_up"),
            ("mlp.down_proj", "ffn_down"),
            ("mlp.gate.", "ffn_gate_inp."),
        ] {
            name = name.replace(from, to);
        }
        name.replace("attn_q_proj", "attn_q")
            .replace("attn_k_proj", "attn_k")
            .replace("attn_v_proj", "attn_v")
    }

    fn transform(&self, name: &str, tensor: &mut GgufTensor) {
        let cols = tensor.shape.last().copied().unwrap_or(1);
        let permutes = matches!(self.arch, "llama" | "mistral3" | "smollm3");
        if permutes && (name.ends_with("q_proj.weight") || name.ends_with("k_proj.weight")) {
            let d = self.head_dim();
            reorder(&mut tensor.values, cols, |row| row / d * d + row % 2 * (d / 2) + row % d / 2);
        }
        let offsets = matches!(self.arch, "gemma3" | "qwen35" | "qwen35moe");
        if offsets && name.ends_with("norm.weight") && !name.ends_with("linear_attn.norm.weight")
            || offsets && name.contains("layernorm")
            || name.contains("pre_fc_norm")
        {
            tensor.values.iter_mut().for_each(|w| *w += 1.0);
        }
        if name.ends_with("A_log") {
            tensor.values.iter_mut().for_each(|a| *a = -a.exp());
        }
        if name.ends_with("conv1d.weight") {
            tensor.shape.remove(1);
        }
        self.tile_value_heads(name, tensor);
    }

    /// Puts the first value head of each key head first, then the second of each, and so on.
    fn tile_value_heads(&self, name: &str, tensor: &mut GgufTensor) {
        let (keys, heads) = (self.size("linear_num_key_heads"), self.size("linear_num_value_heads"));
        if !name.contains("linear_attn.") || keys == heads {
            return;
        }
        let (dk, dv) = (self.size("linear_key_head_dim"), self.size("linear_value_head_dim"));
        let from = |head: usize| head % keys * (heads / keys) + head / keys;
        let cols = if tensor.shape.len() > 1 { tensor.shape[1] } else { 1 };
        let part = name.split("linear_attn.").nth(1).unwrap_or_default();
        match part.split('.').next().unwrap_or_default() {
            "in_proj_qkv" | "conv1d" => {
                reorder(&mut tensor.values[2 * keys * dk * cols..], dv * cols, from);
            }
            "in_proj_z" => reorder(&mut tensor.values, dv * cols, from),
            "in_proj_a" | "in_proj_b" | "A_log" | "dt_bias" => reorder(&mut tensor.values, cols, from),
            "out_proj" => tensor.values.chunks_exact_mut(cols).for_each(|row| reorder(row, dv, from)),
            _ => {}
        }
    }

    fn metadata(&self, writer: &mut GgufBuilder) {
        let arch = self.arch;
        writer.text("general.architecture", arch);
        let mtp = self.size("mtp_num_hidden_layers");
        let blocks = self.size("num_hidden_layers") + mtp;
        writer.size(&format!("{arch}.block_count"), &blocks.into());
        if mtp > 0 {
            writer.size(&format!("{arch}.nextn_predict_layers"), &mtp.into());
        }
        for (theirs, ours) in [
            ("context_length", "max_position_embeddings"),
            ("embedding_length", "hidden_size"),
            ("feed_forward_length", "intermediate_size"),
            ("attention.head_count", "num_attention_heads"),
            ("attention.head_count_kv", "num_key_value_heads"),
            ("attention.key_length", "head_dim"),
            ("attention.sliding_window", "sliding_window"),
            ("expert_used_count", "num_experts_per_tok"),
            ("expert_feed_forward_length", "moe_intermediate_size"),
            ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
            ("expert_count", "num_experts"),
            ("expert_count", "num_local_experts"),
            ("ssm.conv_kernel", "linear_conv_kernel_dim"),
            ("ssm.state_size", "linear_key_head_dim"),
            ("ssm.group_count", "linear_num_key_heads"),
            ("ssm.time_step_rank", "linear_num_value_heads"),
        ] {
            if self.text[ours].is_u64() {
                writer.size(&format!("{arch}.{theirs}"), &self.text[ours]);
            }
        }
        let inner = self.size("linear_value_head_dim") * self.size("linear_num_value_heads");
        if inner > 0 {
            writer.size(&format!("{arch}.ssm.inner_size"), &inner.into());
        }
        let eps = self.text["rms_norm_eps"].as_f64().unwrap_or(1e-6);
        writer.float(&format!("{arch}.attention.layer_norm_rms_epsilon"), eps);
        let rope = &self.text["rope_parameters"];
        let global = if rope["full_attention"].is_object() { &rope["full_attention"] } else { rope };
        writer.float(&format!("{arch}.rope.freq_base"), global["rope_theta"].as_f64().expect("a base"));
        let share = rope["partial_rotary_factor"].as_f64().unwrap_or(1.0);
        let turning = (self.head_dim() as f64 * share) as u64;
        writer.size(&format!("{arch}.rope.dimension_count"), &turning.into());
        self.rope_scaling(writer, global);
    }

    fn rope_scaling(&self, writer: &mut GgufBuilder, rope: &Value) {
        let key = |name: &str| format!("{}.{name}", self.arch);
        match rope["rope_type"].as_str() {
            Some("yarn") => {
                writer.text(&key("rope.scaling.type"), "yarn");
                for (theirs, ours) in [
                    ("rope.scaling.factor", "factor"),
                    ("rope.scaling.yarn_attn_factor", "attention_factor"),
                    ("rope.scaling.yarn_beta_fast", "beta_fast"),
                    ("rope.scaling.yarn_beta_slow", "beta_slow"),
                    ("rope.scaling.yarn_log_multiplier", "mscale_all_dim"),
                    ("attention.temperature_scale", "llama_4_scaling_beta"),
                ] {
                    if let Some(number) = rope[ours].as_f64() {
                        writer.float(&key(theirs), number);
                    }
                }
            }
            Some("longrope") => {
                writer.text(&key("rope.scaling.type"), "longrope");
                let (whole, original) =
                    (self.size("max_position_embeddings"), self.size("original_max_position_embeddings"));
                let stretch = (whole as f64 / original as f64).ln() / (original as f64).ln();
                writer.float(&key("rope.scaling.attn_factor"), (1.0 + stretch).sqrt());
                for (name, list) in [("long", "long_factor"), ("short", "short_factor")] {
                    let numbers = rope[list].as_array().expect("a list").iter().filter_map(Value::as_f64);
                    let values: Vec<f32> = numbers.map(|number| number as f32).collect();
                    let name = format!("rope_factors_{name}.weight");
                    writer.tensors.push(GgufTensor { name, shape: vec![values.len()], values });
                }
            }
            _ => return,
        }
        writer.size(&key("rope.scaling.original_context_length"), &rope["original_max_position_embeddings"]);
    }

    fn windows(&self, writer: &mut GgufBuilder) {
        let kinds = self.text["layer_types"].as_array().into_iter().flatten();
        if self.arch == "olmo2" {
            let slides: Vec<bool> = kinds.map(|kind| kind == "sliding_attention").collect();
            writer.bools("olmo2.attention.sliding_window_pattern", &slides);
        }
    }
}

/// The experts of a layer as one stack. `name` is the tensor of the first expert.
fn stack_experts(source: &Checkpoint, rules: &Rules, name: &str) -> Option<GgufTensor> {
    let (prefix, part) = name.split_once(".experts.0.")?;
    let count = rules.size("num_experts").max(rules.size("num_local_experts"));
    let mut values = Vec::new();
    for expert in 0..count {
        let tensor =
            source.tensor(&format!("{prefix}.experts.{expert}.{part}")).expect("every expert is there");
        values.extend(tensor.to_f32().expect("a float"));
    }
    let shape = source.info(name).expect("there").shape;
    let stacked = rules.name(&format!("{prefix}.{part}"));
    let name = stacked.replace(".weight", "_exps.weight");
    Some(GgufTensor { name, shape: [&[count], shape].concat(), values })
}

fn convert(folder: &Path, arch: &'static str) -> Vec<u8> {
    let source = Checkpoint::open(folder).expect("the fixture opens");
    let config = source.config();
    let text = if config["text_config"].is_object() { &config["text_config"] } else { config };
    let rules = Rules { arch, text: text.clone() };
    let mut writer = GgufBuilder::default();
    rules.metadata(&mut writer);
    rules.windows(&mut writer);
    for name in source.names().filter(|name| !name.contains("visual")) {
        let fused = name
            .split_once(".experts.")
            .and_then(|(prefix, part)| Some((prefix, part.strip_suffix("_proj")?)));
        if let Some((prefix, part)) = fused {
            // One parameter for all experts, without a suffix.
            let gate = rules.name(&format!("{prefix}.gate_proj"));
            let view = source.tensor(name).expect("there");
            let (shape, values) = (view.shape().to_vec(), view.to_f32().expect("a float"));
            let name = gate.replace("ffn_gate", &format!("ffn_{part}_exps.weight"));
            writer.tensors.push(GgufTensor { name, shape, values });
            continue;
        }
        if name.contains(".experts.") {
            writer.tensors.extend(stack_experts(&source, &rules, name));
            continue;
        }
        let view = source.tensor(name).expect("there");
        let (shape, values) = (view.shape().to_vec(), view.to_f32().expect("a float"));
        let mut tensor = GgufTensor { name: rules.name(name), shape, values };
        rules.transform(name, &mut tensor);
        writer.tensors.push(tensor);
    }
    writer.bytes(|_| false)
}

#[test]
fn logits_of_converted_fixtures_match_the_reference() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    for (name, arch) in [
        ("mistral", "llama"),
        ("ministral3", "mistral3"),
        ("phi4", "phi3"),
        ("phi4_mini", "phi3"),
        ("olmo3", "olmo2"),
        ("glm4", "glm4"),
        ("llama", "llama"),
        ("qwen3", "qwen3"),
        ("qwen3_moe", "qwen3moe"),
        ("gemma3_text", "gemma3"),
        ("qwen3_5", "qwen35"),
        ("qwen3_5_moe", "qwen35moe"),
    ] {
        let other = OTHERS.contains(&name);
        let folder = if other { other_fixture(name) } else { Some(fixture(name)) };
        let Some(folder) = folder else { continue };
        let path = dir.path().join(format!("{name}.gguf"));
        std::fs::write(&path, convert(&folder, arch)).expect("the folder is writable");
        let file = GgufFile::open(&path).unwrap_or_else(|e| panic!("{name}: {e}"));
        let json = keel_models::gguf::config(&file).unwrap_or_else(|e| panic!("{name}: {e}"));
        let config = keel_models::read_config(&json).unwrap_or_else(|e| panic!("{name}: {e}"));
        let parameters = GgufParameters::new(&file, &config);
        let mut engine = Engine::load(&runtime(2), &parameters, &json, exact(), &|_| ())
            .unwrap_or_else(|e| panic!("{name}: {e}"));
        let want = expected(&folder);
        let (logits, mtp) = all_logits(&mut engine, &want.ids, false, want.mtp_logits.is_some());
        let error = relative_error(&logits, &want.logits);
        assert!(error <= 1e-4, "{name}: logits differ by {error:.1e}");
        if let Some(want) = want.mtp_logits {
            let error = relative_error(&mtp, &want);
            assert!(error <= 1e-4, "{name}: logits of the head differ by {error:.1e}");
        }
    }
}
