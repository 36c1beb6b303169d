//! Files and standard input that a command reads whole. Each has a limit of bytes, and a file must be a regular file: a
//! device has no end, and a pipe may have no writer.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::Path;

use anyhow::{Context, Result, bail};
use keel_weights::{open_regular, read_regular};

/// Most bytes of settings: options, keys, a schema or a grammar.
pub const SETTINGS_BYTES_MAX: u64 = 1 << 20;
/// Most bytes of a prompt, or of a turn.
pub const PROMPT_BYTES_MAX: u64 = 64 << 20;
/// Most bytes of a file with many texts, or with pictures as data URIs.
pub const TEXTS_BYTES_MAX: u64 = 256 << 20;

/// The text of a regular file of at most `bytes_max` bytes.
///
/// # Errors
/// The file cannot be read, is not a regular file, is too large or is not UTF-8.
pub fn text_of(path: &Path, bytes_max: u64) -> Result<String> {
    let text = String::from_utf8(bytes_of(path, bytes_max)?);
    text.with_context(|| format!("{} is not text in UTF-8", path.display()))
}

/// The bytes of a regular file of at most `bytes_max` bytes.
///
/// # Errors
/// The file cannot be read, is not a regular file or is too large.
pub fn bytes_of(path: &Path, bytes_max: u64) -> Result<Vec<u8>> {
    let bytes = read_regular(path, bytes_max);
    bytes.with_context(|| format!("cannot read {}{}", path.display(), instead(path)))
}

/// Opens a regular file.
///
/// # Errors
/// The file cannot be opened or is not a regular file.
pub fn open(path: &Path) -> Result<File> {
    open_regular(path).with_context(|| format!("cannot read {}{}", path.display(), instead(path)))
}

/// What to do about a pipe of the shell.
fn instead(path: &Path) -> &'static str {
    let is_pipe = path == Path::new("/dev/stdin") || path.starts_with("/dev/fd");
    if is_pipe { " (write it to a file; - stands for standard input, where that can be read)" } else { "" }
}

/// All of standard input, which may be a pipe.
///
/// # Errors
/// It cannot be read, has more than `bytes_max` bytes or is not UTF-8.
pub fn stdin_text(bytes_max: u64) -> Result<String> {
    bounded(io::stdin().lock(), bytes_max)
}

fn bounded(input: impl Read, bytes_max: u64) -> Result<String> {
    let mut bytes = Vec::new();
    input
        .take(bytes_max.saturating_add(1))
        .read_to_end(&mut bytes)
        .context("cannot read standard input as text")?;
    if bytes.len() as u64 > bytes_max {
        bail!("standard input has more than {bytes_max} bytes");
    }
    let text = String::from_utf8(bytes).map_err(|error| io::Error::new(ErrorKind::InvalidData, error));
    text.context("cannot read standard input as text")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn input_without_end_is_refused() {
        assert_eq!(bounded(&b"text"[..], 4).expect("it fits"), "text");
        let endless = bounded(io::repeat(b'x'), 1 << 10).expect_err("it has no end").to_string();
        assert_eq!(endless, "standard input has more than 1024 bytes");
        assert!(bounded(&b"\xff"[..], 4).is_err());
    }
}
