//! Launches that one process plans and another one runs.

use std::cell::Cell;
use std::sync::Arc;

use super::{Binding, Bindings, Kernel, Launch, Operand, OperandMemory, Program, check_support, fusion};
use crate::ops::Op;
use crate::runtime::next_prepared;
use crate::{ArrayError, Buffer, Layout, Result, Runtime};

/// The sources that define a launch and its numbers: the values that are sent to another process, and the number of
/// operands of an operation.
const SOURCES: [&str; 17] = [
    include_str!("../backend.rs"),
    include_str!("../blocks/mod.rs"),
    include_str!("../dtype.rs"),
    include_str!("../ops/elementwise.rs"),
    include_str!("../ops/exchange.rs"),
    include_str!("../ops/fast.rs"),
    include_str!("../ops/indexing.rs"),
    include_str!("../ops/kv_format.rs"),
    include_str!("../ops/mod.rs"),
    include_str!("../ops/operands.rs"),
    include_str!("../ops/reduce.rs"),
    include_str!("../ops/sequence.rs"),
    include_str!("../shape.rs"),
    include_str!("../usage.rs"),
    include_str!("../weight.rs"),
    include_str!("mod.rs"),
    include_str!("remote_launch.rs"),
];

/// A hash of all [`SOURCES`].
const SOURCES_HASH: u64 = {
    let (mut hash, mut i) = (0, 0);
    while i < SOURCES.len() {
        hash = hash_on(hash, SOURCES[i]);
        i += 1;
    }
    hash
};

/// Goes on with a hash over a text, by words of 8 bytes: fewer steps for the compiler.
const fn hash_on(hash: u64, text: &str) -> u64 {
    const fn with(hash: u64, word: u64) -> u64 {
        // FxHash.
        (hash.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95)
    }
    let (words, rest) = text.as_bytes().as_chunks();
    let (mut hash, mut i) = (with(hash, text.len() as u64), 0);
    while i < words.len() {
        hash = with(hash, u64::from_le_bytes(words[i]));
        i += 1;
    }
    i = 0;
    while i < rest.len() {
        hash = with(hash, rest[i] as u64);
        i += 1;
    }
    hash
}

/// A piece of a program that another process has planned, bound to memory of this one. It runs many times.
///
/// Kernels, workspaces and places in the arena are those of the plan. A planning backend of the other process has
/// given them for a device such as this one, so they are the same here.
pub struct RemoteLaunch {
    runtime: Runtime,
    program: Arc<Program>,
    bindings: Bindings,
    /// The end of the bytes of the arena that the kernels use; `None` if they use none.
    arena_end: Option<usize>,
}

impl RemoteLaunch {
    /// A hash of the sources that define launches, and of the text that defines the messages with which they are sent.
    /// Processes with different hashes may not mean the same by a launch.
    pub const fn hash_of_sources(messages: &str) -> u64 {
        hash_on(SOURCES_HASH, messages)
    }

    /// Binds `kernels` to the memory of their externals and outputs: buffers, each with the byte at which it
    /// begins. `has_arena` says whether the other process had an arena for them; here they use the runtime's, which
    /// [`Runtime::reserve_arena`] has made large enough.
    ///
    /// # Errors
    /// - An operand that is missing or not within its memory.
    /// - A result or scratch that shares memory with another operand.
    /// - Too little scratch, or a kernel that the backend does not have: the other process has planned for another
    ///   device, or is another build.
    ///
    /// Shapes are not compared with the operation; the other process vouches for them.
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
    /// Whether a kernel's operands and its scratch are within this memory, and lie apart where they must.
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
        if let Some(output) = kernel.outputs.iter().find(|output| !self.holds(output)) {
            return wrong(format!("a result is not within its memory: {output:?}"));
        }
        self.check_inputs(kernel, runtime)?;
        if let Err(reason) = kernel.check_apart(|memory| self.base(memory)) {
            return wrong(reason);
        }
        let needed = runtime.backend().workspace_bytes(kernel);
        let given = kernel.workspace.as_ref().map_or(0, |scratch| scratch.len());
        if given < needed {
            return wrong(format!(
                "{needed} bytes of scratch are needed, and it has {given}: run the same build of keel on all nodes"
            ));
        }
        Ok(())
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
                _ => self.holds(input) && (i != 1 || input.bytes_in_memory().len() >= weight_bytes),
            };
            if !is_there {
                let reason = format!("operand {i} is not within its memory: {input:?}");
                return Err(ArrayError::Kernel { op: kernel.op.name().into(), reason });
            }
        }
        Ok(())
    }

    /// The memory of an operand, `None` for the arena, and its first byte there. Several places may lie in one buffer.
    fn base(&self, memory: OperandMemory) -> Option<(Option<usize>, usize)> {
        let (buffer, offset) = match memory {
            OperandMemory::External(i) => self.externals.get(i)?,
            OperandMemory::Output(i) => self.outputs.get(i)?,
            OperandMemory::Arena { offset, .. } => return Some((None, offset)),
            OperandMemory::Temp(_) | OperandMemory::Absorbed(_) => return None,
        };
        Some((Some(buffer.address()), *offset))
    }

    /// Whether an operand is within its memory.
    fn holds(&self, operand: &Operand) -> bool {
        let Some(end) = end_of(&operand.layout) else { return false };
        let Some(bytes) = end.checked_mul(operand.dtype.size()) else { return false };
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// Only values that can be read again are sent to another process.
    #[test]
    fn all_sources_of_what_is_sent_are_hashed() {
        let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
        let mut found = 0;
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).expect("a folder of this crate") {
                let path = entry.expect("it is listed").path();
                if path.is_dir() {
                    folders.push(path);
                    continue;
                }
                let text = std::fs::read_to_string(&path).expect("a source");
                if text.contains("Deserialize") {
                    assert!(SOURCES.contains(&text.as_str()), "{} is not in SOURCES", path.display());
                    found += 1;
                }
            }
        }
        assert!(found > 10, "{found} sources");
    }

    #[test]
    fn each_byte_of_a_source_changes_the_hash() {
        let text = "seventeen letters";
        let whole = hash_on(1, text);
        for i in 0..text.len() {
            let other = format!("{}~{}", &text[..i], &text[i + 1..]);
            assert_ne!(hash_on(1, &other), whole, "byte {i}");
            let parts = hash_on(hash_on(1, &text[..i]), &text[i..]);
            assert_ne!(parts, whole, "two sources");
        }
        assert_ne!(RemoteLaunch::hash_of_sources("a"), RemoteLaunch::hash_of_sources("b"));
    }
}
