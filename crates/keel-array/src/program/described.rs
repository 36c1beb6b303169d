//! A program as text: its kinds of launches, in the order of the first launch of each kind.

use super::{Kernel, Program};
use crate::DType;
use crate::ops::Op;

impl Program {
    /// One line for each kind of launch: how often it occurs, and its operations. A kernel is followed by the kernels
    /// that it has absorbed, in parentheses; a group by its kernels.
    pub fn lines(&self) -> Vec<String> {
        let mut counts: Vec<(usize, String)> = Vec::new();
        for group in &self.groups {
            let kernels: Vec<String> = self.kernels[group.kernels.clone()].iter().map(describe).collect();
            let kernels = kernels.join(" + ");
            let line = group.name.map_or(kernels.clone(), |name| format!("{name}: {kernels}"));
            match counts.iter_mut().find(|(_, known)| *known == line) {
                Some((count, _)) => *count += 1,
                None => counts.push((1, line)),
            }
        }
        counts.into_iter().map(|(count, line)| format!("{count:>5} x {line}")).collect()
    }
}

/// The operation, a weight's shape, whether the result takes 16 bits an element, and the absorbed kernels.
fn describe(kernel: &Kernel) -> String {
    let shape = match &kernel.op {
        Op::Linear { weight, .. } | Op::GatherLinear { weight } => {
            format!(" {}x{}", weight.rows, weight.cols)
        }
        _ => String::new(),
    };
    let is_narrow = kernel.outputs.first().is_some_and(|output| output.dtype == DType::F16);
    let width = if is_narrow && !shape.is_empty() { " to f16" } else { "" };
    let absorbed: Vec<String> = kernel.absorbed.iter().map(describe).collect();
    let absorbed = if absorbed.is_empty() { String::new() } else { format!(" ({})", absorbed.join(", ")) };
    format!("{}{shape}{width}{absorbed}", kernel.op.name())
}
