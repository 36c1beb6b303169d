//! A prepared program: traced once, bound to its memory, run again and again.

use std::sync::Arc;

use super::external_bindings;
use super::stream::{Fence, Stream, Work};
use crate::array::Array;
use crate::error::expect_shape;
use crate::program::graph::{Purpose, collect};
use crate::program::{Binding, Bindings, Program};
use crate::{ArrayError, Result, Runtime};

/// A graph with its memory. What changes from run to run is data in the persistent arrays it was traced with:
/// the host overwrites them and runs the same kernels again. A run allocates nothing.
pub struct Executable {
    runtime: Runtime,
    program: Arc<Program>,
    bindings: Arc<Bindings>,
}

impl Runtime {
    /// Prepares the graph behind lazy arrays, which stay lazy: each run leaves the value of `results[i].0` in the
    /// persistent storage `results[i].1`. The arena is made large enough.
    ///
    /// # Errors
    /// If a pair differs in shape or type, a destination is not contiguous memory, or the arena cannot be had.
    pub fn prepare(&self, results: &[(&Array, &Array)]) -> Result<Executable> {
        let targets: Vec<&Array> = results.iter().map(|(value, _)| *value).collect();
        let collected = collect(&targets, Purpose::Prepare);
        let program = self.program(collected.graph.clone());
        let mut outputs = Vec::with_capacity(collected.outputs.len());
        for node in &collected.outputs {
            let pair = results.iter().find(|(value, _)| Arc::ptr_eq(node, &value.0));
            let (value, destination) = pair.unwrap_or_else(|| unreachable!("only targets are outputs"));
            outputs.push(destination_of(value, destination)?);
        }
        let externals = external_bindings(&collected.externals, &collected.graph);
        self.reserve_arena(program.arena_bytes())?;
        let bindings = Bindings { externals, outputs };
        Ok(Executable { runtime: self.clone(), program, bindings: Arc::new(bindings) })
    }
}

/// The memory of `destination`, once it is known to fit `value`.
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
    /// What a kernel found wrong with its data.
    pub fn run(&self) -> Result<()> {
        let arena = self.runtime.arena(self.program.arena_bytes())?;
        let fence = Fence::default();
        let work = Work {
            program: Arc::clone(&self.program),
            bindings: Arc::clone(&self.bindings),
            arena,
            needs: Arc::new([]),
            fence: fence.clone(),
        };
        Stream::run(&self.runtime.0.stream, work);
        fence.wait()
    }

    /// The kernels, for reports.
    pub fn program(&self) -> &Program {
        &self.program
    }
}
