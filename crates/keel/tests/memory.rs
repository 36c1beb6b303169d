//! The plan is what is allocated, and what is allocated is what is needed.

mod common;

use common::{arg, copy_of, fixture, joined, json};
use serde_json::Value;

fn total(categories: &Value) -> u64 {
    categories.as_object().expect("categories").values().filter_map(Value::as_u64).sum()
}

/// Asserts that a run's three reports are equal to what `keel plan` said.
fn assert_planned(memory: &Value, plan: &Value, what: &str) {
    for report in ["planned", "allocated", "peak"] {
        assert_eq!(&memory[report], plan, "{what}: {report}");
    }
    assert!(total(plan) > 0, "{what}: something is needed");
}

#[test]
fn generate_allocates_what_plan_says_and_its_peak_is_no_higher() {
    for (name, prompt, max_tokens) in [("qwen3_5", 3, 40), ("qwen3_5_moe", 100, 500), ("qwen3_next", 1, 1300)]
    {
        let Some(folder) = fixture(name) else { continue };
        let ids: Vec<u32> = (1..=prompt).collect();
        let context = (prompt + max_tokens).to_string();
        let plan = json(&["plan", "--model", arg(&folder), "--context", &context, "--json"]);
        let (ids, tokens) = (joined(&ids), max_tokens.to_string());
        let command = ["generate", "--model", arg(&folder), "--ids", &ids, "--max-tokens", &tokens];
        let report = json(&[&command[..], &["--ignore-eos", "--json"]].concat());
        assert_planned(&report["memory"], &plan, name);
    }
}

#[test]
fn batches_allocate_what_plan_says() {
    let cases =
        [("qwen3_5", 2, 150, 9), ("qwen3_5_mlx_4bit", 3, 300, 5), ("qwen3_5_moe_mlx_4bit", 5, 70, 200)];
    for (name, batch, prompt, generated) in cases {
        let Some(folder) = fixture(name) else { continue };
        let [batch, prompt, generated, context] =
            [batch, prompt, generated, prompt + generated].map(|n: i32| n.to_string());
        let plan =
            json(&["plan", "--model", arg(&folder), "--context", &context, "--batch", &batch, "--json"]);
        let command = ["bench", "--model", arg(&folder), "--batch", &batch, "--repeat", "1", "--json"];
        let report = json(&[&command[..], &["--prompt", &prompt, "--gen", &generated]].concat());
        assert_planned(&report["memory"], &plan, name);
    }
}

#[test]
fn what_plan_says_to_fit_fits_and_one_page_more_does_not() {
    let Some(folder) = fixture("qwen3_5_real_head_dims") else { return };
    let base = ["plan", "--model", arg(&folder), "--json"];
    let limit = total(&json(&[&base[..], &["--context", "1024"]].concat()));
    let fit = json(&[&base[..], &["--context", "1024", "--limit", &limit.to_string()]].concat());
    let context = fit["context"].as_u64().expect("a number");
    assert!(context >= 1024, "{fit}");
    assert_eq!(fit["batch"], 1);
    let of = |context: u64| total(&json(&[&base[..], &["--context", &context.to_string()]].concat()));
    assert!(of(context) <= limit && of(context + 256) > limit, "{context} of {limit}");
}

#[test]
fn prefill_grows_by_the_bytes_of_keys_and_values() {
    let Some(folder) = copy_of("qwen3_5") else { return };
    let path = folder.path().join("config.json");
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(&path).expect("there")).expect("the fixture's config");
    config["text_config"]["max_position_embeddings"] = 32768.into();
    std::fs::write(&path, config.to_string()).expect("writable");
    let peak = |prompt: &str| {
        let command = ["bench", "--model", arg(folder.path()), "--prompt", prompt, "--gen", "1"];
        let report = json(&[&command[..], &["--repeat", "1", "--prefill-step", "512", "--json"]].concat());
        report["memory"]["peak"].clone()
    };
    let tokens = 15 * 1024;
    let (short, long) = (peak("1023"), peak("16383"));
    let growth = (total(&long) - total(&short)) as f64 / f64::from(tokens);
    // One attention layer and that of the draft head: 2 heads of 64, keys and values in two bytes.
    let kv = 2.0 * 2.0 * 2.0 * 64.0 * 2.0;
    assert!((growth - kv).abs() <= 0.01 * kv, "{growth} bytes per token, keys and values take {kv}");
}

#[test]
fn host_memory_for_parked_sequences_is_a_category_of_its_own() {
    let of = |swap: &str| json(&["plan", "--context", "512", "--swap", swap, "--json"]);
    let (without, with) = (of("0"), of("8Mi"));
    assert_eq!((&without["swap"], &with["swap"]), (&Value::from(0), &Value::from(8 << 20)));
    assert_eq!(total(&with), total(&without) + (8 << 20));
}

#[test]
fn a_shape_is_planned_without_a_checkpoint() {
    let shape = ["plan", "--shape", "qwen3.5-35b-a3b", "--context", "8192", "--batch", "2", "--json"];
    let plan = json(&shape);
    // 10 attention layers with keys and values of 2 heads of 256 in two bytes, for 2 x 8192 tokens.
    assert_eq!(plan["kv"], 10 * 2 * 2 * 256 * 2 * 2 * 8192);
    // 30 recurrent layers: 32 states of 128 x 128 in f32, and three rows of 8192 channels, for 2 sequences.
    assert_eq!(plan["recurrent"], 30 * 2 * 4 * (32 * 128 * 128 + 3 * 8192));
    let weights = plan["weights"].as_f64().expect("a number");
    let dense = json(&[&shape[..], &["--dtype", "bf16"]].concat())["weights"].as_f64().expect("a number");
    assert!((3.4..3.7).contains(&(dense / weights)), "16 bits against 4.5: {dense} and {weights}");
}
