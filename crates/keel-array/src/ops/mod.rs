//! The operations, by family. Each builder checks shapes and types at once. Nothing runs before `eval`.

mod elementwise;
mod exchange;
mod fast;
mod indexing;
mod kv_format;
mod linear;
mod operands;
mod reduce;
mod sampling;
mod sequence;
mod views;

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::weight::WeightSpec;
use crate::{CustomKernel, DType};

pub use elementwise::{Binary, Fused, FusedStep, Source, Unary};
pub use exchange::{Group, Peers};
pub use fast::{AddedNorm, PairRotation, RopeSpec, Routing, SharedExpert};
pub use indexing::RandomKind;
pub use kv_format::KvFormat;
pub use reduce::{Reduction, Sorted};
pub use sequence::{
    AttentionSpec, Batch, ConvSpec, ConvWindow, DeltaState, GatedDeltaSpec, KvPool, KvRows, Regime, RowLog,
};

/// The distance of the positions of the prefill grid, in tokens. `keel-engine` begins chunks of prompts at these
/// positions, `keel-cache` keeps states there (its `PREFIX_BLOCK`), and the backends compute gated delta layers in
/// chunks of this length (their `CHUNK`).
pub const PREFILL_GRID: usize = 64;

/// An f32 attribute of an operation. It is part of a program's key, so it is compared and hashed by its bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Real(u32);

impl Real {
    /// The number.
    pub fn get(self) -> f32 {
        f32::from_bits(self.0)
    }
}

impl From<f32> for Real {
    fn from(x: f32) -> Real {
        Real(x.to_bits())
    }
}

impl std::fmt::Debug for Real {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.get().fmt(f)
    }
}

/// An operation with its attributes. Operands, in the order given here, are the kernel's inputs.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Op {
    /// Every element the same value; no input.
    Fill(Real),
    /// `start + step * i` along the only axis; no input.
    Arange {
        /// First value.
        start: Real,
        /// Difference between neighbours.
        step: Real,
    },
    /// Pseudo-random elements, which depend on seed and position only; no input.
    Random {
        /// Distribution.
        kind: RandomKind,
        /// Seed.
        seed: u64,
    },
    /// The same elements in another layout. Never reaches a backend: a program turns it into strides.
    View(View),
    /// The elements of a strided operand, row-major.
    Copy,
    /// Element-wise conversion to the output's dtype.
    Cast,
    /// Element-wise function of one operand.
    Unary(Unary),
    /// Element-wise function of two operands of equal (broadcast) shape.
    Binary(Binary),
    /// Condition (bool), value if true, value if false.
    Where,
    /// A chain of element-wise operations in one pass.
    Fused(Arc<Fused>),
    /// Operands one after the other along an axis.
    Concatenate {
        /// The axis.
        axis: usize,
    },
    /// Operand 0 with the block at `starts` replaced by operand 1; in place when operand 0 may be reused.
    SliceUpdate {
        /// First index of the block along each axis.
        starts: Vec<usize>,
    },
    /// Reduction of the last axis.
    Reduce(Reduction),
    /// Index (u32) of the largest, or smallest, element of the last axis; the first among equals.
    ArgReduce {
        /// Largest or smallest.
        largest: bool,
    },
    /// `exp(x - max) / sum` over the last axis.
    Softmax,
    /// Running sum along the last axis.
    CumSum {
        /// From the end.
        reverse: bool,
        /// Without the element itself.
        exclusive: bool,
    },
    /// Last axis sorted; outputs values and indices (u32). Stable; NaN goes last.
    Sort {
        /// Largest first.
        descending: bool,
    },
    /// The `k` largest of the last axis, largest first; the first among equals. Outputs values and indices (u32).
    TopK {
        /// How many.
        k: usize,
    },
    /// A token for each row of logits f32 `[R, V]`; draws f32 `[R, 5]`. See [`crate::sampling`].
    Sample,
    /// `[.., M, K] x [.., K, N]`, any strides.
    Matmul,
    /// Blocks of operand 0 along its first axis, chosen by operand 1 (u32 or i32).
    Take,
    /// Elements of operand 0's last axis chosen by operand 1 of the same leading shape.
    TakeAlong,
    /// `x / sqrt(mean(x^2) + eps) * w` over the last axis; x, w.
    RmsNorm {
        /// Added to the mean square.
        eps: Real,
    },
    /// x, residual, w: outputs `s = x + residual` and the norm of `s`.
    AddRmsNorm {
        /// Added to the mean square.
        eps: Real,
    },
    /// `rms_norm(x) * w * silu(z)` over the last axis; x, w, z.
    GatedRmsNorm {
        /// Added to the mean square.
        eps: Real,
    },
    /// `(x - mean) / sqrt(var + eps) * w + b` over the last axis; x, w, b.
    LayerNorm {
        /// Added to the variance.
        eps: Real,
    },
    /// Rotary embedding: x `[T, H, D]`, positions i32 `[T]` or `[3, T]`, inverse frequencies f32 `[rotary / 2]`.
    Rope(RopeSpec),
    /// Per-head RMS norm, then rotary embedding; the operands of `Rope` and the norm's weight `[D]`.
    NormRope {
        /// The rotation.
        rope: RopeSpec,
        /// Added to the mean square.
        eps: Real,
    },
    /// Columns scaled, then turned in pairs; see [`PairRotation`].
    RotatePairs,
    /// `silu(x[.., :F]) * x[.., F:]`.
    SwiGlu,
    /// `x * sigmoid(gate)`.
    SigmoidGate,
    /// `x W^T` with a packed weight; x `[T, K]`, weight, and optionally a residual `[T, N]` to add to.
    Linear {
        /// The weight.
        weight: WeightSpec,
        /// True if there is a third operand.
        residual: bool,
    },
    /// `y[t, j] = x[t or t*J+j] W[e[t, j]]^T`; x `[T, K]` or `[T, J, K]`, weight, experts u32 `[T, J]`.
    GatherLinear {
        /// The weight.
        weight: WeightSpec,
    },
    /// Rows of a packed weight as f32; ids, weight.
    Embedding {
        /// The weight.
        weight: WeightSpec,
    },
    /// Router of a mixture of experts: logits `[T, E]` to weights f32 `[T, k]` and experts u32 `[T, k]`.
    RouteTopK {
        /// Experts per token.
        k: usize,
        /// Divide the chosen probabilities by their sum.
        normalise: bool,
    },
    /// `sum_j w[t, j] y[t, j] [+ sigmoid(g[t]) * shared[t]] [+ residual[t]]`; y, w, then shared and g, then the
    /// residual.
    CombineExperts {
        /// True if `shared` and `g` are there.
        shared: bool,
        /// True if there is a residual.
        residual: bool,
    },
    /// Depthwise causal convolution with SiLU over a batch of sequences; see [`ConvSpec`].
    CausalConv(ConvSpec),
    /// Gated delta rule over a batch of sequences; see [`GatedDeltaSpec`].
    GatedDelta(GatedDeltaSpec),
    /// Writes new keys and values to their pages, then attends; see [`AttentionSpec`].
    PagedAttention(AttentionSpec),
    /// Hands operand 0 to another device of the group; output u32 `[1]`, the number of its elements.
    Send {
        /// The rank of the device that receives it.
        to: usize,
    },
    /// An array that another device of the group sends; no input.
    Receive {
        /// The rank of the device that sends it.
        from: usize,
    },
    /// The sum of the operands of several devices. [`Array::all_reduce`](crate::Array::all_reduce) has its order.
    AllReduce {
        /// The devices, this one among them.
        peers: Peers,
    },
    /// The operands of several devices along a new first axis.
    AllGather {
        /// The devices, this one among them.
        peers: Peers,
    },
    /// This device's rows of the sum of the operands of several devices. The first peer has the first rows.
    ReduceScatter {
        /// The devices, this one among them.
        peers: Peers,
    },
    /// A kernel of the user's. Its code cannot be sent to another process.
    #[serde(skip)]
    Custom(CustomKernel),
}

