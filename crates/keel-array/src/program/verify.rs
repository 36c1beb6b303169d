//! Stage 5: checks a plan before its first run. A failure is a bug in this crate, so it panics with the kernel's name.

use std::ops::Range;

use super::graph::Graph;
use super::{Kernel, OperandMemory, OutputMemory, Program};
use crate::ops::bytes_of;

/// Bytes of the arena that hold an intermediate.
struct Held {
    bytes: Range<usize>,
    /// The intermediate; `usize::MAX` for scratch.
    temp: usize,
}

/// - Every kernel has the operands of its operation.
/// - Every operand lies within its memory.
/// - Results and scratch lie [apart](Kernel::check_apart) from other operands.
/// - Every intermediate is read only while its memory still holds it.
/// - An output takes over only the whole of an input.
pub(super) fn verify(program: &Program, graph: &Graph) {
    let mut holds: Vec<Held> = Vec::new();
    for (i, kernel) in program.kernels.iter().enumerate() {
        let name = kernel.op.name();
        count_operands(kernel);
        for input in kernel.reads() {
            if let OperandMemory::Arena { temp, offset } = input.memory {
                let intact = holds.iter().any(|held| (held.bytes.start, held.temp) == (offset, temp));
                assert!(
                    intact,
                    "kernel {i} ({name}) reads intermediate {temp}, whose memory has been reused"
                );
            }
            if let OperandMemory::External(e) = input.memory {
                let external = &graph.externals[e];
                assert!(
                    input.layout.end() <= external.layout.end(),
                    "kernel {i} ({name}) reads element {} of an input of {}",
                    input.layout.end(),
                    external.layout.end()
                );
            }
        }
        let apart = kernel.check_apart(base);
        assert!(apart.is_ok(), "kernel {i} ({name}): {apart:?}");
        let scratch = kernel.workspace.clone().map(|bytes| Held { bytes, temp: usize::MAX });
        let written = kernel.outputs.iter().filter_map(|output| match output.memory {
            OperandMemory::Arena { temp, offset } => {
                let end = offset + bytes_of(output.dtype, output.layout.end());
                Some(Held { bytes: offset..end, temp })
            }
            _ => None,
        });
        let written: Vec<_> = written.chain(scratch).collect();
        let is_within = written.iter().all(|new| new.bytes.end <= program.arena_bytes);
        assert!(is_within, "kernel {i} ({name}) writes past the arena");
        let are_apart = |a: &Range<usize>, b: &Range<usize>| a.end <= b.start || b.end <= a.start;
        holds.retain(|held| written.iter().all(|new| are_apart(&held.bytes, &new.bytes)));
        holds.extend(written.into_iter().filter(|new| new.temp != usize::MAX));
    }
    for output in &program.outputs {
        if let OutputMemory::Donated(e) = output.memory {
            let external = &graph.externals[e];
            let is_whole = bytes_of(external.dtype, external.layout.shape.elements())
                == bytes_of(output.spec.dtype, output.spec.shape.elements());
            assert!(
                external.donatable && is_whole,
                "an output took over an input that is still needed, or part of one"
            );
        }
    }
}

/// The memory of an operand, and its first byte there. All intermediates and scratch have the arena in common.
/// Different inputs of a program count as different memory: only a run knows better.
fn base(memory: OperandMemory) -> Option<(OperandMemory, usize)> {
    match memory {
        OperandMemory::Arena { offset, .. } => Some((OperandMemory::Arena { temp: 0, offset: 0 }, offset)),
        OperandMemory::Absorbed(_) => None,
        other => Some((other, 0)),
    }
}

fn count_operands(kernel: &Kernel) {
    let counted = kernel.op.check_operands(kernel.inputs.len(), kernel.outputs.len());
    assert!(counted.is_ok(), "{}: {counted:?}", kernel.op.name());
    kernel.absorbed.iter().for_each(count_operands);
}
