//! Options out of range, contradictory or missing give one line on standard error. Wrong usage has exit code 2.

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::{arg, fail, fixture, keel, misuse, stderr, succeed};

#[test]
fn options_out_of_range() {
    let folder = fixture("qwen3_5");
    let with = |extra: &[&str], reason: &str| {
        fail(&[&["generate", "--model", arg(&folder), "--ids", "1"], extra].concat(), reason);
    };
    with(&["--temperature", "1000"], "temperature is 1000");
    with(&["--top-p", "0"], "top-p is 0, expected 1.1754944e-38 to 1.0");
    // Without a driver the message names its library, with a driver the device.
    with(&["--device", "cuda:99"], "cuda");
    let hub = if cfg!(feature = "hub") { "; a model of the hub is OWNER/NAME" } else { "" };
    let reason = format!("--model no-owner: there is no such file or folder{hub}");
    fail(&["generate", "--model", "no-owner", "x"], &reason);
    fail(&["generate", "--model", "/nowhere/at/all", "x"], "there is no such file or folder");
    let not_here = if cfg!(feature = "hub") {
        "HF_HUB_OFFLINE forbids to download it"
    } else {
        "without the feature hub"
    };
    fail(&["generate", "--model", "owner/name", "x"], not_here);
}

#[test]
fn a_bias_for_a_token_that_the_model_does_not_have() {
    let folder = fixture("qwen3_5");
    let biased =
        ["generate", "--model", arg(&folder), "--ids", "1", "--logit-bias", "511=1", "--logit-bias", "512=1"];
    let output = keel(&biased);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let reason = "a logit bias is for token 512, but the model has 512 tokens, from 0";
    assert!(stderr(&output).contains(reason), "{}", stderr(&output));
}

#[test]
fn values_that_an_option_cannot_mean() {
    // The parser explains itself in several lines.
    let refused = |args: &[&str], reason: &str| {
        let output = keel(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(reason), "{args:?}: {}", stderr(&output));
    };
    for command in [&["generate", "x"][..], &["chat"], &["fit"], &["serve"]] {
        refused(&[command, &["--context", "0"]].concat(), "expected a number from 1");
    }
    for origin in ["foo", "https://", "://a.org", "https://a.org/page", ""] {
        refused(&["serve", "--cors", origin], "expected * or scheme and host");
    }
}

#[test]
fn quantising_what_cannot_be_quantised() {
    let folder = fixture("qwen3_5_mlx_4bit");
    let dir = tempfile::tempdir().expect("a temporary folder");
    let out: PathBuf = dir.path().join("out");
    fail(&["quantize", arg(&folder), arg(&out)], "quantised already");
    fail(&["quantize", "/nowhere/at/all", arg(&out)], "no such file or folder");
    let dense = fixture("qwen3_5");
    misuse(&["quantize", arg(&dense), arg(&out), "--bits", "1"], "1 bits in groups of 64 are not supported");
    fail(&["quantize", arg(&dense), arg(&out), "--module", "nothing=8"], "an override names it");
    assert!(!out.join("config.json").exists());
    let file = dir.path().join("out.gguf");
    misuse(
        &["quantize", arg(&dense), arg(&out), "--to", "gguf"],
        "the name of a GGUF file must end in .gguf",
    );
    let unwritten = "--type Q2_K is not a type that can be written; there are F32, F16, Q4_0, ";
    misuse(&["quantize", arg(&dense), arg(&file), "--type", "Q2_K"], unwritten);
    for wrong in ["attn_q=8", "attn_q"] {
        misuse(&["quantize", arg(&dense), arg(&file), "--module", wrong], &format!("--module {wrong}: "));
    }
    misuse(&["quantize", arg(&dense), arg(&out), "--module", "x=7/64"], "--module x=7/64: 7 bits in groups");
    misuse(&["quantize", arg(&dense), arg(&out), "--module", "x=4/"], "the group size is not a whole number");
    fail(&["quantize", arg(&dense), arg(&file), "--module", "nothing=Q8_0"], "an override names it");
    assert!(!file.exists());
    let rotated = fixture("qwen3_5_paro");
    fail(&["quantize", arg(&rotated), arg(&file)], "its input is rotated");
    fs::write(&file, "kept").expect("the folder is writable");
    fail(&["quantize", arg(&dense), arg(&file)], "exists already");
}

