//! Files and standard input that a command reads whole. Each has a limit of bytes. An option names a regular file or a
//! pipe, such as the shell's `<(...)`. Devices are refused, because they have no end. Files of a folder that somebody
//! else filled are read with `keel_weights::read_regular`, which refuses pipes, too.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::Path;
use std::sync::mpsc::channel;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use keel_weights::open_regular;

/// Most bytes of settings: options, keys, a schema or a grammar.
pub const SETTINGS_BYTES_MAX: u64 = 1 << 20;
/// Most bytes of a prompt, or of a turn.
pub const PROMPT_BYTES_MAX: u64 = 64 << 20;
/// Most bytes of a file with many texts, or with pictures as data URIs.
pub const TEXTS_BYTES_MAX: u64 = 256 << 20;

/// Longest wait for a pipe to be opened for writing.
const WRITER_WAIT: Duration = Duration::from_secs(2);

/// The text of a file or pipe of at most `bytes_max` bytes.
///
/// # Errors
/// It cannot be read, is neither a regular file nor a pipe with a writer, is too large or is not UTF-8.
pub fn text_of(path: &Path, bytes_max: u64) -> Result<String> {
    let text = String::from_utf8(bytes_of(path, bytes_max)?);
    text.with_context(|| format!("{} is not text in UTF-8", path.display()))
}

/// The bytes of a file or pipe of at most `bytes_max` bytes.
///
/// # Errors
/// It cannot be read, is neither a regular file nor a pipe with a writer, or is too large.
pub fn bytes_of(path: &Path, bytes_max: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let read = open(path)?.take(bytes_max.saturating_add(1)).read_to_end(&mut bytes);
    read.with_context(|| format!("cannot read {}", path.display()))?;
    if bytes.len() as u64 > bytes_max {
        bail!("cannot read {}: it has more than {bytes_max} bytes", path.display());
    }
    Ok(bytes)
}

/// Opens a regular file or a pipe.
///
/// # Errors
/// It cannot be opened, is neither a regular file nor a pipe, or the pipe has no writer.
pub fn open(path: &Path) -> Result<File> {
    let opened = if is_pipe(path) { open_pipe(path) } else { open_regular(path) };
    opened.with_context(|| format!("cannot read {}{}", path.display(), instead(path)))
}

fn is_pipe(path: &Path) -> bool {
    #[cfg(unix)]
    {
        let kind = std::fs::metadata(path).map(|facts| facts.file_type());
        kind.is_ok_and(|kind| std::os::unix::fs::FileTypeExt::is_fifo(&kind))
    }
    #[cfg(not(unix))]
    {
        let _ = path;
        false
    }
}

/// Opens a pipe. Opening waits until another process opens it for writing. So a thread opens it, and keeps waiting if
/// no process does.
fn open_pipe(path: &Path) -> io::Result<File> {
    let (opened, open) = channel();
    let path = path.to_path_buf();
    std::thread::Builder::new().name("keel-pipe".into()).spawn(move || opened.send(File::open(path)))?;
    let nobody =
        || format!("it is a pipe that nobody has opened for writing for {} s", WRITER_WAIT.as_secs());
    open.recv_timeout(WRITER_WAIT).unwrap_or_else(|_| Err(io::Error::new(ErrorKind::TimedOut, nobody())))
}

/// The advice after an error about this path: it may be a terminal.
fn instead(path: &Path) -> &'static str {
    if path == Path::new("/dev/stdin") {
        " (- stands for standard input, where that can be read)"
    } else {
        ""
    }
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

    #[cfg(unix)]
    #[test]
    fn a_pipe_is_read_to_its_end_and_up_to_the_limit() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        // Each time a new pipe: a child that another test just starts may hold the last one for a moment.
        let make = |name: &str| {
            let pipe = folder.path().join(name);
            assert!(std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo runs").success());
            pipe
        };
        let read = |text: &'static str, bytes_max: u64| {
            let pipe = make(text);
            let to = pipe.clone();
            let writer = std::thread::spawn(move || std::fs::write(to, text));
            let read = text_of(&pipe, bytes_max);
            // The reader is gone once the limit is passed, so the writer may fail.
            let _ = writer.join().expect("it ends");
            read
        };
        assert_eq!(read("text", 4).expect("it fits"), "text");
        let refused = read("texts", 4).expect_err("too long").to_string();
        assert!(refused.ends_with("it has more than 4 bytes"), "{refused}");
        let refused = format!("{:#}", text_of(&make("pipe"), 4).expect_err("nobody writes"));
        assert!(refused.contains("nobody has opened for writing"), "{refused}");
    }

    #[test]
    fn input_without_end_is_refused() {
        assert_eq!(bounded(&b"text"[..], 4).expect("it fits"), "text");
        let endless = bounded(io::repeat(b'x'), 1 << 10).expect_err("it has no end").to_string();
        assert_eq!(endless, "standard input has more than 1024 bytes");
        assert!(bounded(&b"\xff"[..], 4).is_err());
    }
}
