//! Launches that one process plans and another one runs.

use std::sync::Arc;

use super::{Binding, Bindings, Kernel, Launch, Program, fusion};
use crate::runtime::next_prepared;
use crate::{Buffer, Runtime};

/// A piece of a program that another process has planned, bound to memory of this one. It runs many times.
///
/// Kernels, workspaces and places in the arena are those of the plan. A planning backend of the other process has
/// given them for a device such as this one, so they are the same here.
pub struct CarriedLaunch {
    runtime: Runtime,
    program: Arc<Program>,
    bindings: Bindings,
    has_arena: bool,
}

impl CarriedLaunch {
    /// Binds `kernels` to the memory of their externals and outputs: buffers, each with the byte at which the slot
    /// begins. `has_arena` says whether the other process had an arena for them; here they use the runtime's, which
    /// [`Runtime::reserve_arena`] has made large enough.
    pub fn new(
        runtime: &Runtime,
        kernels: Vec<Kernel>,
        externals: Vec<(Buffer, usize)>,
        outputs: Vec<(Buffer, usize)>,
        has_arena: bool,
    ) -> CarriedLaunch {
        let pieces: Vec<_> = std::iter::once(0..kernels.len()).collect();
        let groups = fusion::group(&kernels, &pieces, |rest| runtime.backend().group_of(rest));
        let bound = |(buffer, offset)| Binding { buffer, offset };
        CarriedLaunch {
            runtime: runtime.clone(),
            program: Arc::new(Program { kernels, outputs: Vec::new(), arena_bytes: 0, pieces, groups }),
            bindings: Bindings {
                externals: externals.into_iter().map(bound).collect(),
                outputs: outputs.into_iter().map(bound).collect(),
                prepared: Some(next_prepared()),
            },
            has_arena,
        }
    }

    /// Whether it is bound to this memory.
    pub fn uses(&self, buffer: &Buffer) -> bool {
        let all = self.bindings.externals.iter().chain(&self.bindings.outputs);
        all.into_iter().any(|binding| binding.buffer.is_same(buffer))
    }

    /// Calls `run` with the launch. The backend may be called only by one thread at a time meanwhile.
    pub fn with<R>(&self, run: impl FnOnce(&Launch<'_>) -> R) -> R {
        CarriedLaunch::with_all(&[self], |launches| run(&launches[0]))
    }

    /// The same for several launches, all of one runtime.
    pub fn with_all<R>(all: &[&CarriedLaunch], run: impl FnOnce(&[Launch<'_>]) -> R) -> R {
        let arena = all.first().and_then(|first| first.runtime.arena_buffer());
        let mut launches = Vec::with_capacity(all.len());
        for of in all {
            let arena = arena.as_ref().filter(|_| of.has_arena);
            launches.push(Launch::new(&of.program, of.program.pieces[0].clone(), &of.bindings, arena));
        }
        run(&launches)
    }
}
