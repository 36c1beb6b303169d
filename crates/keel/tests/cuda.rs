//! The command line on a GPU. Needs one: `KEEL_TEST_CUDA=1`. Where the binary lies elsewhere than where it was built,
//! `KEEL_TEST_BINARY` names it.

use std::process::Command;

use serde_json::Value;

/// What `keel` prints with `--device cuda:0 --json`; `None` where there is no GPU to be tested.
fn on_gpu(args: &[&str]) -> Option<Value> {
    if std::env::var_os("KEEL_TEST_CUDA").is_none() {
        eprintln!("skipped: set KEEL_TEST_CUDA=1 on a machine with a GPU");
        return None;
    }
    let binary = std::env::var_os("KEEL_TEST_BINARY").unwrap_or_else(|| env!("CARGO_BIN_EXE_keel").into());
    let output =
        Command::new(binary).args(args).args(["--device", "cuda:0", "--json"]).output().expect("runs");
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    Some(serde_json::from_slice(&output.stdout).expect("one object"))
}

/// Failure 2: every speculative step copied all recurrent states, 2 GB in 256 steps. Here no category of memory is larger
/// after 256 of them than after a few.
#[test]
fn memory_does_not_grow_over_256_speculative_steps() {
    for mode in [&[][..], &["--speculate-optimistic"]] {
        let run = |tokens: &str| {
            let fixed = ["generate", "Once upon a time", "--context", "2560", "--speculate", "5"];
            on_gpu(&[&fixed, mode, &["--temperature", "0", "--ignore-eos", "--max-tokens", tokens]].concat())
        };
        let (Some(short), Some(long)) = (run("24"), run("2200")) else { return };
        let rounds = |report: &Value| report["speculation"]["rounds"].as_u64().expect("a count");
        assert!(rounds(&long) >= 256 + rounds(&short), "{} rounds", rounds(&long));
        for report in [&short, &long] {
            assert_eq!(report["memory"]["peak"], report["memory"]["planned"], "{mode:?}");
            assert_eq!(report["memory"]["allocated"], report["memory"]["planned"], "{mode:?}");
        }
        assert_eq!(short["memory"]["peak"], long["memory"]["peak"], "{mode:?}");
    }
}
