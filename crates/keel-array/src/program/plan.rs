//! Stage 4: the memory plan.
//!
//! Walks the kernels in order with the set of live intermediates. A result takes the memory of an input whose last use
//! is this kernel, if the kernel allows it. Otherwise it takes the lowest gap of the arena that is large enough.

use super::graph::Graph;
use super::lower::LoweredProgram;
use super::{ALIGNMENT, Kernel, Operand, OperandMemory, OutputMemory, Program, ProgramOutput};
use crate::backend::Backend;
use crate::ops::bytes_of;

pub(super) fn plan(lowered: LoweredProgram, graph: &Graph, backend: &dyn Backend) -> Program {
    let mut planner = MemoryPlanner::new(&lowered, graph);
    let mut kernels = lowered.kernels;
    for (i, kernel) in kernels.iter_mut().enumerate() {
        planner.place_outputs(i, kernel);
        kernel.for_each_operand(&mut |operand| operand.memory = planner.resolve(operand.memory));
        planner.place_workspace(kernel, backend);
        planner.release_after(i);
    }
    let memory = planner.outputs;
    let outputs = lowered.outputs.into_iter().zip(memory);
    let outputs = outputs.map(|(spec, memory)| ProgramOutput { memory, spec }).collect();
    Program {
        kernels,
        outputs,
        arena_bytes: planner.arena.high_water,
        pieces: Vec::new(),
        groups: Vec::new(),
    }
}

struct MemoryPlanner<'a> {
    graph: &'a Graph,
    temps: Vec<super::lower::Temp>,
    /// Last kernel that reads each intermediate (or writes it, if nothing reads it).
    last_use: Vec<usize>,
    last_external_use: Vec<usize>,
    mutated: Vec<bool>,
    donated: Vec<bool>,
    place: Vec<Option<OperandMemory>>,
    outputs: Vec<OutputMemory>,
    arena: Arena,
}

