//! Writes to standard output and returns failures as errors. `println!` would panic when the reader has closed the
//! pipe.

use std::io::{Write, stderr, stdout};

use anyhow::{Context, Result};
use serde_json::Value;

/// Prints text unchanged, and flushes.
pub fn text(text: &str) -> Result<()> {
    let mut out = stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("cannot write to standard output")
}

/// Prints text that is not part of the result on standard error. A failure is ignored, because standard error may be
/// closed.
pub fn aside(text: &str) {
    let _ = stderr().lock().write_all(text.as_bytes());
}

/// Prints a line.
pub fn line(line: &str) -> Result<()> {
    text(&format!("{line}\n"))
}

/// Prints one JSON object on one line.
pub fn json(value: &Value) -> Result<()> {
    line(&value.to_string())
}
