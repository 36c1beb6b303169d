//! Compares the program with the reference outputs of the fixtures, and plans for them with the memory that runs take.
//! `.ci/run` also runs this on the repository's own fixtures.

mod common;

use common::{
    arg, copy_of, fixture, floats, holds, ints, joined, json, models, relative_error, succeed, total,
};
use serde_json::Value;

const ERROR_MAX: f64 = 1e-4;

/// Two logits this close may be ranked either way.
const NEAR_TIE: f32 = 1e-3;

fn compare_logits(extra: &[&str]) {
    for name in models() {
        let folder = fixture(name);
        let want = folder.join("expected.safetensors");
        let dir = tempfile::tempdir().expect("a temporary folder");
        let (ids, out) = (dir.path().join("ids"), dir.path().join("out.safetensors"));
        let lines: Vec<String> = ints(&want, "input_ids").iter().map(u32::to_string).collect();
        std::fs::write(&ids, lines.join("\n")).expect("the folder is writable");
        let model = ["logits", "--model", arg(&folder), "--compute", "f32"];
        succeed(&[&model[..], &["--ids-file", arg(&ids), "--out", arg(&out)], extra].concat());
        for tensor in ["logits", "mtp_logits"] {
            assert_eq!(holds(&out, tensor), holds(&want, tensor), "{name}: {tensor}");
            if holds(&want, tensor) {
                let error = relative_error(&floats(&out, tensor), &floats(&want, tensor));
                assert!(error <= ERROR_MAX, "{name} {extra:?}: {tensor} differ by {error:.1e}");
            }
        }
    }
}

#[test]
fn logits_match_the_reference() {
    compare_logits(&[]);
}

#[test]
fn logits_match_the_reference_token_by_token() {
    compare_logits(&["--one-by-one"]);
}

fn compare_greedy(extra: &[&str]) {
    for name in models() {
        let folder = fixture(name);
        let want = folder.join("expected.safetensors");
        if !holds(&want, "greedy_ids") {
            continue;
        }
        let (greedy, margin) = (ints(&want, "greedy_ids"), floats(&want, "greedy_margin"));
        let ids = joined(&ints(&want, "input_ids"));
        let max_tokens = greedy.len().to_string();
        let command = ["generate", "--model", arg(&folder), "--ids", &ids, "--max-tokens", &max_tokens];
        let flags = ["--compute", "f32", "--temperature", "0", "--ignore-eos", "--json"];
        let report = json(&[&command[..], &flags, extra].concat());
        let got: Vec<u64> =
            report["tokens"].as_array().expect("a list").iter().filter_map(|id| id.as_u64()).collect();
        assert_eq!((got.len(), report["finish_reason"].as_str()), (greedy.len(), Some("length")), "{name}");
        for (i, (got, want)) in got.iter().zip(&greedy).enumerate() {
            if *got != u64::from(*want) {
                assert!(margin[i] < NEAR_TIE, "{name} {extra:?}: token {i} is {got}, expected {want}");
                println!("{name}: token {i} is a near tie ({})", margin[i]);
                break;
            }
        }
    }
}

#[test]
fn greedy_tokens_match_the_reference() {
    compare_greedy(&[]);
}

#[test]
fn greedy_tokens_match_the_reference_token_by_token() {
    compare_greedy(&["--one-by-one"]);
}

#[test]
fn the_prefill_step_does_not_change_a_bit() {
    for name in models() {
        let folder = fixture(name);
        let dir = tempfile::tempdir().expect("a temporary folder");
        let ids: Vec<u32> = (0..300).map(|i| (i * 37 + i * i * 11) % 509).collect();
        let logits = |compute: &str, step: &str| {
            let out = dir.path().join(format!("{compute}-{step}.safetensors"));
            let command = ["logits", "--model", arg(&folder), "--out", arg(&out), "--ids", &joined(&ids)];
            succeed(&[&command[..], &["--compute", compute, "--prefill-step", step]].concat());
            std::fs::read(out).expect("written")
        };
        for compute in ["f32", "auto"] {
            let whole = logits(compute, "2048");
            for step in ["64", "128"] {
                assert!(logits(compute, step) == whole, "{name}: --compute {compute} --prefill-step {step}");
            }
        }
    }
}

/// Asserts that a run's three reports equal the output of `keel plan`.
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
        let folder = fixture(name);
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
        let folder = fixture(name);
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
    let folder = fixture("qwen3_5_real_head_dims");
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
    let folder = copy_of("qwen3_5");
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
    // One attention layer and that of the MTP head: 2 heads of 64, keys and values of 2 bytes.
    let kv = 2.0 * 2.0 * 2.0 * 64.0 * 2.0;
    assert!((growth - kv).abs() <= 0.01 * kv, "{growth} bytes per token, keys and values take {kv}");
}

#[test]
fn fit_offers_less_only_where_all_does_not_fit() {
    let folder = fixture("qwen3_5");
    let whole = json(&["fit", arg(&folder), "--limit", "1G", "--json"]);
    assert_eq!(whole["fits"].as_array().map(Vec::len), Some(3), "nothing is better than all: {whole}");
    let most = total(&json(&["plan", "--model", arg(&folder), "--sequences", "1", "--json"]));
    let tight = json(&["fit", arg(&folder), "--limit", &(most * 7 / 10).to_string(), "--json"]);
    let best = &tight["fits"][0];
    let command = best["command"].as_str().expect("a command");
    let is_shorter = best["context"].as_u64().is_some_and(|context| context < 4096);
    assert!(command.starts_with("keel quantize ") || is_shorter, "{tight}");
}

/// A shell completes the name of a folder with a slash.
#[test]
fn fit_of_a_folder_with_a_slash_proposes_a_copy_next_to_it() {
    let folder = fixture("qwen3_5");
    let slash = format!("{}/", arg(&folder));
    let fit = |limit: &str| {
        let form = ["--context", "1024", "--sequences", "1", "--kv-bits", "16"];
        json(&[&["fit", &slash, "--limit", limit, "--json"], &form[..]].concat())["fits"][0].clone()
    };
    let whole = fit("1G")["needed"].as_u64().expect("a number");
    let tight = fit(&(whole - 1).to_string());
    let command = tight["command"].as_str().expect("a command");
    let copy = command.split_once(" --model ").and_then(|(_, rest)| rest.split(' ').next());
    let bits = tight["weights"].as_str().and_then(|name| name.strip_suffix(" bits")).expect("fewer bits");
    assert_eq!(copy, Some(format!("{}-{bits}bit", arg(&folder)).as_str()), "{command}");
}
