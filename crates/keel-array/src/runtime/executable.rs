//! A prepared program: traced once, bound to its memory, run again and again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::external_bindings;
use super::stream::{Failure, Fence, Stream, Work};
use crate::Buffer;
use crate::array::Array;
use crate::error::expect_shape;
use crate::program::graph::{Purpose, collect};
use crate::program::{Binding, Bindings, Kernel, Launch, Operand, OperandMemory, Program};
use crate::{ArrayError, Result, Runtime};

/// A graph bound to its memory. Data that changes from run to run lies in the persistent arrays it was traced with:
/// the host overwrites them and runs the same kernels again. A run allocates nothing.
#[derive(Clone)]
pub struct Executable {
    pub(super) runtime: Runtime,
    pub(super) program: Arc<Program>,
    pub(super) bindings: Arc<Bindings>,
}

static NEXT_PREPARED: AtomicU64 = AtomicU64::new(0);

/// A number for a program that runs many times with the same memory.
pub(crate) fn next_prepared() -> u64 {
    NEXT_PREPARED.fetch_add(1, Ordering::Relaxed)
}

impl Runtime {
    /// Prepares the graph of lazy arrays built inside [`Runtime::trace`]. They stay lazy: each run writes the value of
    /// `results[i].0` to the persistent storage `results[i].1`. The arena is made large enough.
    ///
    /// # Errors
    /// - A value or a destination belongs to another runtime.
    /// - A value is evaluated already, or listed twice.
    /// - A pair differs in shape or type.
    /// - A destination is not contiguous memory, overlaps another, or is written while the graph still reads it.
    /// - The backend does not [support](crate::Programs::supports) an operation.
    /// - The arena cannot be allocated.
    /// - The evaluation of an array that the graph reads, or of a destination, has failed.
    pub fn prepare(&self, results: &[(&Array, &Array)]) -> Result<Executable> {
        self.expect_own("prepare", results.iter().flat_map(|&(value, destination)| [value, destination]))?;
        for (i, (value, _)) in results.iter().enumerate() {
            if value.is_evaluated()
                || results[..i].iter().any(|(earlier, _)| Arc::ptr_eq(&earlier.0, &value.0))
            {
                return Err(refuse(format!("result {i}, {value:?}, must be lazy and be asked for once")));
            }
        }
        let targets: Vec<&Array> = results.iter().map(|(value, _)| *value).collect();
        let collected = collect(&targets, Purpose::Prepare);
        // The caller keeps a prepared program. The cache would keep a second handle, and its graph.
        let program = self.compile(&collected.graph)?;
        let mut outputs = Vec::with_capacity(collected.outputs.len());
        for node in &collected.outputs {
            let pair = results.iter().find(|(value, _)| Arc::ptr_eq(node, &value.0));
            let (value, destination) = pair.unwrap_or_else(|| unreachable!("only targets are outputs"));
            outputs.push(destination_of(value, destination)?);
        }
        // A run does not look at these again.
        collected.externals.iter().filter_map(|of| of.fence.as_ref()).try_for_each(Fence::wait)?;
        results.iter().try_for_each(|(_, destination)| destination.wait())?;
        let externals = external_bindings(&collected.externals, &collected.graph);
        let prepared = Some(next_prepared());
        let bindings = Bindings { externals, outputs, prepared };
        check_destinations(&program, &bindings)?;
        self.reserve_arena(program.arena_bytes())?;
        Ok(Executable { runtime: self.clone(), program, bindings: Arc::new(bindings) })
    }
}

fn refuse(reason: String) -> ArrayError {
    ArrayError::Argument { op: "prepare", reason }
}

/// A destination may be memory that the graph reads, if the last reader comes before the kernel that writes it.
/// Destinations must not overlap.
fn check_destinations(program: &Program, bindings: &Bindings) -> Result<()> {
    let bytes = |i: usize| program.outputs[i].spec.shape.elements() * program.outputs[i].spec.dtype.size();
    for (i, output) in bindings.outputs.iter().enumerate() {
        let shares = |other: &Binding, other_bytes: usize| {
            other.buffer.is_same(&output.buffer)
                && other.offset < output.offset + bytes(i)
                && output.offset < other.offset + other_bytes
        };
        if (0..i).any(|j| shares(&bindings.outputs[j], bytes(j))) {
            return Err(refuse(format!("destination {i} overlaps another")));
        }
        let written = program
            .kernels()
            .iter()
            .position(|k| k.outputs.iter().any(|o| o.memory == OperandMemory::Output(i)));
        let reads = |operand: &Operand| match operand.memory {
            OperandMemory::External(e) => {
                let end = operand.layout.end() * operand.dtype.size();
                shares(&bindings.externals[e], end)
            }
            _ => false,
        };
        let last_read = program.kernels().iter().rposition(|k| k.reads().into_iter().any(reads));
        if last_read >= written && last_read.is_some() {
            return Err(refuse(format!("destination {i} is written while the graph still reads it")));
        }
    }
    Ok(())
}

