//! Stage 5: checks a plan before its first run. A failure is a bug in this crate, so it panics with the kernel's name.

use super::graph::Graph;
use super::{OutputMemory, Program, Slot};
use crate::ops::bytes_of;

/// Every operand lies within its memory. Every intermediate is read only while its memory still holds it.
pub(super) fn verify(program: &Program, graph: &Graph) {
    let mut holds: Vec<(usize, usize, usize)> = Vec::new(); // (first byte, end, intermediate)
    for (i, kernel) in program.kernels.iter().enumerate() {
        let name = kernel.op.name();
        for input in kernel.reads() {
            if let Slot::Arena { temp, offset } = input.slot {
                let intact = holds.iter().any(|&(start, _, t)| (start, t) == (offset, temp));
                assert!(
                    intact,
                    "kernel {i} ({name}) reads intermediate {temp}, whose memory has been reused"
                );
            }
            if let Slot::External(e) = input.slot {
                let external = &graph.externals[e];
                assert!(
                    input.layout.end() <= external.layout.end(),
                    "kernel {i} ({name}) reads element {} of an input of {}",
                    input.layout.end(),
                    external.layout.end()
                );
            }
        }
        let scratch = kernel.workspace.clone().map(|w| (w.start, w.end, usize::MAX));
        let written = kernel.outputs.iter().filter_map(|output| match output.slot {
            Slot::Arena { temp, offset } => {
                let bytes = bytes_of(output.dtype, output.layout.end());
                Some((offset, offset + bytes, temp))
            }
            _ => None,
        });
        let written: Vec<_> = written.chain(scratch).collect();
        for &(start, end, temp) in &written {
            assert!(end <= program.arena_bytes, "kernel {i} ({name}) writes past the arena");
            if temp == usize::MAX {
                let clash = kernel.reads().into_iter().chain(&kernel.outputs).any(|o| match o.slot {
                    Slot::Arena { offset, .. } => {
                        offset < end && start < offset + bytes_of(o.dtype, o.layout.end())
                    }
                    _ => false,
                });
                assert!(!clash, "kernel {i} ({name}): the scratch overlaps an operand");
            }
        }
        holds.retain(|&(start, end, _)| written.iter().all(|&(s, e, _)| e <= start || end <= s));
        holds.extend(written.into_iter().filter(|w| w.2 != usize::MAX));
    }
    for (memory, layout, dtype) in &program.outputs {
        if let OutputMemory::Donated(e) = memory {
            let external = &graph.externals[*e];
            let same = (&external.layout.shape, external.dtype) == (&layout.shape, *dtype);
            assert!(external.donatable && same, "an output took over an input that is still needed");
        }
    }
}