impl<'a> MemoryPlanner<'a> {
    fn new(lowered: &LoweredProgram, graph: &'a Graph) -> MemoryPlanner<'a> {
        let mut last_use = vec![0; lowered.temps.len()];
        let mut last_external_use = vec![0; graph.externals.len()];
        let mut mutated = vec![false; graph.externals.len()];
        for (i, kernel) in lowered.kernels.iter().enumerate() {
            for operand in kernel.reads().into_iter().chain(&kernel.outputs) {
                match operand.memory {
                    OperandMemory::Temp(t) => last_use[t] = i,
                    OperandMemory::External(e) => last_external_use[e] = i,
                    _ => {}
                }
            }
            for input in &kernel.inputs[kernel.op.mutated_inputs()] {
                if let OperandMemory::External(e) = input.memory {
                    mutated[e] = true;
                }
            }
        }
        let outputs = lowered
            .outputs
            .iter()
            .map(|spec| OutputMemory::Fresh(bytes_of(spec.dtype, spec.shape.elements())))
            .collect();
        MemoryPlanner {
            graph,
            temps: lowered.temps.clone(),
            last_use,
            last_external_use,
            mutated,
            donated: vec![false; graph.externals.len()],
            place: vec![None; lowered.temps.len()],
            outputs,
            arena: Arena::default(),
        }
    }

    fn resolve(&self, memory: OperandMemory) -> OperandMemory {
        match memory {
            OperandMemory::Temp(t) => {
                self.place[t].unwrap_or_else(|| unreachable!("intermediate {t} is read before it is written"))
            }
            other => other,
        }
    }

    fn place_outputs(&mut self, i: usize, kernel: &Kernel) {
        for (n, output) in kernel.outputs.iter().enumerate() {
            let OperandMemory::Temp(t) = output.memory else { continue };
            let place = self.reuse(i, kernel, n, t).unwrap_or_else(|| match self.temps[t].output {
                Some(number) => OperandMemory::Output(number),
                None => OperandMemory::Arena { temp: t, offset: self.arena.take(t, self.temps[t].bytes) },
            });
            self.place[t] = Some(place);
        }
    }

    /// The place of an input whose last use is kernel `i` and whose memory fits output `t` exactly.
    fn reuse(&mut self, i: usize, kernel: &Kernel, number: usize, t: usize) -> Option<OperandMemory> {
        let output = &kernel.outputs[number];
        for (n, input) in kernel.inputs.iter().enumerate() {
            let same = input.dtype == output.dtype && input.layout == output.layout;
            if !kernel.op.may_reuse(n, number) || !same || overlaps_another(kernel, n) || absorbed(kernel, n)
            {
                continue;
            }
            match input.memory {
                OperandMemory::External(e) => {
                    let external = &self.graph.externals[e];
                    // The rest of a larger input would stay allocated (law 4).
                    let whole = bytes_of(external.dtype, external.layout.shape.elements());
                    let free = external.donatable
                        && whole == self.temps[t].bytes
                        && self.last_external_use[e] == i
                        && !self.mutated[e]
                        && !self.donated[e];
                    // Without an output that keeps the buffer, the arena is the better place.
                    let (true, Some(number)) = (free, self.temps[t].output) else { continue };
                    self.donated[e] = true;
                    self.outputs[number] = OutputMemory::Donated(e);
                    return Some(OperandMemory::External(e));
                }
                OperandMemory::Temp(from) if self.last_use[from] == i && self.temps[t].output.is_none() => {
                    let Some(OperandMemory::Arena { offset, .. }) = self.place[from] else { continue };
                    if self.temps[from].bytes != self.temps[t].bytes {
                        continue;
                    }
                    self.arena.hand_over(from, t);
                    return Some(OperandMemory::Arena { temp: t, offset });
                }
                _ => {}
            }
        }
        None
    }

    fn place_workspace(&mut self, kernel: &mut Kernel, backend: &dyn Backend) {
        let bytes = backend.workspace_bytes(kernel);
        if bytes > 0 {
            let offset = self.arena.take(usize::MAX, bytes);
            self.arena.release(usize::MAX);
            kernel.workspace = Some(offset..offset + bytes);
        }
    }

    fn release_after(&mut self, i: usize) {
        for t in 0..self.last_use.len() {
            if self.last_use[t] == i {
                self.arena.release(t);
            }
        }
    }
}

/// True if another input of the kernel reads the same memory: writing would change it. Exception: an element-wise
/// kernel that reads both in the same order.
fn overlaps_another(kernel: &Kernel, n: usize) -> bool {
    let this = &kernel.inputs[n];
    let others = kernel.inputs.iter().enumerate().filter(|(m, _)| *m != n);
    let in_step = |other: &Operand| kernel.op.is_elementwise() && other.layout == this.layout;
    others.into_iter().any(|(_, other)| other.memory == this.memory && !in_step(other))
}

/// True if an absorbed kernel reads the memory of input `n`: it may read after parts of the result are written.
fn absorbed(kernel: &Kernel, n: usize) -> bool {
    let memory = kernel.inputs[n].memory;
    kernel.absorbed.iter().flat_map(Kernel::reads).any(|operand| operand.memory == memory)
}

/// Bytes of the arena that hold an intermediate, or scratch.
struct Live {
    offset: usize,
    bytes: usize,
    /// The intermediate; `usize::MAX` for scratch.
    temp: usize,
}

/// Live intermediates, lowest offset first.
#[derive(Default)]
struct Arena {
    live: Vec<Live>,
    high_water: usize,
}

impl Arena {
    fn take(&mut self, temp: usize, bytes: usize) -> usize {
        // An empty intermediate takes space, too: every operand then lies within the arena.
        let bytes = bytes.max(1).next_multiple_of(ALIGNMENT);
        let mut offset = 0;
        let mut at = self.live.len();
        for (i, live) in self.live.iter().enumerate() {
            if live.offset - offset >= bytes {
                at = i;
                break;
            }
            offset = live.offset + live.bytes;
        }
        self.live.insert(at, Live { offset, bytes, temp });
        self.high_water = self.high_water.max(offset + bytes);
        offset
    }

    fn release(&mut self, temp: usize) {
        self.live.retain(|live| live.temp != temp);
    }

    fn hand_over(&mut self, from: usize, to: usize) {
        if let Some(entry) = self.live.iter_mut().find(|live| live.temp == from) {
            entry.temp = to;
        }
    }
}