/// Layout changes that move no element.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum View {
    /// Same elements, row-major order kept, other extents (those of the output).
    Reshape,
    /// Axes in another order.
    Permute(Vec<usize>),
    /// A block that begins at these indices, with the output's extents.
    Slice(Vec<usize>),
    /// Stretched to the output's extents.
    Broadcast,
}

/// The strides of an input that a kernel can walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Strides {
    /// Any.
    Any,
    /// Even steps between rows; the last `n` axes gap-free.
    Rows(usize),
    /// Row-major, gap-free.
    Contiguous,
}

impl Op {
    /// The name in errors and traces.
    pub fn name(&self) -> &str {
        match self {
            Op::Fill(_) => "fill",
            Op::Arange { .. } => "arange",
            Op::Random { .. } => "random",
            Op::View(View::Reshape) => "reshape",
            Op::View(View::Permute(_)) => "transpose",
            Op::View(View::Slice(_)) => "slice",
            Op::View(View::Broadcast) => "broadcast_to",
            Op::Copy => "copy",
            Op::Cast => "cast",
            Op::Unary(op) => op.name(),
            Op::Binary(op) => op.name(),
            Op::Where => "where",
            Op::Fused(_) => "fused",
            Op::Concatenate { .. } => "concatenate",
            Op::SliceUpdate { .. } => "slice_update",
            Op::Reduce(r) => r.name(),
            Op::ArgReduce { largest: true } => "argmax",
            Op::ArgReduce { largest: false } => "argmin",
            Op::Softmax => "softmax",
            Op::CumSum { .. } => "cumsum",
            Op::Sort { .. } => "sort",
            Op::TopK { .. } => "top_k",
            Op::Sample => "sample",
            Op::Matmul => "matmul",
            Op::Take => "take",
            Op::TakeAlong => "take_along_axis",
            Op::RmsNorm { .. } => "rms_norm",
            Op::AddRmsNorm { .. } => "add_rms_norm",
            Op::GatedRmsNorm { .. } => "gated_rms_norm",
            Op::LayerNorm { .. } => "layer_norm",
            Op::Rope(_) => "rope",
            Op::NormRope { .. } => "norm_rope",
            Op::RotatePairs => "rotate_pairs",
            Op::SwiGlu => "swiglu",
            Op::SigmoidGate => "sigmoid_gate",
            Op::Linear { .. } => "linear",
            Op::GatherLinear { .. } => "gather_linear",
            Op::Embedding { .. } => "embedding",
            Op::RouteTopK { .. } => "route_top_k",
            Op::CombineExperts { .. } => "combine_experts",
            Op::CausalConv(_) => "causal_conv",
            Op::GatedDelta(_) => "gated_delta",
            Op::PagedAttention(_) => "paged_attention",
            Op::Send { .. } => "send",
            Op::Receive { .. } => "receive",
            Op::AllReduce { .. } => "all_reduce",
            Op::AllGather { .. } => "all_gather",
            Op::ReduceScatter { .. } => "reduce_scatter",
            Op::Custom(kernel) => kernel.name(),
        }
    }

