//! Launches that one process plans and another one runs.

use std::cell::Cell;
use std::sync::Arc;

use super::{Binding, Bindings, Kernel, Launch, Operand, OperandMemory, Program, check_support, fusion};
use crate::ops::Op;
use crate::runtime::next_prepared;
use crate::{ArrayError, Buffer, Layout, Result, Runtime};

/// A piece of a program that another process has planned, bound to memory of this one. It runs many times.
///
/// Kernels, workspaces and places in the arena are those of the plan. A planning backend of the other process has
/// given them for a device such as this one, so they are the same here.
pub struct RemoteLaunch {
    runtime: Runtime,
    program: Arc<Program>,
    bindings: Bindings,
    /// The end of what the kernels use of the arena; `None` if they use none.
    arena_end: Option<usize>,
}

impl RemoteLaunch {
    /// Binds `kernels` to the memory of their externals and outputs: buffers, each with the byte at which it
    /// begins. `has_arena` says whether the other process had an arena for them; here they use the runtime's, which
    /// [`Runtime::reserve_arena`] has made large enough.
    ///
    /// # Errors
    /// An operand that is missing or not within its memory, or a kernel that the backend does not have: the other
    /// process has planned for another device. Shapes are not compared with the operation; the other process vouches
    /// for them.
    pub fn new(
        runtime: &Runtime,
        kernels: Vec<Kernel>,
        externals: Vec<(Buffer, usize)>,
        outputs: Vec<(Buffer, usize)>,
        has_arena: bool,
    ) -> Result<RemoteLaunch> {
        let arena = runtime.arena_buffer().filter(|_| has_arena).map(|arena| arena.bytes());
        let arena_end = Cell::new(None);
        let memory = Places { externals: &externals, outputs: &outputs, arena, arena_end: &arena_end };
        for kernel in &kernels {
            memory.check(kernel, runtime)?;
            check_support(kernel, runtime.backend())?;
        }
        let pieces: Vec<_> = std::iter::once(0..kernels.len()).collect();
        let groups = fusion::group(&kernels, &pieces, |rest| runtime.backend().group_of(rest));
        let bound = |(buffer, offset)| Binding { buffer, offset };
        Ok(RemoteLaunch {
            runtime: runtime.clone(),
            program: Arc::new(Program { kernels, outputs: Vec::new(), arena_bytes: 0, pieces, groups }),
            bindings: Bindings {
                externals: externals.into_iter().map(bound).collect(),
                outputs: outputs.into_iter().map(bound).collect(),
                prepared: Some(next_prepared()),
            },
            arena_end: arena_end.get(),
        })
    }

    /// Whether the runtime's arena has everything that the kernels use of it. It may be another arena than at binding.
    pub fn fits_arena(&self) -> bool {
        let bytes = self.runtime.arena_buffer().map(|arena| arena.bytes());
        self.arena_end.is_none_or(|end| bytes.is_some_and(|bytes| end <= bytes))
    }

    /// How many kernels it has.
    pub fn kernels(&self) -> usize {
        self.program.kernels.len()
    }

    /// Whether it is bound to this memory.
    pub fn uses(&self, buffer: &Buffer) -> bool {
        let all = self.bindings.externals.iter().chain(&self.bindings.outputs);
        all.into_iter().any(|binding| binding.buffer.is_same(buffer))
    }

