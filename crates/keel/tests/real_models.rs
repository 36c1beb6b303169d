//! Real weights, if tools/real_models/fetch.sh has downloaded them. keel must generate the same tokens as llama.cpp
//! from the same values.
//!
//! There are two kinds of references:
//!
//! - tools/real_models/reference.py uses the file with its tensors decoded to f32. Any prompt is suitable.
//! - tools/real_models/decided.py uses the quantised file. Both sides then round activations to 8 bits, which can
//!   reverse near ties. So it uses only prompts without near ties.

mod common;

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{arg, json, succeed};
use serde_json::Value;

/// Number of prompts per file whose continuation may differ from the reference.
const PARTED_MAX: usize = 1;

/// If the top two logits are closer than this, either token is right, because the reference stores keys and values in
/// f16.
const NEAR_TIE: f64 = 0.05;

fn model(name: &str) -> Option<(PathBuf, Value)> {
    with_reference(name, name)
}

fn fetched(name: &str) -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache/real_models");
    let file = folder.join(format!("{name}.gguf"));
    if !file.is_file() {
        keel_testkit::skipped!("needs {name}, which tools/real_models/fetch.sh fetches");
        return None;
    }
    Some(file)
}

fn with_reference(name: &str, reference: &str) -> Option<(PathBuf, Value)> {
    let file = fetched(name)?;
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let reference = root.join("tests/data/real_models").join(format!("{reference}.json"));
    let reference = std::fs::read_to_string(reference).expect("the reference is there");
    Some((file, serde_json::from_str(&reference).expect("JSON")))
}

fn ids(value: &Value) -> Vec<u64> {
    value.as_array().expect("a list").iter().filter_map(Value::as_u64).collect()
}

/// The position of the first difference between two continuations.
fn parting(got: &[u64], want: &[u64]) -> Option<usize> {
    assert_eq!(got.len(), want.len());
    got.iter().zip(want).position(|(a, b)| a != b)
}

/// The tokens that `keel` generates after a reference's prompt, as many as the reference has.
fn continued(file: &Path, prompt: &Value, compute: &str) -> Vec<u64> {
    let text = prompt["text"].as_str().expect("text");
    let count = ids(&prompt["greedy"]).len().to_string();
    let command =
        ["generate", text, "--raw", "--model", arg(file), "--temperature", "0", "--max-tokens", &count];
    let report = json(&[&command[..], &["--ignore-eos", "--json", "--compute", compute]].concat());
    assert_eq!(report["prompt_tokens"], ids(&prompt["ids"]).len(), "{}: ids of {text:?}", file.display());
    ids(&report["tokens"])
}

/// Compares exact products on both sides.
fn compare(name: &str) {
    let Some((file, reference)) = model(name) else { return };
    let mut parted = Vec::new();
    for prompt in reference["prompts"].as_array().expect("a list") {
        if let Some(at) = parting(&continued(&file, prompt, "f32"), &ids(&prompt["greedy"])) {
            let (text, margin) = (&prompt["text"], prompt["margin"][at].as_f64().expect("a number"));
            println!("{name}: {text} parts at token {at}, where the top two are {margin} apart");
            assert!(margin < NEAR_TIE, "{name}: {text}, token {at}, margin {margin}");
            parted.push(text);
        }
    }
    assert!(parted.len() <= PARTED_MAX, "{name}: {parted:?} part from the reference");
}

/// Compares the fast products of both sides on the same quantised file.
fn compare_quantised(name: &str) {
    let Some((file, reference)) = with_reference(name, &format!("{name}.decided")) else { return };
    let prompts = reference["prompts"].as_array().expect("a list");
    assert_eq!(prompts.len(), 10);
    let parts = |prompt: &&Value| continued(&file, prompt, "auto") != ids(&prompt["greedy"]);
    let parted: Vec<&Value> = prompts.iter().filter(parts).map(|prompt| &prompt["text"]).collect();
    println!("{name}: {} of {} are equal", prompts.len() - parted.len(), prompts.len());
    assert!(parted.len() <= PARTED_MAX, "{name}: {parted:?} part from llama.cpp on the same file");
}

#[test]
fn decided_continuations_are_those_of_llama_cpp_on_the_same_file() {
    for name in ["smollm2-135m-instruct-q4_1", "gemma-3-270m-q4_k_m", "qwen2.5-coder-1.5b-q4_k_m"] {
        compare_quantised(name);
    }
}

#[test]
fn gemma_3_continues_as_the_reference_does() {
    compare("gemma-3-270m-q4_k_m");
}

#[test]
fn smollm2_continues_as_the_reference_does() {
    compare("smollm2-135m-instruct-q4_1");
}

