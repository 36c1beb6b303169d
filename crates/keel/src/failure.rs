//! Turns an error into one line and an exit code.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::{self, ErrorKind, Write};
use std::panic::{self, AssertUnwindSafe, PanicHookInfo};
use std::process::ExitCode;

use anyhow::{Error, Result};
use keel_server::ServerError;

use crate::signals;

/// Exit code of a failure.
const FAILURE: i32 = 1;
/// Exit code of wrong usage, the same as clap's.
const WRONG_USAGE: u8 = 2;

/// Wrong usage that the command-line parser cannot detect.
#[derive(Debug)]
struct Usage(String);

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// An error that ends the program with the exit code of wrong usage.
pub fn usage(message: impl Into<String>) -> Error {
    Usage(message.into()).into()
}

/// Runs the program.
///
/// - A failure prints one line on standard error. The exit code is 1, or 2 for wrong usage.
/// - A panic is a bug. Its line was printed when it happened; the exit code is 1.
/// - A closed pipe is not a failure: the reader, such as `head`, has read enough.
pub fn guard(program: impl FnOnce() -> Result<()>) -> ExitCode {
    panic::set_hook(Box::new(report_panic));
    let program = || {
        inject();
        program()
    };
    let (line, code, is_device_lost) = match panic::catch_unwind(AssertUnwindSafe(program)) {
        Ok(Ok(())) => return ExitCode::SUCCESS,
        Ok(Err(error)) if is_closed_pipe(&error) => return ExitCode::SUCCESS,
        Ok(Err(error)) => {
            let code = if error.is::<Usage>() { ExitCode::from(WRONG_USAGE) } else { ExitCode::FAILURE };
            let is_device_lost = matches!(error.downcast_ref(), Some(ServerError::EngineLost { .. }));
            (one_line(&with_causes(&error)), code, is_device_lost)
        }
        Err(_) => return ExitCode::FAILURE,
    };
    // Standard error may be closed, too.
    let _ = io::stderr().write_all(format!("keel: {line}\n").as_bytes());
    if is_device_lost {
        // A thread may still wait for the device.
        signals::end_at_once(FAILURE);
    }
    code
}

/// Reports a panic when it happens, on any thread. A later report could be lost:
///
/// - a second panic during unwinding ends the program;
/// - a task of the server swallows its panic;
/// - a library may report a vaguer error instead.
///
/// With `RUST_BACKTRACE` the backtrace follows.
fn report_panic(info: &PanicHookInfo<'_>) {
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("without a name");
    let place = one_line(&info.to_string());
    let mut report = format!("keel: this is a bug in keel, please report it: thread {name} {place}\n");
    let backtrace = Backtrace::capture();
    if backtrace.status() == BacktraceStatus::Captured {
        report.push_str(&format!("{backtrace}\n"));
    }
    // One write, so that lines of several threads do not mix. A failed write is ignored: a panic here would end the
    // program without a message.
    let _ = io::stderr().write_all(report.as_bytes());
}

/// Panics on request, for tests: `KEEL_INJECT_PANIC` names the kind of panic.
fn inject() {
    struct PanicsWhenDropped;
    impl Drop for PanicsWhenDropped {
        fn drop(&mut self) {
            panic!("injected while unwinding");
        }
    }
    let Some(kind) = std::env::var_os("KEEL_INJECT_PANIC") else { return };
    match kind.to_str() {
        Some("once") => panic!("injected\nin two lines"),
        Some("unwinding") => {
            let _second = PanicsWhenDropped;
            panic!("injected first");
        }
        Some("task") => {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build();
            let runtime = runtime.unwrap_or_else(|error| panic!("no threads: {error}"));
            let _ = runtime.block_on(runtime.spawn(async { panic!("injected in a task") }));
        }
        _ => {}
    }
}

fn is_closed_pipe(error: &Error) -> bool {
    let is_pipe = |e: &io::Error| e.kind() == ErrorKind::BrokenPipe;
    error.chain().filter_map(|cause| cause.downcast_ref()).any(is_pipe)
}

/// The message and its causes. A cause that the message before it already ends with is left out.
fn with_causes(error: &Error) -> String {
    let mut parts: Vec<String> = Vec::new();
    for cause in error.chain().map(ToString::to_string) {
        if parts.last().is_none_or(|last| !last.ends_with(&cause)) {
            parts.push(cause);
        }
    }
    parts.join(": ")
}

/// Puts a message on one line. Messages quote names from files, which may contain line breaks and control characters.
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
