//! The command line on a GPU. The tests need a GPU and `KEEL_TEST_CUDA=1`. `KEEL_TEST_BINARY` names the binary if it is
//! not where it was built.

use std::process::Command;
use std::sync::{Mutex, PoisonError};

use serde_json::Value;

/// The driver reports the memory of all processes and threads, so these tests run one at a time.
static DEVICE: Mutex<()> = Mutex::new(());

/// JSON output of `keel` with `--device cuda:0 --json`. `None` if there is no GPU to test.
fn on_gpu(args: &[&str]) -> Option<Value> {
    if !keel_testkit::has_gpu!() {
        return None;
    }
    let binary = std::env::var_os("KEEL_TEST_BINARY").unwrap_or_else(|| env!("CARGO_BIN_EXE_keel").into());
    let output =
        Command::new(binary).args(args).args(["--device", "cuda:0", "--json"]).output().expect("runs");
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    Some(serde_json::from_slice(&output.stdout).expect("one object"))
}

/// Failure 2: every speculative step copied all recurrent states, 2 GB in 256 steps. The test checks that no memory
/// category is larger after 256 speculative steps than after a few.
#[test]
fn memory_does_not_grow_over_256_speculative_steps() {
    let _alone = DEVICE.lock().unwrap_or_else(PoisonError::into_inner);
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

/// The device's memory in use is the tensors, which the plan has to the byte, plus the driver's own part. The driver's
/// part does not depend on the tensors: with 61,440 more tokens it is the same, except for the granularity of mapped
/// memory.
#[test]
fn the_plan_and_the_driver_are_all_that_the_device_has_in_use() {
    let _alone = DEVICE.lock().unwrap_or_else(PoisonError::into_inner);
    const GRANULE: u64 = 2 << 20;
    // The keys and the values of 6 layers, and the arena.
    const POOLS: u64 = 2 * 6 + 1;
    let shape = ["--shape", "qwen3.5-0.8b", "--bits", "4"];
    let total = |report: &Value| {
        report.as_object().expect("categories").values().filter_map(Value::as_u64).sum::<u64>()
    };
    let run = |prompt: usize| {
        let (prompt, context) = (prompt.to_string(), (prompt + 8).to_string());
        let plan = on_gpu(&[&["plan", "--context", &context][..], &shape].concat())?;
        let how = ["bench", "--prompt", &prompt, "--gen", "8", "--repeat", "1"];
        let memory = on_gpu(&[&how[..], &shape].concat())?["memory"].take();
        for kind in ["planned", "allocated", "peak"] {
            assert_eq!(total(&memory[kind]), total(&plan), "{kind} of {prompt}");
        }
        let driver = memory["driver"].clone();
        let of = |field: &str| driver[field].as_u64().unwrap_or(0);
        let in_use = of("total") - of("free");
        assert!(of("pinned") > 0, "writes of the host pass through pinned memory: {driver}");
        // The pinned bytes and those of `host` are memory of the host.
        let on_device = total(&plan) - of("pinned") - plan["host"].as_u64().expect("planned");
        assert_eq!(in_use, of("others") + of("bytes") + on_device, "{driver}");
        eprintln!(
            "{prompt}: {in_use} bytes in use, {} planned, {driver}; before: {}",
            total(&plan),
            plan["driver"]
        );
        let room = of("bytes").saturating_sub(plan["driver"]["bytes"].as_u64().expect("measured"));
        assert!(room <= 512 << 20, "{room} bytes of code: more than the room that the default limit leaves");
        Some(of("bytes"))
    };
    let (Some(short), Some(long)) = (run(4096), run(65536)) else { return };
    assert!(long.abs_diff(short) <= POOLS * GRANULE, "{short} and {long}");
}
