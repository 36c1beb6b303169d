//! Programs: the stages from a pending graph to kernels over numbered memory.
//!
//! 1. [`graph`]: collect the pending calls into plain data, which is also the key of the program cache.
//! 2. [`lower`]: views become strides. Where a kernel cannot walk them, a copy is added.
//! 3. [`fusion`]: chains of element-wise kernels become one; values that a backend computes inside their readers
//!    disappear. After stage 4, kernels that the backend runs together become groups.
//! 4. [`plan`]: every intermediate gets its place in one arena. Inputs that nothing reads again are reused.
//! 5. [`verify`]: the plan is checked before the first run.
//!
//! A program holds no memory. [`Bindings`] give it the buffers of one evaluation.

mod apart;
mod cache;
mod described;
mod fusion;
pub(crate) mod graph;
mod lower;
mod plan;
mod remote_launch;
mod verify;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde::{Deserialize, Serialize};

use crate::backend::Backend;
use crate::ops::{Op, Regime, bytes_of};
use crate::runtime::RuntimeOptions;
use crate::{ArrayError, ArraySpec, Buffer, DType, Layout, Result};

pub(crate) use cache::ProgramCache;
pub use cache::ProgramCacheUse;
pub use fusion::{KernelGroup, ProgramGroup};
pub(crate) use graph::Graph;
pub use remote_launch::RemoteLaunch;

/// Alignment of each operand in an arena, in bytes: a line of a GPU's cache, two of a processor's.
pub const ALIGNMENT: usize = 128;

/// Where an operand's memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OperandMemory {
    /// Memory that exists before the program runs.
    External(usize),
    /// A result that outlives the program.
    Output(usize),
    /// An intermediate, at a byte offset of the arena.
    Arena {
        /// Which intermediate.
        temp: usize,
        /// First byte.
        offset: usize,
    },
    /// An intermediate without a place yet. A planned program has none.
    Temp(usize),
    /// Not stored. The consumer computes it inline; the index names the absorbed kernel.
    Absorbed(usize),
}

/// An operand of a kernel: memory, and how to walk it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Operand {
    /// The memory.
    pub memory: OperandMemory,
    /// Shape, strides and offset in elements.
    pub layout: Layout,
    /// Element type.
    pub dtype: DType,
}

impl Operand {
    /// True if it is the value of `other`, seen from the same element on.
    pub fn is_same(&self, other: &Operand) -> bool {
        self.memory == other.memory && self.layout.offset == other.layout.offset
    }

    /// True if the two may have bytes in common. Memory from outside the program is only known when a program is bound
    /// to it, so two different inputs or results of a program may overlap.
    pub fn may_overlap(&self, other: &Operand) -> bool {
        let (a, b) = (self.bytes_in_memory(), other.bytes_in_memory());
        let meet = |a_start: usize, b_start: usize| {
            a_start + a.start < b_start + b.end && b_start + b.start < a_start + a.end
        };
        match (self.memory, other.memory) {
            (OperandMemory::Absorbed(_), _) | (_, OperandMemory::Absorbed(_)) => false,
            (OperandMemory::Arena { offset: a_start, .. }, OperandMemory::Arena { offset: b_start, .. }) => {
                meet(a_start, b_start)
            }
            (OperandMemory::Arena { .. }, _) | (_, OperandMemory::Arena { .. }) => false,
            (a, b) => a != b || meet(0, 0),
        }
    }

    /// True if all of it lies in the memory of `other`.
    pub fn lies_within(&self, other: &Operand) -> bool {
        let (a, b) = (self.bytes_in_memory(), other.bytes_in_memory());
        self.memory == other.memory && b.start <= a.start && a.end <= b.end
    }

    fn bytes_in_memory(&self) -> Range<usize> {
        let size = self.dtype.size();
        self.layout.offset * size..self.layout.end() * size
    }
}

/// One operation over numbered memory.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Kernel {
    /// The operation with its attributes.
    pub op: Op,
    /// Operands read (and, for state, written).
    pub inputs: Vec<Operand>,
    /// Results; row-major and gap-free.
    pub outputs: Vec<Operand>,
    /// Scratch in the arena: offset and bytes.
    pub workspace: Option<Range<usize>>,
    /// Producers that this kernel runs within itself; see [`absorbs`](crate::Programs::absorbs).
    pub absorbed: Vec<Kernel>,
    /// The regime of the program's operations with memory. `None` if there are none, or if both regimes occur. A
    /// backend whose products must not depend on the number of rows chooses its kernels by this.
    pub regime: Option<Regime>,
}

/// Memory of an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OutputMemory {
    /// A new buffer of this many bytes.
    Fresh(usize),
    /// The buffer of an input that nothing else needs.
    Donated(usize),
}

/// An output of a program, row-major and gap-free.
#[derive(Debug)]
pub(crate) struct ProgramOutput {
    pub memory: OutputMemory,
    pub spec: ArraySpec,
}

