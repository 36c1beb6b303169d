//! Detects the machine's hardware, and chooses the device of a run.

mod common;

use std::process::{Command, Output, Stdio};

use common::{json, stderr, succeed};

#[test]
fn doctor_tells_what_there_is() {
    let found = json(&["doctor", "--json"]);
    let at_least_one = |value: &serde_json::Value| value.as_u64().is_some_and(|n| n > 0);
    assert!(at_least_one(&found["cpu"]["usable_threads"]), "{found}");
    assert!(found["cpu"]["kernels"].is_string() && found["gpus"].is_array(), "{found}");
    assert!(
        found["advice"].is_array() && found["caches"].as_array().is_some_and(|c| !c.is_empty()),
        "{found}"
    );
    for library in ["driver", "nvrtc", "cublaslt", "nccl"] {
        assert!(found[library].get("version").is_some(), "{library}: {found}");
    }
    #[cfg(target_os = "linux")]
    {
        assert!(at_least_one(&found["memory"]["total"]) && at_least_one(&found["memory"]["free"]), "{found}");
        assert!(found["memory"]["free"].as_u64() <= found["memory"]["total"].as_u64(), "{found}");
    }
    let text = succeed(&["doctor"]);
    for name in ["cores", "instructions", "memory", "GPU", "driver", "NVRTC", "cuBLASLt", "NCCL", "kernels"] {
        assert!(text.lines().any(|line| line.starts_with(name)), "{name}: {text}");
    }
}

/// Runs keel without a device option. `device` is the environment's value, if any.
fn keel_on(device: Option<&str>, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_keel"));
    command.args(args).stdin(Stdio::null()).env_remove("KEEL_DEVICE");
    command.envs(device.map(|device| ("KEEL_DEVICE", device))).output().expect("keel starts")
}

/// The lines that name the device.
fn placements(output: &Output) -> Vec<String> {
    assert!(output.status.success(), "{}", stderr(output));
    let running = |line: &str| line.split_once("running on ").map(|(_, rest)| rest.to_string());
    stderr(output).lines().filter_map(running).collect()
}

#[test]
fn where_it_runs_is_said_once_unless_it_was_asked_for() {
    let generate = ["generate", "Once", "--max-tokens", "2", "--json"];
    let plan = ["plan", "--context", "256"];
    for args in [&generate[..], &plan] {
        assert_eq!(placements(&keel_on(None, args)).len(), 1, "{args:?}");
        assert_eq!(placements(&keel_on(Some("auto"), args)).len(), 1, "{args:?}");
        assert_eq!(placements(&keel_on(Some("cpu"), args)), [""; 0], "{args:?}");
        assert_eq!(placements(&keel_on(None, &[args, &["--device", "cpu"]].concat())), [""; 0], "{args:?}");
    }
    // Without a driver `auto` can only mean the CPU, and the plan is the CPU's.
    if json(&["doctor", "--json"])["driver"]["version"].is_null() {
        let auto = keel_on(None, &plan);
        assert!(placements(&auto)[0].starts_with("the CPU: "));
        // Free memory changes from one run to the next.
        let planned = |output: &Output| -> Vec<String> {
            let text = String::from_utf8_lossy(&output.stdout);
            text.lines().filter(|line| !line.starts_with("free ")).map(str::to_string).collect()
        };
        let on_cpu = planned(&keel_on(Some("cpu"), &plan));
        assert!(on_cpu.len() > 5, "{on_cpu:?}");
        assert_eq!(planned(&auto), on_cpu);
    }
    let wrong = keel_on(Some("tpu"), &plan);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(stderr(&wrong).contains("use auto, cpu, or cuda:0"), "{}", stderr(&wrong));
}

#[test]
fn shells_and_manuals_know_every_command() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = succeed(&["completions", shell]);
        assert!(script.contains("quantize") && script.contains("memory-limit"), "{shell}");
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    succeed(&["man", common::arg(folder.path())]);
    for page in ["keel.1", "keel-generate.1", "keel-serve.1", "keel-doctor.1"] {
        let text = std::fs::read_to_string(folder.path().join(page)).expect(page);
        assert!(text.contains(".TH"), "{page}");
    }
}