    /// Calls `run` with the launch. The backend may be called only by one thread at a time meanwhile.
    pub fn with<R>(&self, run: impl FnOnce(&Launch<'_>) -> R) -> R {
        RemoteLaunch::with_all(&[self], |launches| run(&launches[0]))
    }

    /// The same for several launches, all of one runtime.
    pub fn with_all<R>(all: &[&RemoteLaunch], run: impl FnOnce(&[Launch<'_>]) -> R) -> R {
        let arena = all.first().and_then(|first| first.runtime.arena_buffer());
        let mut launches = Vec::with_capacity(all.len());
        for of in all {
            let arena = arena.as_ref().filter(|_| of.arena_end.is_some());
            launches.push(Launch::new(&of.program, of.program.pieces[0].clone(), &of.bindings, arena));
        }
        run(&launches)
    }
}

/// The memory that a launch is to be bound to.
struct Places<'a> {
    externals: &'a [(Buffer, usize)],
    outputs: &'a [(Buffer, usize)],
    /// Bytes of the arena; `None` if there is none.
    arena: Option<usize>,
    /// The end of the arena bytes that the kernels checked so far use; `None` if they use none.
    arena_end: &'a Cell<Option<usize>>,
}

impl Places<'_> {
    /// Whether a kernel's operands and its scratch are within this memory.
    fn check(&self, kernel: &Kernel, runtime: &Runtime) -> Result<()> {
        let wrong = |reason: String| Err(ArrayError::Kernel { op: kernel.op.name().into(), reason });
        if let Some(scratch) = &kernel.workspace {
            if scratch.start > scratch.end || self.arena.is_none_or(|bytes| scratch.end > bytes) {
                return wrong(format!(
                    "scratch {scratch:?} in an arena of {} bytes",
                    self.arena.unwrap_or(0)
                ));
            }
            self.note_arena(scratch.end);
        }
        if let Some(output) = kernel.outputs.iter().find(|output| !self.holds(output, 0)) {
            return wrong(format!("a result is not within its memory: {output:?}"));
        }
        self.check_inputs(kernel, runtime)
    }

    /// The same for the operands that a kernel and its absorbed kernels read.
    fn check_inputs(&self, kernel: &Kernel, runtime: &Runtime) -> Result<()> {
        kernel.absorbed.iter().try_for_each(|absorbed| self.check_inputs(absorbed, runtime))?;
        let counted = kernel.op.check_operands(kernel.inputs.len(), kernel.outputs.len());
        counted.map_err(|reason| ArrayError::Kernel { op: kernel.op.name().into(), reason })?;
        let weight_bytes = match &kernel.op {
            Op::Linear { weight, .. } | Op::GatherLinear { weight } | Op::Embedding { weight } => {
                weight.check()?;
                runtime.backend().packed_bytes(weight)
            }
            _ => 0,
        };
        for (i, input) in kernel.inputs.iter().enumerate() {
            let is_there = match input.memory {
                OperandMemory::Absorbed(producer) => producer < kernel.absorbed.len(),
                // Operand 1 of a product and of an embedding is the packed weight.
                _ => self.holds(input, if i == 1 { weight_bytes } else { 0 }),
            };
            if !is_there {
                let reason = format!("operand {i} is not within its memory: {input:?}");
                return Err(ArrayError::Kernel { op: kernel.op.name().into(), reason });
            }
        }
        Ok(())
    }

    /// Whether an operand of at least `bytes_min` bytes is within its memory.
    fn holds(&self, operand: &Operand, bytes_min: usize) -> bool {
        let Some(end) = end_of(&operand.layout) else { return false };
        let Some(bytes) = end.checked_mul(operand.dtype.size()).map(|bytes| bytes.max(bytes_min)) else {
            return false;
        };
        let room = |places: &[(Buffer, usize)], i: usize| {
            places.get(i).and_then(|(buffer, offset)| buffer.bytes().checked_sub(*offset))
        };
        let room = match operand.memory {
            OperandMemory::External(i) => room(self.externals, i),
            OperandMemory::Output(i) => room(self.outputs, i),
            OperandMemory::Arena { offset, .. } => self.arena.and_then(|arena| arena.checked_sub(offset)),
            OperandMemory::Temp(_) | OperandMemory::Absorbed(_) => None,
        };
        let is_within = room.is_some_and(|room| bytes <= room);
        if let OperandMemory::Arena { offset, .. } = operand.memory
            && is_within
        {
            self.note_arena(offset + bytes);
        }
        is_within
    }

    /// Notes that a kernel uses the arena up to here.
    fn note_arena(&self, end: usize) {
        self.arena_end.set(self.arena_end.get().max(Some(end)));
    }
}

/// One past the highest element of a layout that may have any numbers, as [`Layout::end`]; `None` if it is no layout.
fn end_of(layout: &Layout) -> Option<usize> {
    let rank = layout.shape.rank();
    if rank != layout.strides.len() || rank > Layout::RANK_MAX {
        return None;
    }
    let elements = layout.shape.iter().try_fold(1usize, |elements, extent| elements.checked_mul(*extent))?;
    if elements == 0 {
        return Some(layout.offset);
    }
    let mut steps = layout.shape.iter().zip(&layout.strides);
    let span = steps
        .try_fold(0usize, |span, (extent, stride)| span.checked_add((extent - 1).checked_mul(*stride)?))?;
    layout.offset.checked_add(span)?.checked_add(1)
}