/// The memory of `destination`, after a check that it fits `value`.
fn destination_of(value: &Array, destination: &Array) -> Result<Binding> {
    const OP: &str = "prepare";
    expect_shape(OP, "destination", value.shape(), destination.shape())?;
    let storage =
        destination.0.storage().filter(|s| s.layout.is_contiguous() && destination.dtype() == value.dtype());
    let storage = storage.ok_or_else(|| ArrayError::Argument {
        op: OP,
        reason: format!(
            "{destination:?} cannot hold {value:?}: it must be contiguous memory of the same type"
        ),
    })?;
    Ok(Binding { offset: storage.layout.offset * destination.dtype().size(), buffer: storage.buffer })
}

impl Executable {
    /// Runs the kernels and waits for them.
    ///
    /// # Errors
    /// The error of the kernel that found wrong data, and how far the run came.
    pub fn run(&self) -> Result<(), Box<FailedRun>> {
        if self.program.pieces().is_empty() {
            // No piece would end the wait.
            return Ok(());
        }
        let arena = self.runtime.arena(self.program.arena_bytes());
        let arena = arena.map_err(|error| self.failed(Failure { error, done: Some(0) }))?;
        let fence = Fence::default();
        let work = Work {
            program: Arc::clone(&self.program),
            bindings: Arc::clone(&self.bindings),
            arena,
            needs: Arc::new([]),
            fence: fence.clone(),
        };
        Stream::run(&self.runtime.0.stream, work);
        fence.outcome().map_err(|failure| self.failed(failure))
    }

    /// The failure of a run.
    pub(super) fn failed(&self, Failure { error, done }: Failure) -> Box<FailedRun> {
        let (program, bindings) = (Arc::clone(&self.program), Arc::clone(&self.bindings));
        Box::new(FailedRun { error, done, program, bindings })
    }

    /// The program's pieces, as launches.
    pub(super) fn launches<'a>(&'a self, arena: Option<&'a Buffer>) -> impl Iterator<Item = Launch<'a>> {
        let arena = arena.filter(|_| self.program.arena_bytes() > 0);
        let pieces = self.program.pieces().iter();
        pieces.map(move |piece| Launch::new(&self.program, piece.clone(), &self.bindings, arena))
    }

    /// The runtime that it runs on.
    pub fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    /// Whether one of its kernels mutates this state.
    pub fn mutates(&self, state: &Array) -> bool {
        let Some(storage) = state.0.storage() else { return false };
        self.program.kernels().iter().any(|kernel| mutates(kernel, &self.bindings, &storage.buffer))
    }

    /// The kernels, for reports.
    pub fn program(&self) -> &Program {
        &self.program
    }
}

/// Whether a kernel mutates memory of this buffer.
fn mutates(kernel: &Kernel, bindings: &Bindings, buffer: &Buffer) -> bool {
    let is_state = |operand: &Operand| match operand.memory {
        OperandMemory::External(i) => bindings.externals[i].buffer.is_same(buffer),
        _ => false,
    };
    kernel.op.mutated_inputs().any(|i| is_state(&kernel.inputs[i]))
}

/// A run of an [`Executable`] that failed.
#[derive(thiserror::Error)]
#[error("{error}")]
pub struct FailedRun {
    error: ArrayError,
    /// How many kernels had run, if known.
    done: Option<usize>,
    program: Arc<Program>,
    bindings: Arc<Bindings>,
}

impl FailedRun {
    /// Why it failed.
    pub fn error(&self) -> &ArrayError {
        &self.error
    }

    /// Whether a kernel that mutates this state had run; `None` if it is not known how far the run came.
    pub fn has_mutated(&self, state: &Array) -> Option<bool> {
        let storage = state.0.storage()?;
        let mutates = |kernel: &Kernel| mutates(kernel, &self.bindings, &storage.buffer);
        let mut all = self.program.kernels().iter();
        match self.done {
            Some(done) => Some(all.take(done).any(mutates)),
            None => {
                if all.any(mutates) {
                    None
                } else {
                    Some(false)
                }
            }
        }
    }
}

impl std::fmt::Debug for FailedRun {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FailedRun({:?}, kernels done: {:?})", self.error, self.done)
    }
}

impl From<Box<FailedRun>> for ArrayError {
    fn from(failed: Box<FailedRun>) -> ArrayError {
        failed.error
    }
}
