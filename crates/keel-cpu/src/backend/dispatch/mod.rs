//! Maps the operations of the array runtime to kernel calls, by family.

mod batch;
mod create;
mod custom;
mod elementwise;
mod exchange;
mod fast;
mod indexing;
mod layout;
mod linear;
mod reduce;
mod sequence;

use super::group::CpuGroup;
use super::operand::Bound;
use crate::isa::Isa;
use crate::kernels::generic::scalar::Plain;
use crate::pool::Worker;
use crate::shared_slice::SharedMut;
use keel_array::{ArrayError, Group, Kernel, Op};

/// A kernel with its memory, as every worker sees it.
pub(super) struct Call<'a> {
    pub kernel: &'a Kernel,
    pub inputs: &'a [Bound<'a>],
    pub outputs: &'a [Bound<'a>],
    /// The bytes that [`workspace_bytes`] asked for.
    pub scratch: SharedMut<'a, u8>,
    pub isa: Isa,
    /// The backend's group, if it is in one.
    pub group: Option<&'a CpuGroup>,
}

impl<'a> Call<'a> {
    /// The scratch as values of another type.
    fn scratch<T: Plain>(&self) -> SharedMut<'a, T> {
        let start = self.scratch.as_ptr().cast::<T>();
        assert!(start.is_aligned(), "the arena aligns what is placed in it");
        // SAFETY: aligned, within the scratch, and any bits are a T; parts are lent under the same promise.
        unsafe { SharedMut::from_raw(start, self.scratch.len() / size_of::<T>()) }
    }

    /// The error of this kernel.
    fn error(&self, reason: String) -> ArrayError {
        ArrayError::Kernel { op: self.kernel.op.name().into(), reason }
    }

    /// Copies input `from` to output `to` and waits for the other workers. Does nothing if both are the same memory.
    fn copy_input_to_output(&self, from: usize, to: usize, worker: &Worker<'_>) {
        let (x, y) = (&self.inputs[from], &self.outputs[to]);
        if x.starts_at(y) {
            return;
        }
        let (x, y) = (x.values::<f32>(), y.shared::<f32>());
        let share = worker.split(x.len(), 64);
        // SAFETY: the workers' shares do not overlap.
        unsafe { y.range(share.clone()) }.copy_from_slice(&x[share]);
        worker.barrier();
    }
}

/// Does this worker's share of a kernel. The caller places a barrier after it.
pub(super) fn run(call: &Call<'_>, worker: &Worker<'_>) -> Result<(), ArrayError> {
    match &call.kernel.op {
        Op::Fill(_) | Op::Arange { .. } | Op::Random { .. } => create::run(call, worker),
        Op::Copy | Op::Concatenate { .. } | Op::SliceUpdate { .. } => layout::run(call, worker),
        Op::Cast | Op::Unary(_) | Op::Binary(_) | Op::Where | Op::Fused(_) => elementwise::run(call, worker),
        Op::Reduce(_)
        | Op::ArgReduce { .. }
        | Op::Softmax
        | Op::CumSum { .. }
        | Op::Sort { .. }
        | Op::TopK { .. }
        | Op::Sample
        | Op::LayerNorm { .. } => reduce::run(call, worker),
        Op::Take | Op::TakeAlong | Op::Embedding { .. } => return indexing::run(call, worker),
        Op::RmsNorm { .. }
        | Op::AddRmsNorm { .. }
        | Op::GatedRmsNorm { .. }
        | Op::Rope(_)
        | Op::NormRope { .. }
        | Op::RotatePairs
        | Op::SwiGlu
        | Op::SigmoidGate => return fast::run(call, worker),
        Op::Matmul
        | Op::Linear { .. }
        | Op::GatherLinear { .. }
        | Op::RouteTopK { .. }
        | Op::CombineExperts { .. } => return linear::run(call, worker),
        Op::CausalConv(_) | Op::GatedDelta(_) | Op::PagedAttention(_) => return sequence::run(call, worker),
        Op::Send { .. }
        | Op::Receive { .. }
        | Op::AllReduce { .. }
        | Op::AllGather { .. }
        | Op::ReduceScatter { .. } => return exchange::run(call, worker),
        Op::Custom(kernel) => return custom::run(kernel, call, worker),
        Op::View(_) => unreachable!("programs turn views into strides"),
    }
    Ok(())
}

/// Refuses operations that no kernel of this backend runs. All others take any shape that their builder allows.
pub(super) fn supports(kernel: &Kernel, group: Option<&CpuGroup>) -> Result<(), String> {
    kernel.op.check_exchange(group.map(|group| group as &dyn Group))?;
    match &kernel.op {
        Op::PagedAttention(_) => sequence::supports_heads(kernel.inputs[0].layout.shape[2]),
        Op::Custom(custom) if !custom.has_cpu_body() => {
            Err("has a body for CUDA alone; give it one for the CPU with CustomKernel::new".into())
        }
        Op::Fill(_) | Op::Arange { .. } | Op::Random { .. } => Ok(()),
        Op::View(_) | Op::Copy | Op::Concatenate { .. } | Op::SliceUpdate { .. } => Ok(()),
        Op::Cast | Op::Unary(_) | Op::Binary(_) | Op::Where | Op::Fused(_) => Ok(()),
        Op::Reduce(_) | Op::ArgReduce { .. } | Op::Softmax | Op::CumSum { .. } => Ok(()),
        Op::Sort { .. } | Op::TopK { .. } | Op::Sample => Ok(()),
        Op::Take | Op::TakeAlong | Op::Embedding { .. } => Ok(()),
        Op::RmsNorm { .. } | Op::AddRmsNorm { .. } | Op::GatedRmsNorm { .. } | Op::LayerNorm { .. } => Ok(()),
        Op::Rope(rope) | Op::NormRope { rope, .. } => fast::supports_rotation(rope),
        Op::RotatePairs | Op::SwiGlu | Op::SigmoidGate => Ok(()),
        Op::Matmul | Op::Linear { .. } | Op::GatherLinear { .. } => Ok(()),
        Op::RouteTopK { .. } | Op::CombineExperts { .. } => Ok(()),
        Op::CausalConv(_) | Op::GatedDelta(_) | Op::Custom(_) => Ok(()),
        // `check_exchange` has compared their peers with the group.
        Op::Send { .. } | Op::Receive { .. } => Ok(()),
        Op::AllReduce { .. } | Op::AllGather { .. } | Op::ReduceScatter { .. } => Ok(()),
    }
}

/// Bytes of scratch that a kernel needs.
pub(super) fn workspace_bytes(kernel: &Kernel, workers: usize, isa: Isa) -> usize {
    match &kernel.op {
        Op::Linear { .. } | Op::GatherLinear { .. } => linear::workspace_bytes(kernel, workers, isa),
        Op::CausalConv(_) | Op::GatedDelta(_) | Op::PagedAttention(_) => {
            sequence::workspace_bytes(kernel, workers)
        }
        Op::ArgReduce { .. } | Op::Sample => reduce::workspace_bytes(kernel, workers),
        _ => 0,
    }
}
