//! `keel serve --shape`: random weights of a shape, so that the memory of a server is proved without a checkpoint.

#![cfg(unix)]

mod common;

use common::served::{ledger, metrics, planned, post, signal, start_with};
use common::{arg, keel_with_input, misuse, stderr};
use serde_json::{Value, json};

/// A small mixture of experts with recurrent layers, attention and a head for drafts.
fn tiny_config() -> Value {
    json!({
        "model_type": "qwen3_5_moe",
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "full_attention_interval": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "vocab_size": 512,
        "tie_word_embeddings": false,
        "max_position_embeddings": 4096,
        "mtp_num_hidden_layers": 1,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25}
    })
}

/// The body of a response.
fn body(response: &str) -> Value {
    let (head, body) = response.split_once("\r\n\r\n").expect("a head");
    assert!(head.starts_with("HTTP/1.1 200"), "{response}");
    serde_json::from_str(body).expect("JSON")
}

/// The sum over all labels of a counter.
fn counter(text: &str, name: &str) -> u64 {
    let of_line = |line: &str| line.strip_prefix(name)?.rsplit_once(' ')?.1.parse::<u64>().ok();
    text.lines().filter_map(of_line).sum()
}

#[test]
fn a_shape_is_served_with_drafts_within_its_plan() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("config.json");
    std::fs::write(&path, tiny_config().to_string()).expect("written");
    let shape = ["--shape", arg(&path), "--bits", "5", "--group-size", "32", "--sequences", "2"];
    let shape = [&shape[..], &["--context", "512", "--drafts", "2", "--drafts-always"]].concat();
    for optimistic in [false, true] {
        let flags = [&shape[..], if optimistic { &["--drafts-optimistic"] } else { &[] }].concat();
        let (plan, _) = planned(&flags);
        assert!(plan["delta_log"] > 0 && plan["recurrent"] > 0, "{plan:?}");
        let (mut child, address) = start_with(&flags);
        for i in 0..20 {
            let prompt: Value = if i % 2 == 0 { json!([1, 2, 511, 300, i]) } else { json!("Once upon") };
            let asked = json!({"prompt": prompt, "max_tokens": 24, "temperature": 0});
            let answer = body(&post(&address, "/v1/completions", &asked.to_string()));
            assert_eq!(answer["usage"]["completion_tokens"], 24, "there is no end token: {answer}");
            for kind in ["planned", "allocated", "peak"] {
                assert_eq!(ledger(&address, kind), plan, "{kind} after {i} requests");
            }
        }
        let text = metrics(&address);
        let (drafted, accepted) =
            (counter(&text, "keel_drafts_total"), counter(&text, "keel_drafts_accepted_total"));
        assert!(drafted >= 20, "it drafts always: {drafted}");
        assert!(if optimistic { accepted == drafted } else { accepted < drafted }, "{accepted} of {drafted}");
        signal(&child, "-TERM");
        assert!(child.wait().expect("it ends").success());
    }
}

#[test]
fn a_shape_is_named_with_care() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("config.json");
    std::fs::write(&path, tiny_config().to_string()).expect("written");
    misuse(&["serve", "--shape", "qwen9-1b"], "there are qwen3.5-0.8b");
    misuse(&["serve", "--shape", arg(&path), "--drafts", "0", "--drafts-always"], "allows no drafts");
    misuse(&["serve", "--shape", "qwen3-8b", "--drafts", "2"], "no multi-token-prediction head");
    let both = keel_with_input(&["serve", "--shape", "qwen3-8b", "--model", "x"], "");
    assert_eq!(both.status.code(), Some(2), "{}", stderr(&both));
    let missing = keel_with_input(&["serve", "--shape", "no/such/config.json"], "");
    assert!(stderr(&missing).contains("--shape no/such/config.json"), "{}", stderr(&missing));
}

#[test]
fn the_log_says_that_weights_are_random_and_drafts_unchecked() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("config.json");
    std::fs::write(&path, tiny_config().to_string()).expect("written");
    // The limit ends the server before it listens.
    let flags = ["--drafts", "1", "--drafts-optimistic", "--memory-limit", "1000", "--port", "0"];
    let output =
        keel_with_input(&[&["serve", "--shape", arg(&path), "--group-size", "32"], &flags[..]].concat(), "");
    let log = stderr(&output);
    assert!(log.contains("random: answers mean nothing"), "{log}");
    assert!(log.contains("drafts are accepted without verification"), "{log}");
}
