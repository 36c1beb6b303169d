//! Models in other forms: the facts that `inspect` counts, the files that `quantize` writes and how `eval` judges them.

mod common;

use std::path::Path;
use std::process::{Command, Stdio};

use common::{arg, demo, fail, fixture, floats, json, relative_error, succeed};
use serde_json::Value;

#[test]
fn inspect_counts_and_names() {
    let facts = json(&["inspect", "--json"]);
    assert_eq!(facts["model_type"], "qwen3_5");
    assert_eq!(facts["chat_template"], true);
    let folder = fixture("qwen3_5_mlx_4bit");
    let facts = json(&["inspect", arg(&folder), "--json"]);
    assert_eq!(facts["layers"]["gated_delta"], 3);
    assert_eq!(facts["tokenizer"], false);
    let bits = facts["bits_per_weight"].as_f64().expect("a number");
    assert!((4.5..6.0).contains(&bits), "4 bits, scales, biases, and some dense parameters: {facts}");
    let dense = json(&["inspect", arg(&fixture("qwen3_5")), "--json"]);
    assert_eq!(dense["bits_per_weight"], 16.0);
    assert!(dense["vision_tensors"].as_u64().is_some_and(|n| n > 0), "{dense}");
    assert!(succeed(&["inspect", arg(&folder)]).contains("bits per weight"));
}

/// Relative error of the logits of a fixture's copy, quantised to `bits`.
fn quantisation_error(folder: &Path, bits: &str) -> f64 {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let copy = dir.path().join("copy");
    let report = json(&["quantize", arg(folder), arg(&copy), "--bits", bits, "--group-size", "32", "--json"]);
    assert!(report["quantized"].as_u64().is_some_and(|n| n > 10), "{report}");
    let logits = |model: &Path, file: &str| {
        let out = dir.path().join(file);
        let ids = "1,2,3,5,8,13,21,34,55,89";
        succeed(&["logits", "--model", arg(model), "--ids", ids, "--compute", "f32", "--out", arg(&out)]);
        floats(&out, "logits")
    };
    relative_error(&logits(&copy, "copy.safetensors"), &logits(folder, "dense.safetensors"))
}

#[test]
fn an_interrupted_conversion_leaves_no_file() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let target = dir.path().join("out.gguf");
    let files = || std::fs::read_dir(dir.path()).expect("readable").count();
    let was_interrupted = (0..50).any(|_| {
        let mut quantize = Command::new(env!("CARGO_BIN_EXE_keel"));
        quantize.args(["quantize", arg(&demo()), arg(&target), "--type", "Q6_K"]).stderr(Stdio::null());
        let mut child = quantize.stdout(Stdio::null()).spawn().expect("keel runs");
        while files() == 0 && child.try_wait().expect("a child").is_none() {}
        Command::new("kill").args(["-TERM", &child.id().to_string()]).status().expect("kill runs");
        let status = child.wait().expect("a child");
        // The signal may come after the file has got its name.
        let is_complete = target.exists();
        assert_eq!(files(), usize::from(is_complete), "{status}");
        assert!(is_complete || !status.success(), "{status}");
        let _ = std::fs::remove_file(&target);
        !is_complete
    });
    assert!(was_interrupted, "each was complete before the signal came");
}

#[test]
fn interrupted_logits_leave_no_file() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let (target, ids) = (dir.path().join("out.safetensors"), vec!["7"; 4000].join(","));
    let files = || std::fs::read_dir(dir.path()).expect("readable").count();
    let mut logits = Command::new(env!("CARGO_BIN_EXE_keel"));
    logits.args(["logits", "--ids", &ids, "--one-by-one", "--out", arg(&target)]);
    logits.env("KEEL_DEVICE", "cpu").env("KEEL_CONFIG", "").stderr(Stdio::null()).stdout(Stdio::null());
    let mut child = logits.spawn().expect("keel runs");
    while files() == 0 && child.try_wait().expect("a child").is_none() {}
    assert!(!target.exists(), "it has its name once it is whole");
    Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("kill runs");
    let status = child.wait().expect("a child");
    assert!(!status.success());
    assert_eq!(files(), 0, "{status}");
}