    /// True for operations whose output element depends on the same element of each operand only.
    pub(crate) fn is_elementwise(&self) -> bool {
        matches!(self, Op::Cast | Op::Unary(_) | Op::Binary(_) | Op::Where | Op::Fused(_))
    }

    /// Inputs that the kernel writes to: a sequence's persistent state.
    pub fn mutated_inputs(&self) -> std::ops::Range<usize> {
        match self {
            Op::CausalConv(spec) => spec.state(),
            Op::GatedDelta(spec) => spec.state(),
            Op::PagedAttention(_) => AttentionSpec::STATE,
            _ => 0..0,
        }
    }

    /// Checks that no state shares memory with another of the `inputs`, which a user's graph can cause. `overlaps` says
    /// whether two inputs share memory.
    ///
    /// # Errors
    /// One sentence.
    pub fn check_states(&self, inputs: usize, overlaps: impl Fn(usize, usize) -> bool) -> Result<(), String> {
        for state in self.mutated_inputs() {
            if let Some(other) = (0..inputs).find(|&other| other != state && overlaps(state, other)) {
                return Err(format!("operands {state} and {other} share memory, but {state} is written"));
            }
        }
        Ok(())
    }

    /// Whether it commits rows that the step before has left open. So it has work even if its own step has no rows.
    pub fn commits_open_rows(&self) -> bool {
        match self {
            Op::CausalConv(spec) => spec.log != RowLog::None,
            Op::GatedDelta(spec) => spec.log != RowLog::None,
            _ => false,
        }
    }

    /// The regime of an operation with memory.
    pub(crate) fn regime(&self) -> Option<Regime> {
        match self {
            Op::GatedDelta(spec) => Some(spec.regime),
            Op::PagedAttention(spec) => Some(spec.regime),
            _ => None,
        }
    }

    /// Whether an output may take the memory of an input that has no other reader. The kernel then reads the input from
    /// the memory to which it writes the output.
    pub(crate) fn may_reuse(&self, input: usize, output: usize) -> bool {
        match self {
            Op::SliceUpdate { .. } => input == 0,
            Op::Linear { residual: true, .. } => input == 2,
            Op::AddRmsNorm { .. } => (input, output) == (1, 0),
            op => op.is_elementwise(),
        }
    }

    pub(crate) fn accepts(&self, input: usize) -> Strides {
        match (self, input) {
            (
                Op::Copy | Op::Cast | Op::Unary(_) | Op::Binary(_) | Op::Where | Op::Fused(_) | Op::Matmul,
                _,
            ) => Strides::Any,
            (Op::Concatenate { .. }, _) | (Op::SliceUpdate { .. }, 1) => Strides::Any,
            (Op::Custom(kernel), _) if kernel.takes_any_strides() => Strides::Any,
            (Op::RmsNorm { .. } | Op::RotatePairs, 0) | (Op::SwiGlu | Op::SigmoidGate, _) => Strides::Rows(1),
            (Op::GatedRmsNorm { .. }, 0 | 2) => Strides::Rows(2),
            (Op::Rope(_) | Op::NormRope { .. }, 0) => Strides::Rows(2),
            (Op::CausalConv(_), 0) | (Op::GatedDelta(_), 0..=2) => Strides::Rows(1),
            (Op::PagedAttention(_), 0..=2) => Strides::Rows(2),
            _ => Strides::Contiguous,
        }
    }
}

/// Bytes of `elements` of `dtype`; saturates.
pub(crate) fn bytes_of(dtype: DType, elements: usize) -> usize {
    elements.saturating_mul(dtype.size())
}