#[test]
fn options_that_contradict_each_other_are_refused() {
    let dense = fixture("qwen3_5");
    let dir = tempfile::tempdir().expect("a temporary folder");
    let (folder, file) = (dir.path().join("out"), dir.path().join("out.gguf"));
    let quantize = |out: &Path, flags: &[&str], reason: &str| {
        misuse(&[&["quantize", arg(&dense), arg(out)], flags].concat(), reason);
        assert!(!out.exists(), "{flags:?}");
    };
    quantize(&folder, &["--type", "Q4_0"], "--type is for --to gguf, but mlx is written");
    quantize(&folder, &["--dtype", "f16"], "--dtype is for --to safetensors, but mlx is written");
    quantize(&file, &["--bits", "4"], "--bits is for --to mlx, but gguf is written");
    quantize(&file, &["--group-size", "32"], "--group-size is for --to mlx");
    quantize(&file, &["--shard-size", "1G"], "--shard-size is for --to mlx");
    quantize(&folder, &["--to", "safetensors", "--bits", "4"], "--bits is for --to mlx, but safetensors is");
    quantize(&folder, &["--to", "safetensors", "--module", "a=4"], "--module is for --to mlx and gguf");
    quantize(&file, &["--to", "mlx"], "this is the name of a GGUF file");
    let pairs: [&[&str]; 17] = [
        &["generate", "x", "--chat", "--raw"],
        &["generate", "x", "--raw", "--system", "y"],
        &["generate", "--ids", "1", "--chat"],
        &["generate", "x", "-p", "y"],
        &["generate", "x", "--echo", "--json"],
        &["generate", "x", "--schema", "a", "--grammar", "b"],
        &["generate", "x", "--schema", "a", "--one-by-one"],
        &["generate", "x", "--speculate-optimistic", "--schema", "a"],
        &["generate", "x", "--speculate-optimistic", "--grammar", "a"],
        &["generate", "x", "--speculate-optimistic", "--one-by-one"],
        &["serve", "--no-prefix-reuse", "--exact-prefix-reuse"],
        &["serve", "--no-prefix-reuse", "--prefix-states", "1M"],
        &["serve", "--swap", "1M"],
        &["serve", "--on-demand", "--resident"],
        &["fit", "a", "--model", "b"],
        &["bench", "serve", "--file", "a", "--requests", "5"],
        &["bench", "serve", "--file", "a", "--gen", "5"],
    ];
    for args in pairs {
        let output = keel(args);
        assert_eq!(output.status.code(), Some(2), "keel {}: {}", args.join(" "), stderr(&output));
    }
    misuse(&["generate", "x", "--one-by-one", "--speculate", "2"], "--one-by-one does not run");
    misuse(&["generate", "x", "--chat", "--echo"], "--echo is for a text that is continued");
    misuse(&["generate", "--ids", "1", "--echo"], "--echo prints a text");
}

#[test]
fn help_leaves_out_what_a_command_always_refuses() {
    for (command, options) in [
        ("plan", &["--nodes", "--node"][..]),
        ("fit", &["--nodes", "--node", "--memory-limit"]),
        ("inspect", &["--nodes", "--node", "--memory-limit", "--devices", "--split"]),
        ("logits", &["--nodes", "--node"]),
        ("eval", &["--nodes", "--node"]),
        ("embed", &["--nodes", "--node"]),
    ] {
        let help = succeed(&[command, "--help"]);
        for option in options {
            assert!(!help.contains(&format!("{option} <")), "keel {command} {option}: {help}");
        }
    }
    misuse(&["inspect", "--memory-limit", "1Gi"], "nothing is loaded here");
    misuse(&["fit", "--memory-limit", "1Gi"], "nothing is loaded here");
    // Others take them.
    let serve = succeed(&["serve", "--help"]);
    for option in ["--nodes <", "--memory-limit <", "--devices <", "--split <"] {
        assert!(serve.contains(option), "{option}: {serve}");
    }
    let plan = succeed(&["plan", "--help"]);
    assert!(plan.contains("Only with --serve: the server's limit"), "{plan}");
}

#[test]
fn wrong_usage_has_its_own_exit_code() {
    let cases: [&[&str]; 14] = [
        &[],
        &["sing"],
        &["generate", "--max-tokens", "many", "x"],
        &["generate", "--ids", "1,x"],
        &["generate", "x", "--ids", "1"],
        &["generate", "--memory-limit", "3Q", "x"],
        &["logits", "--ids", "1"],
        &["quantize", "a"],
        &["bench", "--bits", "4"],
        &["plan", "--batch", "0"],
        &["generate", "x", "--prefill-step", "100"],
        &["generate", "x", "--prefill-step", "0"],
        &["generate", "x", "--device", "abacus"],
        &["generate", "x", "--device", "cuda:first"],
    ];
    for args in cases {
        let output = keel(args);
        assert_eq!(output.status.code(), Some(2), "keel {}: {}", args.join(" "), stderr(&output));
        assert!(!output.stderr.is_empty() && output.stdout.is_empty());
    }
}

#[test]
fn wrong_usage_that_the_parser_cannot_see() {
    misuse(&["generate"], "give a text");
    misuse(&["logits", "--out", "never-written.safetensors"], "no tokens");
    misuse(&["bench", "--prompt", "0"], "at least one token");
    misuse(&["bench", "serve", "--rate=-1"], "expected 0 to 1000000");
    misuse(&["eval", "--perplexity", "a", "--window", "100"], "not a positive multiple of 128");
    misuse(&["bench", "--shape", "qwen9-1b"], "there are qwen3.5-0.8b");
    misuse(&["bench", "--shape", "qwen3.5-0.8b", "--bits", "7"], "7 bits in groups of 64 are not supported");
    let folder = fixture("qwen3_5");
    let with = |extra: &[&str], reason: &str| {
        misuse(&[&["generate", "--model", arg(&folder), "--ids", "1"], extra].concat(), reason);
    };
    with(&["--stop", "the end"], "--stop needs a tokenizer");
}
