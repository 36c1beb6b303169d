//! A value that a single kernel reads may take 16 bits an element, if that kernel rounds it further anyway.
//!
//! Only a backend knows which kernels can write and read such a value. It is asked after absorption, when it is known
//! which kernel reads which value.

use std::collections::HashMap;

use super::super::lower::LoweredProgram;
use super::super::{Kernel, OperandMemory};
use crate::DType;
use crate::backend::Backend;
use crate::ops::bytes_of;

/// The type that stands for 16 bits an element.
const NARROW: DType = DType::F16;

pub(super) fn narrow(lowered: &mut LoweredProgram, backend: &dyn Backend) {
    // The kernels that read each intermediate, one for each operand.
    let mut readers: HashMap<usize, Vec<usize>> = HashMap::new();
    for (reader, kernel) in lowered.kernels.iter().enumerate() {
        for operand in kernel.reads() {
            if let OperandMemory::Temp(t) = operand.memory {
                readers.entry(t).or_default().push(reader);
            }
        }
    }
    for i in 0..lowered.kernels.len() {
        let Some(t) = intermediate(&lowered.kernels[i]) else { continue };
        let Some(&[reader]) = readers.get(&t).map(Vec::as_slice) else { continue };
        let is_inner = lowered.temps[t].output.is_none();
        if !is_inner || !backend.narrows(&lowered.kernels[i], &lowered.kernels[reader]) {
            continue;
        }
        let output = &mut lowered.kernels[i].outputs[0];
        output.dtype = NARROW;
        lowered.temps[t].bytes = bytes_of(NARROW, output.layout.shape.elements());
        lowered.kernels[reader].for_each_input(&mut |input| {
            if input.memory == OperandMemory::Temp(t) {
                input.dtype = NARROW;
            }
        });
    }
}

/// The intermediate of f32 that is a kernel's only result.
fn intermediate(kernel: &Kernel) -> Option<usize> {
    match kernel.outputs[..] {
        [ref output] if output.dtype == DType::F32 => match output.memory {
            OperandMemory::Temp(t) => Some(t),
            _ => None,
        },
        _ => None,
    }
}
