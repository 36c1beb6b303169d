//! Whatever numbers a config.json holds, its model is planned, loaded and run, or it is refused. Nothing panics.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::common::runtime;
use keel_array::{Backend, Compute, DType, WeightFormat};
use keel_cpu::{CpuBackend, CpuOptions};
use keel_engine::{Engine, EngineOptions, plan};
use keel_models::loading::RandomParameters;
use serde_json::{Value, json};

/// A model whose plan is larger is not loaded, to save time.
const LOADED_BYTES_MAX: u64 = 4 << 20;

/// Of the changed configs of each model at least one in this number must run. Measured with `keel plan`: 39% to 48% are
/// planned and small enough. Without this bound the test would pass if every config was refused.
const RAN_ONE_IN: usize = 3;

/// The outcome of a config.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Refused,
    /// Planned, but larger than [`LOADED_BYTES_MAX`].
    OnlyPlanned,
    Ran,
}

fn base() -> Value {
    json!({
        "hidden_size": 64, "vocab_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 80, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": true
    })
}

fn with(model_type: &str, more: Value) -> Value {
    let mut config = base();
    config["model_type"] = model_type.into();
    for (key, value) in more.as_object().expect("an object") {
        config[key] = value.clone();
    }
    config
}

fn configs() -> Vec<Value> {
    let recurrent = json!({
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 24, "linear_conv_kernel_dim": 4, "full_attention_interval": 2,
        "partial_rotary_factor": 0.25, "mtp_num_hidden_layers": 1
    });
    let mut sparse = recurrent.clone();
    let experts = json!({
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 48
    });
    for (key, value) in experts.as_object().expect("an object") {
        sparse[key] = value.clone();
    }
    let window = json!({
        "sliding_window": 20, "sliding_window_pattern": 2, "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 32
    });
    vec![
        with("qwen3_5", recurrent),
        with("qwen3_5_moe", sparse),
        with("llama", json!({})),
        with("qwen3_moe", experts),
        with("gemma3_text", window),
        with("mistral", json!({"sliding_window": 20})),
        with(
            "ministral3",
            json!({"rope_parameters": {"rope_type": "yarn", "factor": 4.0,
            "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.1}}),
        ),
        with("smollm3", json!({"no_rope_layer_interval": 2})),
        with(
            "phi3",
            json!({"original_max_position_embeddings": 64, "partial_rotary_factor": 0.5,
            "rope_scaling": {"type": "longrope", "short_factor": [1, 1, 1, 1, 1, 1, 1, 1],
                "long_factor": [2, 2, 2, 2, 2, 2, 2, 2]}}),
        ),
        with("olmo3", json!({"sliding_window": 20, "attention_bias": true})),
        with("glm4", json!({"partial_rotary_factor": 0.25, "attention_bias": true})),
    ]
}

fn values() -> Vec<Value> {
    let numbers = [0, 1, 3, 8, 16, 24, 65, 260, 520, 4097, 1 << 24, 1 << 32, 1 << 53, u64::MAX];
    let odd = [json!(null), json!(-1), json!(0.5), json!(1e300), json!("x"), json!([])];
    numbers.into_iter().map(Value::from).chain(odd).collect()
}

/// Plans the model. If it is small, loads and runs it, too. It may be refused.
fn exercise(config: &Value) -> Outcome {
    let parameters = RandomParameters {
        format: WeightFormat::Affine { bits: 4, group_size: 32, scale_dtype: DType::BF16 },
    };
    let options = EngineOptions {
        context: 300,
        prefill_step: 64,
        compute: Compute::Auto,
        all_logits: true,
        sequences: 2,
        ..EngineOptions::default()
    };
    let planning: Arc<dyn Backend> = Arc::new(CpuBackend::planning(CpuOptions::default()));
    let Ok(planned) = plan::plan(&planning, &parameters, config, options) else { return Outcome::Refused };
    if planned.total() > LOADED_BYTES_MAX {
        return Outcome::OnlyPlanned;
    }
    let runtime = runtime(2);
    let mut engine = Engine::load(&runtime, &parameters, config, options, &|_| ()).expect("it was planned");
    assert_eq!(runtime.ledger().active(), planned);
    let vocab = engine.model().config.vocab as u32;
    let prompt: Vec<u32> = (0..70).map(|i| i * 7 % vocab).collect();
    let mut sequence = engine.open().expect("a slot is free");
    let mut logits = Vec::new();
    engine.prefill(&mut sequence, &prompt, &mut logits, &mut |_| ()).expect("what was planned runs");
    engine.decode(&mut [&mut sequence], &[vocab - 1]).expect("what was planned runs");
    engine.logits(0, &mut logits).expect("there");
    assert_eq!(logits.len(), vocab as usize);
    engine.release(sequence);
    Outcome::Ran
}

#[test]
fn no_number_in_a_config_makes_anything_panic() {
    let mut panics = Vec::new();
    for config in configs() {
        let name = &config["model_type"];
        assert_eq!(exercise(&config), Outcome::Ran, "{name} as it is");
        let (mut ran, mut all) = (0, 0);
        let keys: Vec<&String> = config.as_object().expect("an object").keys().collect();
        for key in keys.into_iter().filter(|key| *key != "model_type") {
            for value in values() {
                let mut changed = config.clone();
                changed[key] = value.clone();
                all += 1;
                match catch_unwind(AssertUnwindSafe(|| exercise(&changed))) {
                    Ok(outcome) => ran += usize::from(outcome == Outcome::Ran),
                    Err(_) => panics.push(format!("{name} with {key} {value}")),
                }
            }
        }
        assert!(
            ran * RAN_ONE_IN >= all,
            "{name}: only {ran} of {all} changed configs ran; panics: {panics:#?}"
        );
    }
    assert!(panics.is_empty(), "{} panics: {panics:#?}", panics.len());
}
