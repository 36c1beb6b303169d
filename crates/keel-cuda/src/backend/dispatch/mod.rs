//! From the operations of the array runtime to kernel launches, by family.

mod absorb;
mod attention;
mod batch;
mod create;
mod custom;
mod elementwise;
mod exchange;
mod fast;
mod indexing;
mod layout;
mod linear;
mod matmul;
mod reduce;
mod sample;
mod sequence;
mod support;

use super::Mode;
use super::call::{COUNTERS, Call, Geometry};
use super::fault::Wrong;
use super::operand::{Bound, BoundKernel};
pub(super) use absorb::absorbs;
use keel_array::{ArrayError, Kernel, KernelGroup, Op};
pub(super) use linear::{narrows, rounds_weight};
pub(super) use support::supports;

/// Blocks that fill a device: one for each multiprocessor of an H100 or H200. The number is the same for other devices:
/// a plan has no device, and the cuts that follow from the number order sums.
const BLOCKS_WANTED: usize = 132;

/// Puts a kernel's launches on the stream.
fn run(call: &Call<'_>) -> Result<(), ArrayError> {
    if call.outputs.iter().all(|y| y.len() == 0) && !call.kernel.op.commits_open_rows() {
        return Ok(());
    }
    match &call.kernel.op {
        Op::Fill(_) | Op::Arange { .. } | Op::Random { .. } => create::run(call),
        Op::Copy | Op::Concatenate { .. } | Op::SliceUpdate { .. } => layout::run(call),
        Op::Binary(_) | Op::Fused(_) if !call.kernel.absorbed.is_empty() => linear::biased_linear(call),
        Op::Cast | Op::Unary(_) | Op::Binary(_) | Op::Where | Op::Fused(_) => elementwise::run(call),
        Op::Reduce(_)
        | Op::ArgReduce { .. }
        | Op::Softmax
        | Op::CumSum { .. }
        | Op::Sort { .. }
        | Op::TopK { .. }
        | Op::LayerNorm { .. } => reduce::run(call),
        Op::Sample => sample::run(call),
        Op::Take | Op::TakeAlong | Op::Embedding { .. } => indexing::run(call),
        Op::SwiGlu if call.producer(0).is_some() => linear::gated_linear(call),
        Op::RmsNorm { .. }
        | Op::AddRmsNorm { .. }
        | Op::GatedRmsNorm { .. }
        | Op::Rope(_)
        | Op::NormRope { .. }
        | Op::RotatePairs
        | Op::SwiGlu
        | Op::SigmoidGate => fast::run(call),
        Op::Matmul
        | Op::Linear { .. }
        | Op::GatherLinear { .. }
        | Op::RouteTopK { .. }
        | Op::CombineExperts { .. } => matmul::run(call),
        Op::CausalConv(_) | Op::GatedDelta(_) | Op::PagedAttention(_) => sequence::run(call),
        Op::Custom(kernel) => custom::run(kernel, call),
        Op::Send { .. }
        | Op::Receive { .. }
        | Op::AllReduce { .. }
        | Op::AllGather { .. }
        | Op::ReduceScatter { .. } => exchange::run(call),
        Op::View(_) => unreachable!("programs turn views into strides"),
    }
}

/// See `Programs::group_of`.
pub(super) fn group_of(kernels: &[Kernel], mode: Mode) -> Option<KernelGroup> {
    if let Some(len) = linear::mixture::group_len(kernels, mode) {
        return Some(KernelGroup { name: linear::mixture::NAME, len });
    }
    match kernels {
        [product, conv, ..] if sequence::is_convolved(product, conv, mode) => {
            Some(KernelGroup { name: sequence::CONVOLVED, len: 2 })
        }
        _ => None,
    }
}

