//! From an error to one line and an exit code.

use std::io::{self, ErrorKind};
use std::panic::{self, AssertUnwindSafe, PanicHookInfo};
use std::process::ExitCode;
use std::sync::Mutex;

use anyhow::{Error, Result};

/// Where the last panic happened. The libraries catch some and turn them into errors, so a panic is not reported
/// when it happens but where it arrives.
static LAST_PANIC: Mutex<Option<String>> = Mutex::new(None);

/// Exit code of wrong usage; clap's own.
const WRONG_USAGE: u8 = 2;

/// Wrong usage that the parser of the command line cannot see.
#[derive(Debug)]
struct Usage(String);

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// An error that ends the program as wrong usage.
pub fn usage(message: impl Into<String>) -> Error {
    Usage(message.into()).into()
}

/// Runs the program. A failure becomes one line on standard error and exit code 1, or 2 for wrong usage; a panic, which is
/// a bug, has exit code 1 too. A reader that closed the pipe, such as `head`, has seen what it wanted: that is no failure.
pub fn guard(program: impl FnOnce() -> Result<()>) -> ExitCode {
    panic::set_hook(Box::new(note_panic));
    let (line, code) = match panic::catch_unwind(AssertUnwindSafe(program)) {
        Ok(Ok(())) => return ExitCode::SUCCESS,
        Ok(Err(error)) if is_closed_pipe(&error) => return ExitCode::SUCCESS,
        Ok(Err(error)) => {
            let code = if error.is::<Usage>() { ExitCode::from(WRONG_USAGE) } else { ExitCode::FAILURE };
            (one_line(&with_causes(&error)), code)
        }
        Err(_) => {
            let place = LAST_PANIC.lock().map_or(None, |mut last| last.take()).unwrap_or_default();
            let line = format!("this is a bug in keel, please report it: {}", one_line(&place));
            (line, ExitCode::FAILURE)
        }
    };
    // Nobody may be reading standard error either.
    let _ = io::Write::write_all(&mut io::stderr(), format!("keel: {line}\n").as_bytes());
    code
}

fn note_panic(info: &PanicHookInfo<'_>) {
    if let Ok(mut last) = LAST_PANIC.lock() {
        *last = Some(info.to_string());
    }
}

fn is_closed_pipe(error: &Error) -> bool {
    let is_pipe = |e: &io::Error| e.kind() == ErrorKind::BrokenPipe;
    error.chain().filter_map(|cause| cause.downcast_ref()).any(is_pipe)
}

/// The message and its causes, but for those that the message before has quoted.
fn with_causes(error: &Error) -> String {
    let mut parts: Vec<String> = Vec::new();
    for cause in error.chain().map(ToString::to_string) {
        if parts.last().is_none_or(|last| !last.ends_with(&cause)) {
            parts.push(cause);
        }
    }
    parts.join(": ")
}

/// Messages quote names from files, which may hold line breaks and control characters.
fn one_line(message: &str) -> String {
    let lines = message.lines().map(str::trim).filter(|line| !line.is_empty());
    let joined = lines.collect::<Vec<_>>().join(" ");
    joined.chars().map(|c| if c.is_control() { '\u{FFFD}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_line() {
        assert_eq!(one_line("a\n  b\r\n\nc\u{1b}[31m"), "a b c\u{FFFD}[31m");
    }

    #[test]
    fn a_cause_that_was_quoted_is_not_said_again() {
        let cause = || io::Error::new(ErrorKind::NotFound, "not there");
        assert_eq!(with_causes(&Error::from(cause()).context("cannot read a")), "cannot read a: not there");
        assert_eq!(with_causes(&Error::from(cause()).context("b: not there")), "b: not there");
    }

    #[test]
    fn a_closed_pipe_is_recognised_below_its_context() {
        let error = Error::from(io::Error::from(ErrorKind::BrokenPipe)).context("cannot print");
        assert!(is_closed_pipe(&error));
        assert!(!is_closed_pipe(&anyhow::anyhow!("broken pipe")));
    }
}
