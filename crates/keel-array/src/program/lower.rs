//! Stage 2: calls become kernels; views become strides.

use super::graph::{CallOutput, Graph, Ref};
use super::{Kernel, Operand, OperandMemory};
use crate::array::{ArraySpec, apply_view};
use crate::ops::{Op, Strides, bytes_of};
use crate::{DType, Layout};

/// An intermediate of a program, before it has a place.
#[derive(Clone, Debug)]
pub(super) struct Temp {
    pub bytes: usize,
    /// The number of the output that this value becomes, if it outlives the program.
    pub output: Option<usize>,
}

/// A program without a memory plan.
pub(super) struct LoweredProgram {
    pub kernels: Vec<Kernel>,
    pub temps: Vec<Temp>,
    pub outputs: Vec<ArraySpec>,
}

pub(super) fn lower(graph: &Graph) -> LoweredProgram {
    let mut lowered = LoweredProgram { kernels: Vec::new(), temps: Vec::new(), outputs: Vec::new() };
    let mut values: Vec<Vec<Operand>> = Vec::with_capacity(graph.calls.len());
    for call in &graph.calls {
        let inputs: Vec<Operand> = call.inputs.iter().map(|&r| operand(graph, &values, r)).collect();
        let results = match &call.op {
            Op::View(view) => {
                let shape = &call.specs[0].shape;
                let moved = apply_view(view, &inputs[0].layout, shape)
                    .map(|layout| Operand { layout, ..inputs[0].clone() });
                let result = moved.unwrap_or_else(|| {
                    let copy = lowered.copy(&inputs[0]);
                    let layout = apply_view(view, &copy.layout, shape)
                        .unwrap_or_else(|| unreachable!("every view of a contiguous value is a layout"));
                    Operand { layout, ..copy }
                });
                vec![result]
            }
            op => lowered.emit(op.clone(), inputs, &call.specs),
        };
        values.push(results);
    }
    for &CallOutput { call, output } in &graph.outputs {
        let value = values[call][output].clone();
        lowered.bind_output(value);
    }
    lowered
}

fn operand(graph: &Graph, values: &[Vec<Operand>], reference: Ref) -> Operand {
    match reference {
        Ref::Call { call, output } => values[call][output].clone(),
        Ref::External(i) => {
            let external = &graph.externals[i];
            Operand {
                memory: OperandMemory::External(i),
                layout: external.layout.clone(),
                dtype: external.dtype,
            }
        }
    }
}

impl LoweredProgram {
    fn temp(&mut self, layout: Layout, dtype: DType) -> Operand {
        let memory = OperandMemory::Temp(self.temps.len());
        self.temps.push(Temp { bytes: bytes_of(dtype, layout.shape.elements()), output: None });
        Operand { memory, layout, dtype }
    }

    fn copy(&mut self, from: &Operand) -> Operand {
        let to = self.temp(Layout::contiguous(from.layout.shape.clone()), from.dtype);
        self.kernels.push(Kernel::new(Op::Copy, vec![from.clone()], vec![to.clone()]));
        to
    }

    /// Adds a kernel. Adds a copy for each operand whose strides the kernel cannot walk.
    fn emit(&mut self, op: Op, inputs: Vec<Operand>, specs: &[ArraySpec]) -> Vec<Operand> {
        let inputs = inputs
            .into_iter()
            .enumerate()
            .map(|(i, input)| {
                let walkable = match op.accepts(i) {
                    Strides::Any => true,
                    Strides::Rows(inner) => input.layout.row_stride(inner).is_some(),
                    Strides::Contiguous => input.layout.is_contiguous(),
                };
                let state = op.mutated_inputs().contains(&i);
                assert!(
                    walkable || !state,
                    "{}: state must be contiguous, it is written in place",
                    op.name()
                );
                if walkable { input } else { self.copy(&input) }
            })
            .collect();
        let temp = |spec: &ArraySpec| self.temp(Layout::contiguous(spec.shape.clone()), spec.dtype);
        let outputs: Vec<Operand> = specs.iter().map(temp).collect();
        self.kernels.push(Kernel::new(op, inputs, outputs.clone()));
        outputs
    }

    /// Makes a value an output with its own memory: it must not keep other memory alive (law 4).
    fn bind_output(&mut self, value: Operand) {
        let number = self.outputs.len();
        let own = match value.memory {
            OperandMemory::Temp(t) => {
                let temp = &self.temps[t];
                let whole = value.layout.is_contiguous()
                    && bytes_of(value.dtype, value.layout.shape.elements()) == temp.bytes;
                (whole && temp.output.is_none()).then_some((t, value.clone()))
            }
            _ => None,
        };
        let (t, value) = own.unwrap_or_else(|| {
            let copy = self.copy(&value);
            let OperandMemory::Temp(t) = copy.memory else { unreachable!("a copy is an intermediate") };
            (t, copy)
        });
        self.temps[t].output = Some(number);
        self.outputs.push(ArraySpec { shape: value.layout.shape, dtype: value.dtype });
    }
}
