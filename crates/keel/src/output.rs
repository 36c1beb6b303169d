//! Standard output, whose failures are errors like any other: `println!` would panic when a reader has gone.

use std::io::{Write, stderr, stdout};

use anyhow::{Context, Result};
use serde_json::Value;

/// Prints text as it is, at once.
pub fn text(text: &str) -> Result<()> {
    let mut out = stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("cannot write to standard output")
}

/// Prints text on standard error: what is about the result and no part of it. Nobody may be reading there, which is no failure.
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
