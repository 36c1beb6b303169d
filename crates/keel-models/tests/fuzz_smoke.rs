//! Runs the function of the fuzz target on seeded mutations of configs, for machines without a fuzzer.

#[path = "../fuzz/checks.rs"]
mod checks;

use keel_testkit::fixtures::{SEEING, seeing_fixture};
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

/// Runs `check` on mutations of a sound config, and returns how many are accepted.
fn survive(sound: &Value, check: fn(&[u8]) -> bool) -> u64 {
    assert!(check(sound.to_string().as_bytes()), "{sound}");
    let mut accepted = 0;
    for seed in 1..=mutations(MUTATED_CONFIGS / 10) {
        let (mut config, mut random) = (sound.clone(), Random::of_case(seed));
        for _ in 0..1 + random.below(3) {
            mutate(&mut config, &mut random);
        }
        let text = config.to_string();
        match std::panic::catch_unwind(|| check(text.as_bytes())) {
            Ok(is_accepted) => accepted += u64::from(is_accepted),
            Err(cause) => {
                println!("{text}");
                std::panic::resume_unwind(cause);
            }
        }
    }
    accepted
}

#[test]
fn mutated_configs_never_panic() {
    let plain_ones = ["llama", "qwen2", "qwen3", "mistral", "smollm3", "olmo3"];
    let mut accepted = 0;
    for model_type in plain_ones {
        accepted += survive(&plain(model_type), checks::config);
    }
    assert!(accepted > 0, "some mutations are sound");
    for shape in ["qwen3.5-0.8b", "qwen3.5-35b-a3b"] {
        let config = keel_models::shape(shape).expect("a published shape");
        survive(&config, checks::config);
    }
}

#[test]
fn mutated_configs_of_towers_never_panic() {
    for name in SEEING {
        let text = std::fs::read(seeing_fixture(name).join("config.json")).expect("readable");
        let config: Value = serde_json::from_slice(&text).expect("JSON");
        assert!(survive(&config, checks::tower) > 0, "{name}: some mutations are sound");
        let mut tower = config["vision_config"].clone();
        for seed in 1..=mutations(MUTATED_CONFIGS / 10) {
            // Most mutations above are of the text part.
            let mut random = Random::of_case(seed);
            (0..1 + random.below(3)).for_each(|_| mutate(&mut tower, &mut random));
            let mut config = config.clone();
            config["vision_config"] = std::mem::replace(&mut tower, config["vision_config"].clone());
            checks::tower(config.to_string().as_bytes());
        }
    }
}

/// Numbers that are allowed one by one, and whose products do not fit into 64 bits.
#[test]
fn products_of_a_huge_tower_do_not_overflow() {
    for (name, changes) in [
        (
            "seeing_gemma3",
            json!({"image_size": 1 << 20, "patch_size": 1, "hidden_size": 1 << 20, "num_attention_heads": 1}),
        ),
        ("seeing_qwen3_vl", json!({"spatial_merge_size": 1 << 20, "hidden_size": 1 << 20, "num_heads": 4})),
    ] {
        let text = std::fs::read(seeing_fixture(name).join("config.json")).expect("readable");
        let mut config: Value = serde_json::from_slice(&text).expect("JSON");
        config["mm_tokens_per_image"] = json!(1 << 20);
        for (key, value) in changes.as_object().expect("an object") {
            config["vision_config"][key] = value.clone();
        }
        assert!(checks::tower(config.to_string().as_bytes()), "{name} is sound as far as its config says");
    }
    let gemma = std::fs::read(seeing_fixture("seeing_gemma3").join("config.json")).expect("readable");
    let mut gemma: Value = serde_json::from_slice(&gemma).expect("JSON");
    for eps in [1e300, 1e-300] {
        gemma["vision_config"]["layer_norm_eps"] = json!(eps);
        assert!(!checks::tower(gemma.to_string().as_bytes()), "{eps} is no f32 above 0");
    }
}
