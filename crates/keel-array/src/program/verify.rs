//! Stage 5: checks a plan before its first run. A failure is a bug in this crate, so it panics with the kernel's name.

use std::ops::Range;

use super::graph::Graph;
use super::{Kernel, OperandMemory, OutputMemory, Program};
use crate::ops::bytes_of;

/// Bytes of the arena that hold an intermediate.
#[derive(Clone)]
struct Held {
    bytes: Range<usize>,
    /// The intermediate; `usize::MAX` for scratch.
    temp: usize,
}

/// Every kernel has the operands of its operation. Every operand lies within its memory. Every intermediate is read
/// only while its memory still holds it.
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
        let scratch = kernel.workspace.clone().map(|bytes| Held { bytes, temp: usize::MAX });
        let written = kernel.outputs.iter().filter_map(|output| match output.memory {
            OperandMemory::Arena { temp, offset } => {
                let end = offset + bytes_of(output.dtype, output.layout.end());
                Some(Held { bytes: offset..end, temp })
            }
            _ => None,
        });
        let written: Vec<_> = written.chain(scratch).collect();
        for Held { bytes: Range { start, end }, temp } in written.iter().cloned() {
            assert!(end <= program.arena_bytes, "kernel {i} ({name}) writes past the arena");
            if temp == usize::MAX {
                let clash = kernel.reads().into_iter().chain(&kernel.outputs).any(|o| match o.memory {
                    OperandMemory::Arena { offset, .. } => {
                        offset < end && start < offset + bytes_of(o.dtype, o.layout.end())
                    }
                    _ => false,
                });
                assert!(!clash, "kernel {i} ({name}): the scratch overlaps an operand");
            }
        }
        let are_apart = |a: &Range<usize>, b: &Range<usize>| a.end <= b.start || b.end <= a.start;
        holds.retain(|held| written.iter().all(|new| are_apart(&held.bytes, &new.bytes)));
        holds.extend(written.into_iter().filter(|new| new.temp != usize::MAX));
    }
    for output in &program.outputs {
        if let OutputMemory::Donated(e) = output.memory {
            let external = &graph.externals[e];
            let same = (&external.layout.shape, external.dtype) == (&output.spec.shape, output.spec.dtype);
            assert!(external.donatable && same, "an output took over an input that is still needed");
        }
    }
}

fn count_operands(kernel: &Kernel) {
    let counted = kernel.op.check_operands(kernel.inputs.len(), kernel.outputs.len());
    assert!(counted.is_ok(), "{}: {counted:?}", kernel.op.name());
    kernel.absorbed.iter().for_each(count_operands);
}