/// Kernels in order, and the memory they need.
#[derive(Debug)]
pub struct Program {
    kernels: Vec<Kernel>,
    pub(crate) outputs: Vec<ProgramOutput>,
    arena_bytes: usize,
    pieces: Vec<Range<usize>>,
    groups: Vec<ProgramGroup>,
}

impl Program {
    /// Runs all stages.
    ///
    /// # Errors
    /// If the backend does not [support](crate::Programs::supports) a kernel.
    pub(crate) fn compile(graph: &Graph, backend: &dyn Backend, options: &RuntimeOptions) -> Result<Program> {
        let mut lowered = lower::lower(graph);
        fusion::fuse(&mut lowered, graph.regime(), backend);
        lowered.kernels.iter().try_for_each(|kernel| check_support(kernel, backend))?;
        let mut program = plan::plan(lowered, graph, backend);
        program.pieces = cut(&program.kernels, options);
        program.groups = fusion::group(&program.kernels, &program.pieces, |rest| backend.group_of(rest));
        verify::verify(&program, graph);
        Ok(program)
    }

    /// Kernels in order of execution.
    pub fn kernels(&self) -> &[Kernel] {
        &self.kernels
    }

    /// Bytes of the arena that the intermediates and the scratch share.
    pub fn arena_bytes(&self) -> usize {
        self.arena_bytes
    }

    /// The bounded ranges of kernels. Each is one submission.
    pub fn pieces(&self) -> &[Range<usize>] {
        &self.pieces
    }

    /// The kernels as the backend runs them: each belongs to one group, in order.
    pub fn groups(&self) -> &[ProgramGroup] {
        &self.groups
    }
}

/// Asks the backend about a kernel and its absorbed kernels.
fn check_support(kernel: &Kernel, backend: &dyn Backend) -> Result<()> {
    kernel.absorbed.iter().try_for_each(|absorbed| check_support(absorbed, backend))?;
    backend.supports(kernel).map_err(|reason| ArrayError::Unsupported {
        backend: backend.name().into(),
        op: kernel.op.name().into(),
        reason,
    })
}

/// Cuts the kernel list so that no piece exceeds the bounds of a submission.
fn cut(kernels: &[Kernel], options: &RuntimeOptions) -> Vec<Range<usize>> {
    let mut pieces = Vec::new();
    let (mut start, mut bytes) = (0, 0usize);
    for (i, kernel) in kernels.iter().enumerate() {
        let touched = kernel.touched_bytes();
        let full =
            i - start == options.submission_ops || bytes.saturating_add(touched) > options.submission_bytes;
        if full && i > start {
            pieces.push(start..i);
            (start, bytes) = (i, 0);
        }
        bytes = bytes.saturating_add(touched);
    }
    if start < kernels.len() {
        pieces.push(start..kernels.len());
    }
    pieces
}

impl Kernel {
    /// A kernel without scratch, absorbed kernels or a regime yet.
    pub(crate) fn new(op: Op, inputs: Vec<Operand>, outputs: Vec<Operand>) -> Kernel {
        Kernel { op, inputs, outputs, workspace: None, absorbed: Vec::new(), regime: None }
    }

    /// The operands that the kernel and its absorbed kernels read from memory.
    pub fn reads(&self) -> Vec<&Operand> {
        let own = self.inputs.iter().filter(|input| !matches!(input.memory, OperandMemory::Absorbed(_)));
        own.chain(self.absorbed.iter().flat_map(Kernel::reads)).collect()
    }

    /// The absorbed kernel that computes input number `input`; `None` if the input is in memory.
    pub fn producer(&self, input: usize) -> Option<&Kernel> {
        match self.inputs[input].memory {
            OperandMemory::Absorbed(i) => Some(&self.absorbed[i]),
            _ => None,
        }
    }

    /// Input number `input`, or the source if the input is an absorbed copy of strided data.
    pub fn source(&self, input: usize) -> &Operand {
        self.producer(input).map_or(&self.inputs[input], |copy| &copy.inputs[0])
    }

    /// Calls `f` with every operand that is in memory.
    fn for_each_operand(&mut self, f: &mut impl FnMut(&mut Operand)) {
        self.for_each_input(f);
        self.outputs.iter_mut().for_each(f);
    }

    fn for_each_input(&mut self, f: &mut impl FnMut(&mut Operand)) {
        self.inputs
            .iter_mut()
            .filter(|input| !matches!(input.memory, OperandMemory::Absorbed(_)))
            .for_each(&mut *f);
        for absorbed in &mut self.absorbed {
            absorbed.for_each_input(f);
        }
    }

    /// Bytes of all operands, an upper bound on the memory traffic of most kernels.
    fn touched_bytes(&self) -> usize {
        let operands = self.reads().into_iter().chain(&self.outputs);
        operands.map(|o| bytes_of(o.dtype, o.layout.shape.elements())).fold(0, usize::saturating_add)
    }
}