#[test]
fn a_quantised_copy_runs_and_more_bits_stay_closer() {
    for name in ["qwen3_5", "qwen3_5_moe"] {
        let folder = fixture(name);
        // The fixtures' weights are large and random, so a small error grows from layer to layer.
        let (eight, four) = (quantisation_error(&folder, "8"), quantisation_error(&folder, "4"));
        assert!(eight > 1e-6 && eight < 0.3 && eight < four / 2.0, "{name}: {eight} and {four}");
    }
}

/// Number of prompt tokens, and the greedy tokens after the prompt.
fn greedy(model: &Path) -> (Value, Value) {
    let command = ["generate", "Once upon a time, there", "--model", arg(model), "--temperature", "0"];
    let flags = ["--raw", "--max-tokens", "24", "--compute", "f32", "--json"];
    let report = json(&[&command[..], &flags].concat());
    (report["prompt_tokens"].clone(), report["tokens"].clone())
}

#[test]
fn a_model_keeps_its_words_in_every_form() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let demo = demo();
    let (file, folder) = (dir.path().join("demo.gguf"), dir.path().join("dense"));
    let report = json(&["quantize", arg(&demo), arg(&file), "--type", "F32", "--json"]);
    // The file stores 8.5 bits per weight.
    let bytes = |key: &str| report[key].as_u64().expect("a number");
    assert!(bytes("source_bytes") * 7 / 2 < bytes("output_bytes"), "{report}");
    succeed(&["quantize", arg(&file), arg(&folder), "--to", "safetensors"]);
    let want = greedy(&demo);
    assert_eq!(greedy(&file), want);
    assert_eq!(greedy(&folder), want);
    let config = |folder: &Path| -> Value {
        let text = std::fs::read_to_string(folder.join("config.json")).expect("the model is complete");
        serde_json::from_str(&text).expect("JSON")
    };
    // transformers reads a text model with its keys at the top level under these names.
    let dense = config(&folder);
    assert_eq!(dense["model_type"], "qwen3_5_text");
    assert_eq!(dense["architectures"], serde_json::json!(["Qwen3_5ForCausalLM"]));
    let facts = json(&["inspect", arg(&file), "--json"]);
    assert_eq!(facts["model_type"], "qwen3_5");
    assert_eq!(facts["chat_template"], true);

    let (mixed, again) = (dir.path().join("mixed.gguf"), dir.path().join("mlx"));
    let types = ["--type", "Q8_0", "--module", "attn_v=Q5_0", "--module", "token_embd=F16"];
    let report = json(&[&["quantize", arg(&file), arg(&mixed), "--json"], &types[..]].concat());
    assert!(report["output_bytes"].as_u64() < report["source_bytes"].as_u64(), "{report}");
    assert_eq!(greedy(&mixed).0, want.0, "the tokenizer came along");
    succeed(&["quantize", arg(&mixed), arg(&again), "--bits", "8"]);
    assert_eq!(greedy(&again).0, want.0);
    assert_eq!(config(&again)["model_type"], "qwen3_5", "mlx-lm knows no other name");
}

/// Copies the built-in model with other names for its tensors. The config says that the output head is a tensor.
fn renamed(folder: &Path, rename: impl Fn(&str) -> String) {
    let source = demo();
    for file in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        std::fs::copy(source.join(file), folder.join(file)).expect("the folder is writable");
    }
    let config = std::fs::read_to_string(source.join("config.json")).expect("the model is complete");
    let config = config.replace(r#""tie_word_embeddings": true"#, r#""tie_word_embeddings": false"#);
    std::fs::write(folder.join("config.json"), config).expect("the folder is writable");
    let bytes = std::fs::read(source.join("model.safetensors")).expect("the model is complete");
    let header_len = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    let (header, data) = bytes[8..].split_at(header_len);
    let header: serde_json::Map<String, Value> = serde_json::from_slice(header).expect("a header");
    let header: Value = header.into_iter().map(|(name, tensor)| (rename(&name), tensor)).collect();
    let header = header.to_string();
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat();
    std::fs::write(folder.join("model.safetensors"), file).expect("the folder is writable");
}

