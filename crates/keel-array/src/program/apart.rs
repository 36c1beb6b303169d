//! Which operands of a kernel must lie apart in memory. Backends rely on it: see *Aliases are known* in
//! `docs/design/backend.md`.

use std::ops::Range;

use super::{Kernel, Operand, OperandMemory};
use crate::{DType, Layout};

impl Kernel {
    /// Checks that results and scratch share no byte with another operand. A result may lie exactly where an input lies
    /// if the operation [permits it](crate::Op::may_reuse). Whether a state shares memory with another input is checked
    /// when the kernel runs, by [`crate::Op::check_states`]: it can be a mistake of the user.
    ///
    /// `base` gives the memory to which an operand's memory belongs, and its first byte there; `None` for an operand
    /// that is not in memory. The operands lie within their memory.
    ///
    /// # Errors
    /// One sentence.
    pub(super) fn check_apart<M: PartialEq>(
        &self,
        base: impl Fn(OperandMemory) -> Option<(M, usize)>,
    ) -> Result<(), String> {
        let place = |operand: &Operand| -> Option<(M, Range<usize>)> {
            let (memory, first) = base(operand.memory)?;
            let Range { start, end } = operand.bytes_in_memory();
            Some((memory, first + start..first + end))
        };
        let meet = |a: &Operand, b: &Operand| match (place(a), place(b)) {
            (Some((a, x)), Some((b, y))) => a == b && x.start.max(y.start) < x.end.min(y.end),
            _ => false,
        };
        let in_absorbed =
            |written: &Operand| self.absorbed.iter().flat_map(Kernel::reads).any(|read| meet(written, read));
        for (n, output) in self.outputs.iter().enumerate() {
            for (i, input) in self.inputs.iter().enumerate() {
                let is_in_place = self.op.may_reuse(i, n)
                    && (input.dtype, &input.layout) == (output.dtype, &output.layout)
                    && place(input) == place(output);
                if meet(output, input) && !is_in_place {
                    return Err(format!("result {n} shares memory with operand {i}"));
                }
            }
            if in_absorbed(output) {
                return Err(format!("result {n} shares memory with an operand of an absorbed kernel"));
            }
            if self.outputs[..n].iter().any(|other| meet(output, other)) {
                return Err(format!("result {n} shares memory with another result"));
            }
        }
        if let Some(state) = self.op.mutated_inputs().find(|&i| in_absorbed(&self.inputs[i])) {
            return Err(format!("state {state} shares memory with an operand of an absorbed kernel"));
        }
        let scratch = self.workspace.as_ref().map(|bytes| Operand {
            memory: OperandMemory::Arena { temp: usize::MAX, offset: bytes.start },
            layout: Layout::contiguous([bytes.len()].into()),
            dtype: DType::U8,
        });
        let in_scratch = |operand: &Operand| scratch.as_ref().is_some_and(|scratch| meet(scratch, operand));
        if self.reads().into_iter().chain(&self.outputs).any(in_scratch) {
            return Err("the scratch shares memory with an operand".into());
        }
        Ok(())
    }
}