#[test]
fn a_gguf_file_says_what_it_is() {
    let Some((file, _)) = model("smollm2-135m-instruct-q4_1") else { return };
    let facts = json(&["inspect", arg(&file), "--json"]);
    assert_eq!(facts["model_type"], "llama");
    assert_eq!(facts["licence"], "apache-2.0");
    assert_eq!(facts["chat_template"], true);
    assert_eq!(facts["dtypes"]["Q4_1"], 210);
    assert_eq!(facts["layers"]["attention"], 30);
}

#[test]
fn a_chat_model_answers() {
    let Some((file, _)) = model("smollm2-135m-instruct-q4_1") else { return };
    let question = "What is the capital of France? Answer in one sentence.";
    let command = ["generate", question, "--model", arg(&file), "--temperature", "0", "--quiet"];
    let answer = succeed(&[&command[..], &["--max-tokens", "40"]].concat());
    assert!(answer.contains("Paris"), "{answer}");
}

/// Resident bytes of a process: tensors, heap, code, and everything else.
#[cfg(target_os = "linux")]
fn resident(process: u32) -> Option<u64> {
    let all = std::fs::read_to_string(format!("/proc/{process}/smaps_rollup")).ok()?;
    let kilobytes = all.lines().find_map(|line| line.strip_prefix("Rss:"))?.trim().strip_suffix(" kB")?;
    Some(kilobytes.parse::<u64>().ok()? * 1024)
}

/// A run that fills its context.
#[cfg(target_os = "linux")]
struct Full {
    context: usize,
    /// Number of sentences in the prompt, of about nine tokens each.
    sentences: usize,
}

/// Decodes until the context is full, so that all planned memory is touched. The prompt is either most of the context
/// or short.
#[cfg(target_os = "linux")]
fn decodes_within_file_and_plan(name: &str) {
    let Some(file) = fetched(name) else { return };
    let large_pages = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    if large_pages.is_ok_and(|choice| choice.contains("[always]")) {
        keel_testkit::skipped!("the system backs any memory with large pages, unasked");
        return;
    }
    for full in [
        Full { context: 256, sentences: 20 },
        Full { context: 256, sentences: 1 },
        Full { context: 768, sentences: 70 },
    ] {
        let Full { context, sentences } = full;
        let plan = json(&["plan", "--model", arg(&file), "--context", &context.to_string(), "--json"]);
        let state =
            plan.as_object().expect("categories").iter().filter(|(category, _)| *category != "weights");
        let state: u64 = state.filter_map(|(_, bytes)| bytes.as_u64()).sum();
        let allowed = std::fs::metadata(&file).expect("it is there").len() * 105 / 100 + state;
        // If the system delays the reader, the program may end before a sample. So the test tries again.
        let seen = (0..10).map(|_| most_while_decoding(&file, &full)).find(|&most| most > 0);
        let most = seen.expect("it was seen");
        println!(
            "{name}, {context} tokens, {sentences} sentences: {most} bytes of {allowed}, {state} of them state"
        );
        assert!(most <= allowed, "{name}: {most} bytes are resident, {allowed} allowed");
    }
}

/// The largest resident size from the first token on; 0 if the program ended before a sample.
#[cfg(target_os = "linux")]
fn most_while_decoding(file: &Path, full: &Full) -> u64 {
    let prompt = "One day a small dog met a cat. ".repeat(full.sentences);
    let context = full.context.to_string();
    let options =
        ["--temperature", "0", "--max-tokens", &context, "--ignore-eos", "--context", &context, "--quiet"];
    let mut keel = Command::new(env!("CARGO_BIN_EXE_keel"))
        .env("KEEL_DEVICE", "cpu")
        .args(["generate", &prompt, "--raw", "--model", arg(file)])
        .args(options)
        .stdout(Stdio::piped())
        .spawn()
        .expect("keel starts");
    let mut text = keel.stdout.take().expect("piped");
    let (mut most, mut piece) = (0, [0; 64]);
    while let Ok(1..) = text.read(&mut piece) {
        most = most.max(resident(keel.id()).unwrap_or(0));
    }
    assert!(keel.wait().expect("it ends").success());
    most
}

#[cfg(target_os = "linux")]
#[test]
fn smollm2_decodes_within_its_file_and_its_plan() {
    decodes_within_file_and_plan("smollm2-135m-instruct-q4_1");
}

#[cfg(target_os = "linux")]
#[test]
fn gemma_3_decodes_within_its_file_and_its_plan() {
    decodes_within_file_and_plan("gemma-3-270m-q4_k_m");
}

#[cfg(target_os = "linux")]
#[test]
fn qwen_2_5_coder_decodes_within_its_file_and_its_plan() {
    decodes_within_file_and_plan("qwen2.5-coder-1.5b-q4_k_m");
}
