//! The parent's handle of the child process.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Mutex;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::{MEMORY_BYTES, Reply, TIME, failed};
use crate::{TextError, cancel};

/// Interval between checks for cancellation.
const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
/// Largest reply: the limit of the output, with escapes.
const REPLY_BYTES_MAX: usize = 512 << 20;

/// A process that waits for conversations. Dropping it kills the process.
pub(super) struct Process {
    child: Mutex<Child>,
    input: ChildStdin,
    output: ChildStdout,
}

impl Process {
    pub(super) fn start(program: &Path, args: &[OsString]) -> Result<Process, TextError> {
        let mut command = Command::new(program);
        // Standard error goes to a pipe that is closed at once, because a small root has no /dev/null.
        command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // Ctrl-C is meant for the parent only.
        command.process_group(0).env("RUST_BACKTRACE", "0");
        let mut child = command.spawn().map_err(|source| TextError::Renderer { source })?;
        drop(child.stderr.take());
        match (child.stdin.take(), child.stdout.take()) {
            (Some(input), Some(output)) => Ok(Process { child: Mutex::new(child), input, output }),
            _ => Err(TextError::Renderer { source: io::Error::other("it has no pipes") }),
        }
    }

    pub(super) fn is_alive(&self) -> bool {
        let mut child = self.child.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        matches!(child.try_wait(), Ok(None))
    }

    /// Sends a line and waits for the reply. After an error the process must not be used again.
    pub(super) fn ask(&mut self, line: &[u8]) -> Result<Reply, TextError> {
        // A dead process does not read. The reply then has the reason.
        let _ = self.input.write_all(line);
        let reply = self.read_line()?;
        serde_json::from_slice(&reply)
            .map_err(|error| failed(format!("its renderer replies nonsense: {error}")))
    }

    fn read_line(&mut self) -> Result<Vec<u8>, TextError> {
        let start = Instant::now();
        let (mut reply, mut part) = (Vec::new(), vec![0; 64 << 10]);
        loop {
            if cancel::is_cancelled() {
                return Err(TextError::Cancelled);
            }
            if start.elapsed() > TIME {
                return Err(failed(format!("it takes longer than {} s", TIME.as_secs())));
            }
            match poll(&mut [PollFd::new(&self.output, PollFlags::IN)], Some(&TICK)) {
                Ok(0) | Err(Errno::INTR) => continue,
                Ok(_) => {}
                Err(error) => return Err(TextError::Renderer { source: error.into() }),
            }
            let count = self.output.read(&mut part).map_err(|source| TextError::Renderer { source })?;
            if count == 0 {
                return Err(self.end());
            }
            if reply.len() + count > REPLY_BYTES_MAX {
                return Err(failed(format!("its text takes more than {} MiB", REPLY_BYTES_MAX >> 20)));
            }
            reply.extend_from_slice(&part[..count]);
            if reply.last() == Some(&b'\n') {
                return Ok(reply);
            }
        }
    }

    /// Returns why the process ended.
    fn end(&mut self) -> TextError {
        let child = self.child.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        match child.wait() {
            // Rust aborts when memory is refused, and also when the stack overflows.
            Ok(status) if status.signal().is_some() => failed(format!(
                "it needs more than {} MiB of memory, or recurses without end",
                MEMORY_BYTES >> 20
            )),
            Ok(status) => failed(format!("its renderer ended with {status}")),
            Err(source) => TextError::Renderer { source },
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let child = self.child.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        let _ = child.kill();
        let _ = child.wait();
    }
}
