//! What the tests of the program share: running it, fixtures, and reading what it wrote.

#![allow(dead_code)] // each test file uses its part

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use keel_weights::{SafetensorsFile, TensorSource};
use serde_json::Value;

/// The hybrid fixtures.
pub const HYBRID: [&str; 6] = [
    "qwen3_5",
    "qwen3_5_real_head_dims",
    "qwen3_5_moe",
    "qwen3_next",
    "qwen3_5_mlx_4bit",
    "qwen3_5_moe_mlx_4bit",
];

/// The plain transformers.
pub const PLAIN: [&str; 4] = ["llama", "qwen3", "qwen3_moe", "gemma3_text"];

/// All fixtures with reference logits.
pub fn models() -> impl Iterator<Item = &'static str> {
    HYBRID.into_iter().chain(PLAIN)
}

/// A fixture's folder, or `None` where the shared folder is not beside the repository.
pub fn fixture(name: &str) -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/fixtures").join(name);
    if !folder.is_dir() {
        println!("skipped: no fixture {name}");
        return None;
    }
    Some(folder)
}

/// A writable copy of a fixture, to be damaged.
pub fn copy_of(name: &str) -> Option<tempfile::TempDir> {
    let source = fixture(name)?;
    let target = tempfile::tempdir().expect("a temporary folder");
    for file in ["config.json", "model.safetensors"] {
        let bytes = std::fs::read(source.join(file)).expect("the fixture is complete");
        std::fs::write(target.path().join(file), bytes).expect("the folder is writable");
    }
    Some(target)
}

/// Runs keel; its input is empty.
pub fn keel(args: &[&str]) -> Output {
    keel_with_input(args, "")
}

/// Runs keel with this on its standard input.
pub fn keel_with_input(args: &[&str], input: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_keel"))
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("keel starts");
    // A program that has failed already does not read its input.
    let _ = child.stdin.take().expect("piped").write_all(input.as_bytes());
    child.wait_with_output().expect("keel ends")
}

/// Runs keel, which must succeed; its standard output.
pub fn succeed(args: &[&str]) -> String {
    let output = keel(args);
    assert!(output.status.success(), "keel {}: {}", args.join(" "), stderr(&output));
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// Runs keel, which must succeed and print one JSON object.
pub fn json(args: &[&str]) -> Value {
    serde_json::from_str(&succeed(args)).expect("JSON")
}

/// Runs keel, which must fail with one line that says `reason`, and no sign of a panic.
pub fn fail(args: &[&str], reason: &str) {
    fail_with(1, args, reason);
}

/// As [`fail`], for what is wrong usage but looks sound to the parser of the command line.
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

/// Norm of the difference over norm of what was wanted.
pub fn relative_error(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let square = |x: f64| x * x;
    let difference: f64 = got.iter().zip(want).map(|(a, b)| square(f64::from(*a) - f64::from(*b))).sum();
    let size: f64 = want.iter().map(|b| square(f64::from(*b))).sum();
    (difference / size).sqrt()
}