#[test]
fn a_model_without_prefix_and_output_head_keeps_its_words() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    renamed(dir.path(), |name| name.replace("model.language_model.", ""));
    let want = greedy(&demo());
    assert_eq!(greedy(dir.path()), want);
    let file = dir.path().join("model.gguf");
    succeed(&["quantize", arg(dir.path()), arg(&file), "--type", "F32"]);
    assert_eq!(greedy(&file), want);
}

#[test]
fn a_model_without_an_embedding_is_not_written() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    renamed(dir.path(), |name| name.replace("model.language_model.", "decoder."));
    let file = dir.path().join("model.gguf");
    fail(&["quantize", arg(dir.path()), arg(&file), "--type", "F32"], "no token embedding");
    assert!(!file.exists());
}

#[test]
fn a_text_is_scored_and_a_quantisation_is_judged_by_it() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let demo = demo();
    let [own, turned, four, eight] =
        ["own.txt", "turned.txt", "four.gguf", "eight.gguf"].map(|name| dir.path().join(name));
    let text =
        succeed(&["generate", "Once upon a time", "--temperature", "0", "--max-tokens", "300", "--quiet"]);
    let words: Vec<&str> = text.split_whitespace().rev().collect();
    std::fs::write(&own, &text).expect("the folder is writable");
    std::fs::write(&turned, words.join(" ")).expect("the folder is writable");
    let eval = |text: &Path, model: &[&str]| {
        json(&[&["eval", "--perplexity", arg(text), "--window", "128", "--json"], model].concat())
    };
    let number = |report: &Value, key: &str| report[key].as_f64().unwrap_or(f64::NAN);

    let itself = eval(&own, &["--kl", arg(&demo)]);
    assert_eq!((number(&itself, "kl_divergence"), number(&itself, "same_top")), (0.0, 1.0), "{itself}");
    // The model is certain of its own most likely text, but not of the same words in another order.
    let (own_perplexity, turned_perplexity) =
        (number(&itself, "perplexity"), number(&eval(&turned, &[]), "perplexity"));
    assert!((1.0..3.0).contains(&own_perplexity), "{itself}");
    assert!(turned_perplexity > 10.0 * own_perplexity, "{turned_perplexity} and {own_perplexity}");

    succeed(&["quantize", arg(&demo), arg(&four), "--type", "Q4_0"]);
    succeed(&["quantize", arg(&demo), arg(&eight), "--type", "Q8_0"]);
    let judge = |file: &Path| {
        let report = eval(&own, &["--model", arg(file), "--kl", arg(&demo)]);
        number(&report, "kl_divergence")
    };
    let (four, eight) = (judge(&four), judge(&eight));
    assert!(0.0 < eight && 4.0 * eight < four && four < 1.0, "4 bits {four}, 8 bits {eight}");
}

#[test]
fn an_evaluation_keeps_its_limits() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let (text, model) = (dir.path().join("text.txt"), demo());
    std::fs::write(&text, "Once upon a time there was a dog. ".repeat(60)).expect("written");
    let eval = ["eval", "--perplexity", arg(&text), "--window", "128"];
    let output = common::keel(&[&eval[..], &["--windows", "0"]].concat());
    assert_eq!(output.status.code(), Some(2), "{}", common::stderr(&output));
    assert!(common::stderr(&output).contains("expected a number from 1"), "{}", common::stderr(&output));
    // Two models share the limit.
    let kl = [&eval[..], &["--windows", "1", "--kl", arg(&model), "--json", "--memory-limit"]].concat();
    let message = common::stderr(&common::keel(&[&kl[..], &["1M"]].concat()));
    let one: u64 = message
        .split("out of memory: ")
        .nth(1)
        .and_then(|rest| rest.split(' ').next()?.parse().ok())
        .expect("the bytes of one model");
    let report = json(&[&kl[..], &[&(2 * one).to_string()]].concat());
    assert_eq!(report["kl_divergence"], 0.0, "{report}");
    fail(&[&kl[..], &[&(2 * one - 1).to_string()]].concat(), "--kl, next to the first model");
}
