//! A value that its readers can compute for themselves needs neither memory nor a kernel.
//!
//! Only a backend knows which producers its kernels can absorb: a norm before a product, a gate after it. It is asked
//! about each producer and each of its readers. All readers must agree; then each of them runs the producer itself.

use std::collections::HashMap;

use super::super::lower::LoweredProgram;
use super::super::{Kernel, OperandMemory};
use crate::backend::Backend;

pub(super) fn absorb(lowered: &mut LoweredProgram, backend: &dyn Backend) {
    let mut readers: HashMap<usize, Vec<(usize, usize)>> = HashMap::new();
    let mut mutated: Vec<usize> = Vec::new();
    for (reader, kernel) in lowered.kernels.iter().enumerate() {
        for (n, input) in kernel.inputs.iter().enumerate() {
            match input.memory {
                OperandMemory::Temp(t) => readers.entry(t).or_default().push((reader, n)),
                OperandMemory::External(e) if kernel.op.mutated_inputs().contains(&n) => mutated.push(e),
                _ => {}
            }
        }
    }
    let mut kernels: Vec<Option<Kernel>> = lowered.kernels.drain(..).map(Some).collect();
    // In order: an absorbed producer can be absorbed again, together with its reader.
    for i in 0..kernels.len() {
        let Some(producer) = kernels[i].take() else { continue };
        let places = match producer.outputs[..] {
            [ref output] => match output.memory {
                OperandMemory::Temp(t) if lowered.temps[t].output.is_none() => readers.get(&t),
                _ => None,
            },
            _ => None,
        };
        let stable = producer.op.mutated_inputs().is_empty()
            && producer
                .reads()
                .iter()
                .all(|o| !matches!(o.memory, OperandMemory::External(e) if mutated.contains(&e)));
        let taken = places.filter(|places| {
            stable
                && places.iter().enumerate().all(|(n, &(reader, input))| {
                    let once = places[..n].iter().all(|earlier| earlier.0 != reader);
                    once && kernels[reader].as_ref().is_some_and(|r| backend.absorbs(r, input, &producer))
                })
        });
        let Some(taken) = taken else {
            kernels[i] = Some(producer);
            continue;
        };
        for &(reader, input) in taken {
            if let Some(reader) = &mut kernels[reader] {
                reader.inputs[input].memory = OperandMemory::Absorbed(reader.absorbed.len());
                reader.absorbed.push(producer.clone());
            }
        }
    }
    lowered.kernels = kernels.into_iter().flatten().collect();
}
