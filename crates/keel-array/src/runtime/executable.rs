//! A prepared program: traced once, bound to its memory, run again and again.

use std::sync::Arc;

use super::stream::{Fence, Stream, Work};
use crate::array::{Array, Storage};
use crate::ledger::Category;
use crate::program::graph::collect;
use crate::program::{Bindings, Program};
use crate::{Layout, Result, Runtime};

/// A graph with its memory. What changes from run to run is data in the persistent arrays it was traced with:
/// the host overwrites them and runs the same kernels again. A run allocates nothing.
pub struct Executable {
    runtime: Runtime,
    program: Arc<Program>,
    bindings: Arc<Bindings>,
    outputs: Vec<Array>,
}

impl Runtime {
    /// Prepares the graph behind `outputs`, which stay lazy. The outputs' memory is charged to `activations`,
    /// and the arena is made large enough.
    ///
    /// # Errors
    /// If the memory limit would be exceeded or the plan is frozen.
    pub fn prepare(&self, outputs: &[&Array]) -> Result<Executable> {
        let collected = collect(outputs, false);
        let program = self.program(collected.graph.clone());
        let bindings = self.bind(&program, &collected.externals, &collected.graph, Category::Activations)?;
        self.reserve_arena(program.arena_bytes())?;
        let results = outputs
            .iter()
            .map(|wanted| {
                let place = collected.outputs.iter().position(|n| Arc::ptr_eq(n, &wanted.0));
                let place = place.unwrap_or_else(|| unreachable!("every pending target is an output"));
                let layout = Layout::contiguous(wanted.shape().clone());
                let buffer = bindings.outputs[place].buffer.clone();
                Array::ready(self, wanted.dtype(), Storage { buffer, layout, fence: None })
            })
            .collect();
        Ok(Executable { runtime: self.clone(), program, bindings: Arc::new(bindings), outputs: results })
    }
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

    /// The results of the last run, overwritten by the next.
    pub fn outputs(&self) -> &[Array] {
        &self.outputs
    }

    /// The kernels, for reports.
    pub fn program(&self) -> &Program {
        &self.program
    }
}