/// A buffer, from a byte offset on.
#[derive(Clone, Debug)]
pub(crate) struct Binding {
    pub buffer: Buffer,
    pub offset: usize,
}

/// The memory of one evaluation of a program.
#[derive(Debug)]
pub(crate) struct Bindings {
    pub externals: Vec<Binding>,
    pub outputs: Vec<Binding>,
    /// Number of the prepared program that this memory belongs to; `None` for a single evaluation.
    pub prepared: Option<u64>,
}

/// The memory of an operand during a launch.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// The buffer.
    pub buffer: &'a Buffer,
    /// The byte at which the memory begins.
    pub offset: usize,
}

/// A piece of a prepared program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PreparedPiece {
    /// Number of the program, unique within the process.
    pub program: u64,
    /// First kernel of the piece.
    pub first_kernel: usize,
}

/// The work of one backend call: some kernels of a program, and their memory.
pub struct Launch<'a> {
    program: &'a Arc<Program>,
    piece: Range<usize>,
    bindings: &'a Bindings,
    arena: Option<&'a Buffer>,
    /// How many kernels a failed launch has run; `usize::MAX` if the backend has not said.
    done: AtomicUsize,
}

impl<'a> Launch<'a> {
    pub(crate) fn new(
        program: &'a Arc<Program>,
        piece: Range<usize>,
        bindings: &'a Bindings,
        arena: Option<&'a Buffer>,
    ) -> Launch<'a> {
        Launch { program, piece, bindings, arena, done: AtomicUsize::new(usize::MAX) }
    }

    /// The kernels, in order.
    pub fn kernels(&self) -> &'a [Kernel] {
        &self.program.kernels[self.piece.clone()]
    }

    /// The groups that the kernels form, in order. Their kernels are numbered from the first of this launch.
    pub fn groups(&self) -> impl Iterator<Item = ProgramGroup> + use<'a> {
        let Range { start, end } = self.piece;
        let groups =
            self.program.groups.iter().filter(move |g| start <= g.kernels.start && g.kernels.end <= end);
        groups.map(move |group| ProgramGroup {
            name: group.name,
            kernels: group.kernels.start - start..group.kernels.end - start,
        })
    }

    /// Called before a launch fails: its first `kernels` kernels have run completely, and the others have not changed
    /// the state that they mutate. A backend that cannot know this does not call it.
    pub fn note_done(&self, kernels: usize) {
        self.done.store(kernels, Ordering::Relaxed);
    }

    /// For a failed launch: how many kernels of the whole program have run, if the backend knows.
    pub(crate) fn done(&self) -> Option<usize> {
        let kernels = self.done.load(Ordering::Relaxed);
        (kernels <= self.piece.len()).then(|| self.piece.start + kernels)
    }

    /// The piece of a prepared program, which runs many times with the same memory. Only the arena may change from run
    /// to run. `None` for a program that runs once.
    pub fn prepared(&self) -> Option<PreparedPiece> {
        self.bindings.prepared.map(|program| PreparedPiece { program, first_kernel: self.piece.start })
    }

    /// Whether no piece of the program follows.
    pub fn is_last(&self) -> bool {
        self.piece.end == self.program.kernels.len()
    }

    /// The memory of [`OperandMemory::External`] and then that of [`OperandMemory::Output`], each in the order of their
    /// numbers.
    pub fn places(&self) -> [Vec<Place<'a>>; 2] {
        let bound = |b: &'a Binding| Place { buffer: &b.buffer, offset: b.offset };
        [&self.bindings.externals, &self.bindings.outputs].map(|all| all.iter().map(bound).collect())
    }

    /// True if the program has intermediates or scratch.
    pub fn has_arena(&self) -> bool {
        self.arena.is_some()
    }

    /// The buffer of an operand's memory, and the byte at which that memory begins.
    pub fn resolve(&self, memory: OperandMemory) -> Place<'a> {
        let bound = |b: &'a Binding| Place { buffer: &b.buffer, offset: b.offset };
        match memory {
            OperandMemory::External(i) => bound(&self.bindings.externals[i]),
            OperandMemory::Output(i) => bound(&self.bindings.outputs[i]),
            OperandMemory::Arena { offset, .. } => Place { buffer: self.arena(), offset },
            OperandMemory::Temp(_) => unreachable!("a planned program has no unplaced operand"),
            OperandMemory::Absorbed(_) => unreachable!("an absorbed value is not in memory"),
        }
    }

    /// The arena. Present if any kernel has an operand or scratch in it.
    pub fn arena(&self) -> &'a Buffer {
        self.arena.unwrap_or_else(|| unreachable!("a program with intermediates is bound to an arena"))
    }
}

#[cfg(test)]
mod tests;