/// Puts the launches of a group of kernels on the stream, and notes the memory that they write.
pub(super) fn run_group(name: Option<&str>, calls: &[Call<'_>]) -> Result<(), ArrayError> {
    match (name, calls) {
        (Some(linear::mixture::NAME), _) => linear::mixture::run(calls),
        (Some(sequence::CONVOLVED), [product, conv]) => sequence::run_convolved(product, conv),
        (None, [call]) => {
            run(call)?;
            call.note_written();
            Ok(())
        }
        _ => unreachable!("`group_of` names no group {name:?} of {} kernels", calls.len()),
    }
}

/// Scratch of a kernel.
pub(super) fn workspace_bytes(kernel: &Kernel, mode: Mode) -> usize {
    match &kernel.op {
        Op::Sort { .. } => reduce::workspace_bytes(kernel),
        Op::Sample => sample::workspace_bytes(kernel),
        Op::AllReduce { .. } | Op::ReduceScatter { .. } => exchange::workspace_bytes(kernel, mode),
        Op::Linear { .. } | Op::GatherLinear { .. } => matmul::workspace_bytes(kernel, mode),
        // The kernel after a product may have absorbed it.
        Op::SwiGlu | Op::Binary(_) | Op::Fused(_) => {
            kernel.absorbed.first().map_or(0, |product| matmul::workspace_bytes(product, mode))
        }
        Op::CausalConv(_) | Op::GatedDelta(_) | Op::PagedAttention(_) => {
            sequence::workspace_bytes(kernel, mode)
        }
        _ => 0,
    }
}

/// `Wrong::what` of an expert that does not exist. No other kernel reports this number.
const WRONG_EXPERT: u32 = 1;

/// The error for the wrong data that a kernel has reported, in the name of the operation that reads the data.
pub(super) fn fault(kernel: &Kernel, Wrong { what, number, bound, .. }: Wrong) -> ArrayError {
    let reader = match what {
        WRONG_EXPERT => product_with_experts(kernel),
        _ => kernel,
    };
    let reason = describe_fault(&kernel.op, what, number, bound);
    ArrayError::Kernel { op: reader.op.name().into(), reason }
}

/// The product that reads the chosen experts: the kernel itself, or one that it has absorbed.
fn product_with_experts(kernel: &Kernel) -> &Kernel {
    let product = kernel.absorbed.iter().find(|absorbed| matches!(absorbed.op, Op::GatherLinear { .. }));
    product.unwrap_or(kernel)
}

fn describe_fault(op: &Op, what: u32, number: u32, bound: u32) -> String {
    match (op, what) {
        (_, WRONG_EXPERT) => format!("expert {number} of a stack of {bound}"),
        (Op::CausalConv(_) | Op::GatedDelta(_) | Op::PagedAttention(_), _) => {
            batch::describe_fault(what, number, bound)
        }
        (Op::RotatePairs, _) => format!("a pair names column {number} of {bound}"),
        // An index that is negative as an i32 is out of every range.
        _ if number > i32::MAX as u32 => {
            format!("index {} is out of range for {bound} entries", number as i32)
        }
        _ => format!("index {number} is out of range for {bound} entries"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keel_array::{Compute, DType, WeightFormat, WeightSpec};

    fn kernel(op: Op, absorbed: Vec<Kernel>) -> Kernel {
        let (inputs, outputs) = (Vec::new(), Vec::new());
        Kernel { op, inputs, outputs, workspace: None, absorbed, regime: None }
    }

    #[test]
    fn a_wrong_expert_is_reported_in_the_name_of_the_product_that_was_absorbed() {
        let format = WeightFormat::Affine { bits: 4, group_size: 64, scale_dtype: DType::BF16 };
        let weight = WeightSpec { experts: 5, rows: 128, cols: 64, format, compute: Compute::Auto };
        let gathered = || kernel(Op::GatherLinear { weight }, Vec::new());
        let shared = || kernel(Op::Linear { weight, residual: false }, Vec::new());
        let combined = Op::CombineExperts { shared: true, residual: false };
        let text =
            |kernel: Kernel, what| fault(&kernel, Wrong { kernel: 0, what, number: 9, bound: 5 }).to_string();
        for reader in [
            gathered(),
            kernel(Op::SwiGlu, vec![gathered()]),
            kernel(combined.clone(), vec![gathered(), shared()]),
            kernel(combined, vec![shared(), gathered()]),
        ] {
            assert_eq!(text(reader, WRONG_EXPERT), "gather_linear: expert 9 of a stack of 5");
        }
        assert_eq!(text(kernel(Op::RotatePairs, Vec::new()), 0), "rotate_pairs: a pair names column 9 of 5");
        assert_eq!(text(kernel(Op::Take, Vec::new()), 0), "take: index 9 is out of range for 5 entries");
    }
}
