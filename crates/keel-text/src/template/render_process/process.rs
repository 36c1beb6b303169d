//! The parent's handle of the child process.

use std::ffi::OsString;
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Mutex;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ioctl_fionbio};

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

/// Which pipes can be used without waiting.
struct Ready {
    input: bool,
    output: bool,
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
            (Some(input), Some(output)) => {
                // A process that does not read must not stop its parent.
                ioctl_fionbio(&input, true).map_err(|error| TextError::Renderer { source: error.into() })?;
                Ok(Process { child: Mutex::new(child), input, output })
            }
            _ => Err(TextError::Renderer { source: io::Error::other("it has no pipes") }),
        }
    }

    pub(super) fn is_alive(&self) -> bool {
        let mut child = self.child.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        matches!(child.try_wait(), Ok(None))
    }

    /// Sends a line and waits for the reply, both within [`TIME`]. After an error the process must not be used again.
    pub(super) fn ask(&mut self, line: &[u8]) -> Result<Reply, TextError> {
        let reply = self.exchange(line)?;
        serde_json::from_slice(&reply)
            .map_err(|error| failed(format!("its renderer replies nonsense: {error}")))
    }

    /// Neither pipe is waited for alone: the process may reply, or end, before it has read the whole line.
    fn exchange(&mut self, line: &[u8]) -> Result<Vec<u8>, TextError> {
        let start = Instant::now();
        let (mut unsent, mut reply, mut part) = (line, Vec::new(), vec![0; 64 << 10]);
        loop {
            if cancel::is_cancelled() {
                return Err(TextError::Cancelled);
            }
            if start.elapsed() > TIME {
                return Err(failed(format!("it takes longer than {} s", TIME.as_secs())));
            }
            let Ready { input, output } = self.wait(!unsent.is_empty())?;
            if input {
                unsent = self.send(unsent);
            }
            if !output {
                continue;
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

    /// Waits for a tick, or until a pipe is ready. The input is only looked at if there is something to send.
    fn wait(&self, sends: bool) -> Result<Ready, TextError> {
        let mut pipes = [PollFd::new(&self.output, PollFlags::IN), PollFd::new(&self.input, PollFlags::OUT)];
        let pipes = &mut pipes[..1 + usize::from(sends)];
        match poll(pipes, Some(&TICK)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(TextError::Renderer { source: error.into() }),
        }
        let is_ready = |pipe: Option<&PollFd<'_>>| pipe.is_some_and(|pipe| !pipe.revents().is_empty());
        Ok(Ready { output: is_ready(pipes.first()), input: is_ready(pipes.get(1)) })
    }

    /// Sends the bytes that the pipe takes now. Returns the rest.
    fn send<'l>(&mut self, line: &'l [u8]) -> &'l [u8] {
        match self.input.write(line) {
            Ok(count) => &line[count..],
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => line,
            // A dead process does not read. The end of its output has the reason.
            Err(_) => &[],
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cancel;

    fn process(script: &str) -> Process {
        Process::start(Path::new("/bin/sh"), &["-c".into(), script.into()]).expect("there is a shell")
    }

    /// More than a pipe holds.
    fn long_line() -> Vec<u8> {
        vec![b'a'; 1 << 20]
    }

    fn reason(process: &mut Process, line: &[u8]) -> String {
        process.ask(line).map(|_| ()).expect_err("it does not reply").to_string()
    }

    #[test]
    fn a_process_that_does_not_read_ends_after_its_time() {
        let start = Instant::now();
        let reason = reason(&mut process("sleep 60"), &long_line());
        assert!(reason.contains("takes longer than 3 s"), "{reason}");
        assert!(start.elapsed() < TIME * 3, "{:?}", start.elapsed());
    }

    #[test]
    fn a_process_that_does_not_read_is_left_when_its_request_is_cancelled() {
        let (cancel, start) = (Cancel::default(), Instant::now());
        let later = cancel.clone();
        let leaver = std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(100));
            later.cancel();
        });
        let outcome = cancel.scope(|| process("sleep 60").ask(&long_line()).map(|_| ()));
        leaver.join().expect("it cancels");
        assert!(matches!(outcome, Err(TextError::Cancelled)) && start.elapsed() < TIME);
    }

    #[test]
    fn a_process_that_ends_or_replies_before_it_has_read_all() {
        let ended = reason(&mut process("exit 5"), &long_line());
        assert!(ended.contains("its renderer ended with exit status: 5"), "{ended}");
        let early = reason(&mut process("echo nonsense; sleep 60"), &long_line());
        assert!(early.contains("replies nonsense"), "{early}");
    }
}
