//! Compares the program with the reference outputs of the fixtures.

mod common;

use common::{arg, fixture, floats, holds, ints, joined, json, models, relative_error, succeed};

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
