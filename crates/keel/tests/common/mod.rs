//! Helpers for the tests of the program: they run it, provide fixtures, and read its output.

#![allow(dead_code, unused_imports)] // each test file uses its part

#[cfg(target_os = "linux")]
pub mod hostile;
#[cfg(feature = "hub")]
pub mod hub;
#[cfg(unix)]
pub mod served;
pub mod written;

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

pub use keel_testkit::compare::relative_error;
pub use keel_testkit::fixtures::{HYBRID, PLAIN, demo, fixture, models};
use keel_weights::{SafetensorsFile, TensorSource};
use serde_json::Value;

/// A writable copy of a fixture.
pub fn copy_of(name: &str) -> tempfile::TempDir {
    let source = fixture(name);
    let target = tempfile::tempdir().expect("a temporary folder");
    for file in ["config.json", "model.safetensors"] {
        let bytes = std::fs::read(source.join(file)).expect("the fixture is complete");
        std::fs::write(target.path().join(file), bytes).expect("the folder is writable");
    }
    target
}

/// Runs keel with empty input.
pub fn keel(args: &[&str]) -> Output {
    keel_with_input(args, "")
}

/// Runs keel with `input` on standard input. The default device is the CPU, and no hub is contacted.
pub fn keel_with_input(args: &[&str], input: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_keel"))
        .args(args)
        .env("KEEL_DEVICE", "cpu")
        .env("KEEL_CONFIG", "")
        .env("HF_HUB_OFFLINE", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("keel starts");
    // A program that already failed does not read its input.
    let _ = child.stdin.take().expect("piped").write_all(input.as_bytes());
    child.wait_with_output().expect("keel ends")
}

/// Runs keel, which must succeed, and returns its standard output.
pub fn succeed(args: &[&str]) -> String {
    let output = keel(args);
    assert!(output.status.success(), "keel {}: {}", args.join(" "), stderr(&output));
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// Runs keel, which must succeed and print one JSON object.
pub fn json(args: &[&str]) -> Value {
    serde_json::from_str(&succeed(args)).expect("JSON")
}

/// Runs keel, which must fail with one line that contains `reason`, and without a panic.
pub fn fail(args: &[&str], reason: &str) {
    fail_with(1, args, reason);
}

/// As [`fail`], for wrong usage that the command-line parser cannot detect.
pub fn misuse(args: &[&str], reason: &str) {
    fail_with(2, args, reason);
}

fn fail_with(code: i32, args: &[&str], reason: &str) {
    let output = keel(args);
    let message = stderr(&output);
    let shown = format!("keel {}: {message}", args.join(" "));
    assert_eq!(output.status.code(), Some(code), "{shown}");
    assert_eq!(message.lines().count(), 1, "{shown}");
    assert!(message.starts_with("keel: ") && message.contains(reason), "expected {reason:?}; {shown}");
    assert!(!message.contains("panicked") && !message.contains("a bug"), "{shown}");
}

/// Standard error as text.
pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The bytes of all categories of a plan or a report of memory.
pub fn total(categories: &Value) -> u64 {
    let categories = categories.as_object().expect("categories").iter();
    // The memory of requests is a bound, which no ledger has.
    categories.filter(|(name, _)| *name != "requests").filter_map(|(_, bytes)| bytes.as_u64()).sum()
}

/// A path as an argument.
pub fn arg(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// Ids as an argument.
pub fn joined(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

/// The floats of a tensor of a file.
pub fn floats(file: &Path, name: &str) -> Vec<f32> {
    let file = SafetensorsFile::open(file).expect("the file opens");
    file.tensor(name).expect("present").to_f32().expect("float")
}

/// The u32 or i32 elements of a tensor of a file.
pub fn ints(file: &Path, name: &str) -> Vec<u32> {
    let file = SafetensorsFile::open(file).expect("the file opens");
    let bytes = file.tensor(name).expect("present").bytes();
    bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
}

/// Whether a file holds a tensor.
pub fn holds(file: &Path, name: &str) -> bool {
    SafetensorsFile::open(file).expect("the file opens").contains(name)
}
