//! Runs the function of the fuzz target on seeded mutations of configs, for machines without a fuzzer.

#[path = "../fuzz/checks.rs"]
mod checks;

use keel_testkit::random::{Random, mutations};
use serde_json::{Value, json};

const MUTATED_CONFIGS: u64 = 20_000;

/// Values that a number or a name is replaced with.
fn strange(random: &mut Random) -> Value {
    let values = [
        json!(0),
        json!(-1),
        json!(1),
        json!(3),
        json!(u64::MAX),
        json!(1u64 << 32),
        json!(1e300),
        json!(0.1),
        json!(null),
        json!("full_attention"),
        json!([]),
        json!({}),
        json!(["linear_attention", "full_attention"]),
        json!({"rope_type": "yarn", "factor": 4.0}),
        json!(true),
    ];
    values[random.below(values.len())].clone()
}

/// Replaces or removes a field at any depth.
fn mutate(value: &mut Value, random: &mut Random) {
    let Value::Object(fields) = value else { return };
    let names: Vec<String> = fields.keys().cloned().collect();
    if names.is_empty() {
        return;
    }
    let name = &names[random.below(names.len())];
    match random.below(4) {
        0 => drop(fields.remove(name)),
        1 if fields[name].is_object() => mutate(&mut fields[name], random),
        _ if name == "model_type" => {}
        _ => fields[name] = strange(random),
    }
}

/// A config that has the fields of all plain families.
fn plain(model_type: &str) -> Value {
    json!({"model_type": model_type, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": true, "max_position_embeddings": 4096,
        "layer_types": ["full_attention", "full_attention", "full_attention", "full_attention"]})
}

fn survive(sound: &Value) -> u64 {
    let mut accepted = 0;
    for seed in 1..=mutations(MUTATED_CONFIGS / 10) {
        let (mut config, mut random) = (sound.clone(), Random::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
        for _ in 0..1 + random.below(3) {
            mutate(&mut config, &mut random);
        }
        accepted += u64::from(checks::config(config.to_string().as_bytes()));
    }
    accepted
}

#[test]
fn mutated_configs_never_panic() {
    let plain_ones = ["llama", "qwen2", "qwen3", "mistral", "smollm3", "olmo3"];
    let mut accepted = 0;
    for model_type in plain_ones {
        accepted += survive(&plain(model_type));
    }
    assert!(accepted > 0, "some mutations are sound");
    for shape in ["qwen3.5-0.8b", "qwen3.5-35b-a3b"] {
        let config = keel_models::shape(shape).expect("a published shape");
        assert!(checks::config(config.to_string().as_bytes()), "{shape}");
        survive(&config);
    }
}
