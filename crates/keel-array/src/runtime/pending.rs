//! Runs that the host does not wait for: it submits the next one while one is under way.

use std::collections::VecDeque;
use std::ops::Range;

use super::executable::{Executable, FailedRun};
use super::of_another_runtime;
use super::stream::Failure;
use crate::Buffer;
use crate::backend::{Backend, LAUNCHES_MAX, MemoryRange, RESULT_BYTES_MAX, Ticket};
use crate::program::{Binding, Launch};
use crate::{Array, ArrayError};

/// Most runs under way at a time: two steps, each of a program for answers, one for prompts, and one that keeps hidden
/// states for the host. One of the two steps also keeps logits of its answers and of its prompts.
pub const RUNS_MAX: usize = 8;

/// Most pieces of a run under way at a time. A longer program waits for its first pieces.
const PIECES_MAX: usize = LAUNCHES_MAX / RUNS_MAX;

/// A piece of the program under way.
struct PieceTicket {
    kernels: Range<usize>,
    ticket: Ticket,
}

/// A run under way. It owns its memory until the device is done with it. Dropping it waits.
pub struct PendingRun {
    executable: Executable,
    arena: Option<Buffer>,
    /// One for each piece under way, oldest first.
    tickets: VecDeque<PieceTicket>,
    /// Memory of the bytes that the host gets, and their number.
    result: Option<Binding>,
    result_bytes: usize,
    failure: Option<Failure>,
}

impl Executable {
    /// As [`Executable::run`], but returns before the kernels have run, if the backend
    /// [is queueing](crate::Submission::is_queueing). Later writes of the host are for later runs. `result` is memory
    /// of at most [`RESULT_BYTES_MAX`] bytes, such as a destination of this program. The host gets its bytes as this
    /// run leaves them; later runs do not change them.
    ///
    /// [`PendingRun::wait`] returns all errors. They include: `result` belongs to another runtime, is too large, not
    /// whole words of 4 bytes or not in memory; [`RUNS_MAX`] runs are under way already.
    pub fn submit(&self, result: &Array) -> PendingRun {
        let in_flight = self.runtime.0.stream.lock().begin_run();
        let mut run = PendingRun {
            executable: self.clone(),
            arena: None,
            tickets: VecDeque::new(),
            result: place_of(result),
            result_bytes: result.bytes(),
            failure: None,
        };
        let refusal = if !self.runtime.is_same(result.runtime()) {
            Some(of_another_runtime(result))
        } else if run.result.is_none() {
            Some(format!("{result:?} is not contiguous in memory"))
        } else if result.bytes() > RESULT_BYTES_MAX {
            Some(format!("{result:?} takes {} bytes, more than {RESULT_BYTES_MAX}", result.bytes()))
        } else if [result.bytes(), run.result.as_ref().map_or(0, |at| at.offset)].iter().any(|n| n % 4 != 0) {
            Some(format!("{result:?} is not whole words of 4 bytes in memory"))
        } else if in_flight > RUNS_MAX {
            Some(format!("{RUNS_MAX} runs are under way; wait for one first"))
        } else {
            None
        };
        let outcome = match refusal {
            Some(reason) => {
                Err(Failure { error: ArrayError::Argument { op: "submit", reason }, done: Some(0) })
            }
            None => run.enqueue(),
        };
        run.failure = outcome.err();
        run
    }
}

/// The memory of an array, if it is contiguous.
fn place_of(array: &Array) -> Option<Binding> {
    let storage = array.0.storage().filter(|storage| storage.layout.is_contiguous())?;
    Some(Binding { offset: storage.layout.offset * array.dtype().size(), buffer: storage.buffer })
}

impl PendingRun {
    /// Whether it has failed before the device began its last piece. [`PendingRun::wait`] returns the error.
    pub fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    /// Hands the pieces to the backend, all in one turn at the device: they have intermediates in the arena.
    fn enqueue(&mut self) -> Result<(), Failure> {
        let Executable { runtime, program, .. } = self.executable.clone();
        let arena = runtime.arena(program.arena_bytes());
        self.arena = arena.map_err(|error| Failure { error, done: Some(0) })?;
        runtime.exclusive(|backend| {
            for (i, piece) in program.pieces().iter().enumerate() {
                if self.tickets.len() == PIECES_MAX {
                    self.wait_for_first(backend, &mut [])?;
                }
                self.enqueue_piece(backend, piece.clone(), i + 1 == program.pieces().len())?;
            }
            Ok(())
        })
    }

    fn enqueue_piece(
        &mut self,
        backend: &dyn Backend,
        piece: Range<usize>,
        is_last: bool,
    ) -> Result<(), Failure> {
        let Executable { program, bindings, .. } = &self.executable;
        let launch = Launch::new(program, piece.clone(), bindings, self.arena.as_ref());
        let result = self.result.as_ref().filter(|_| is_last);
        let result = result.map(|at| MemoryRange {
            memory: at.buffer.memory(),
            bytes: at.offset..at.offset + self.result_bytes,
        });
        let ticket = backend.enqueue(&launch, result);
        let ticket = ticket.map_err(|error| Failure { error, done: launch.done() })?;
        self.tickets.push_back(PieceTicket { kernels: piece, ticket });
        Ok(())
    }

    fn wait_for_first(&mut self, backend: &dyn Backend, result: &mut [u8]) -> Result<(), Failure> {
        let Some(PieceTicket { kernels, ticket }) = self.tickets.pop_front() else { return Ok(()) };
        let Executable { program, bindings, .. } = &self.executable;
        let launch = Launch::new(program, kernels, bindings, self.arena.as_ref());
        let outcome = backend.wait(ticket, &launch, result);
        outcome.map_err(|error| Failure { error, done: launch.done() })
    }

    /// Waits until the kernels have run, and returns the bytes of the result.
    ///
    /// # Errors
    /// The error of the kernel that found wrong data, and how far the run came.
    ///
    /// # Panics
    /// If `result` has another size than at the submission.
    pub fn wait(mut self, result: &mut [u8]) -> Result<(), Box<FailedRun>> {
        assert_eq!(result.len(), self.result_bytes, "bytes of the result");
        let Err(failure) = self.finish(result) else { return Ok(()) };
        Err(self.executable.failed(failure))
    }

    /// Waits for every piece. Returns the first failure.
    fn finish(&mut self, result: &mut [u8]) -> Result<(), Failure> {
        let mut outcome = Ok(());
        let runtime = self.executable.runtime.clone();
        while !self.tickets.is_empty() {
            let is_last = self.tickets.len() == 1 && self.failure.is_none();
            let result = if is_last { &mut *result } else { &mut [] };
            let waited = runtime.exclusive(|backend| self.wait_for_first(backend, result));
            outcome = outcome.and(waited);
        }
        outcome.and(self.failure.take().map_or(Ok(()), Err))
    }
}

impl Drop for PendingRun {
    fn drop(&mut self) {
        if !self.tickets.is_empty() {
            let mut unread = vec![0; self.result_bytes];
            if let Err(failure) = self.finish(&mut unread) {
                tracing::debug!("a run that nobody waited for failed: {}", failure.error);
            }
        }
        self.executable.runtime.0.stream.lock().end_run();
    }
}

impl std::fmt::Debug for PendingRun {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PendingRun({} pieces under way)", self.tickets.len())
    }
}
