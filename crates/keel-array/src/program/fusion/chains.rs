//! Chains of element-wise f32 kernels become one kernel. Every backend runs such a chain.
//!
//! A producer is folded into its consumer only if nothing else reads its value, so no work is done twice.

use std::collections::HashMap;
use std::sync::Arc;

use super::super::lower::{LoweredProgram, Temp};
use super::super::{Kernel, Operand, OperandMemory};
use crate::DType;
use crate::ops::{Fused, FusedStep, Op, Source};

pub(super) fn chain(lowered: &mut LoweredProgram) {
    let mut readers: HashMap<usize, usize> = HashMap::new();
    let mut mutated: Vec<usize> = Vec::new();
    for kernel in &lowered.kernels {
        for (i, input) in kernel.inputs.iter().enumerate() {
            match input.memory {
                OperandMemory::Temp(t) => *readers.entry(t).or_insert(0) += 1,
                OperandMemory::External(e) if kernel.op.mutated_inputs().contains(&i) => mutated.push(e),
                _ => {}
            }
        }
    }
    let mut producer: HashMap<usize, usize> = HashMap::new();
    let mut kept: Vec<Option<Kernel>> = Vec::new();
    for kernel in lowered.kernels.drain(..) {
        let mut kernel = kernel;
        while let Some(Foldable { input, producer }) =
            foldable(&kernel, &kept, &producer, &readers, &lowered.temps, &mutated)
        {
            let Some(made) = kept[producer].take() else { break };
            kernel = fold(made, kernel, input);
        }
        for output in &kernel.outputs {
            if let OperandMemory::Temp(t) = output.memory {
                producer.insert(t, kept.len());
            }
        }
        kept.push(Some(kernel));
    }
    lowered.kernels = kept.into_iter().flatten().collect();
}

/// An input of a kernel, and the number of the kernel that computes it.
struct Foldable {
    input: usize,
    producer: usize,
}

/// An input of `kernel` whose producer can be folded into it.
fn foldable(
    kernel: &Kernel,
    kept: &[Option<Kernel>],
    producer: &HashMap<usize, usize>,
    readers: &HashMap<usize, usize>,
    temps: &[Temp],
    mutated: &[usize],
) -> Option<Foldable> {
    let consumer = steps(kernel)?;
    kernel.inputs.iter().enumerate().find_map(|(i, input)| {
        let OperandMemory::Temp(t) = input.memory else { return None };
        let producer = *producer.get(&t)?;
        let made = kept[producer].as_ref()?;
        let made_steps = steps(made)?;
        let fits = consumer.len() + made_steps.len() <= Fused::STEPS_MAX
            && kernel.inputs.len() + made.inputs.len() - 1 <= Fused::INPUTS_MAX;
        let stable = made
            .inputs
            .iter()
            .all(|i| !matches!(i.memory, OperandMemory::External(e) if mutated.contains(&e)));
        let alone = readers.get(&t) == Some(&1) && temps[t].output.is_none();
        (fits && stable && alone && input.layout == made.outputs[0].layout)
            .then_some(Foldable { input: i, producer })
    })
}

/// The kernel as steps of a chain, if it is an element-wise f32 kernel.
fn steps(kernel: &Kernel) -> Option<Vec<FusedStep>> {
    let all_f32 = kernel.inputs.iter().chain(&kernel.outputs).all(|o| o.dtype == DType::F32);
    if !all_f32 {
        return None;
    }
    match &kernel.op {
        Op::Unary(op) => Some(vec![FusedStep::Unary(*op, Source::Input(0))]),
        Op::Binary(op) => Some(vec![FusedStep::Binary(*op, Source::Input(0), Source::Input(1))]),
        Op::Fused(fused) => Some(fused.steps.clone()),
        _ => None,
    }
}

/// Computes `made` inside `kernel`, in place of input number `input` of `kernel`.
fn fold(made: Kernel, kernel: Kernel, input: usize) -> Kernel {
    let (first, second) = (steps(&made).unwrap_or_default(), steps(&kernel).unwrap_or_default());
    let result = first.len() - 1;
    let mut inputs: Vec<Operand> = made.inputs;
    let mut places = Vec::with_capacity(kernel.inputs.len());
    for (i, operand) in kernel.inputs.into_iter().enumerate() {
        if i == input {
            places.push(Source::Step(result));
        } else {
            places.push(Source::Input(inputs.len()));
            inputs.push(operand);
        }
    }
    let shift = first.len();
    let place = |source: Source| match source {
        Source::Input(i) => places[i],
        Source::Step(s) => Source::Step(s + shift),
    };
    let mut chain = first;
    chain.extend(second.into_iter().map(|step| match step {
        FusedStep::Unary(op, a) => FusedStep::Unary(op, place(a)),
        FusedStep::Binary(op, a, b) => FusedStep::Binary(op, place(a), place(b)),
    }));
    let op = Op::Fused(Arc::new(Fused { steps: chain }));
    Kernel::new(op, inputs, kernel.outputs)
}
