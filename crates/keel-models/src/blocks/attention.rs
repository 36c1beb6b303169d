//! Full attention with a gate on its output, as in Qwen3.5 and Qwen3-Next.

use keel_array::{Array, AttentionSpec, KvPool, Real, Result, RopeSpec, Weight};

use super::{RmsNorm, StepContext};
use crate::loading::Projection;

/// `o_proj(attention(norm_rope(q), norm_rope(k), v) * sigmoid(gate))`.
#[derive(Debug)]
pub struct GatedAttention {
    /// Query and gate (per head: query, then gate), key, value.
    pub projection: Projection,
    /// Norm of each query head.
    pub q_norm: RmsNorm,
    /// Norm of each key head.
    pub k_norm: RmsNorm,
    /// Output projection.
    pub output: Weight,
    /// `H`.
    pub heads: usize,
    /// `KV`.
    pub kv_heads: usize,
    /// `D`.
    pub head_dim: usize,
    /// Rotation of queries and keys.
    pub rope: RopeSpec,
}

impl GatedAttention {
    /// `residual + attention(x)` for x `[T, hidden]`, already normed.
    ///
    /// # Errors
    /// If the operands do not fit.
    pub fn apply(&self, x: &Array, residual: &Array, pool: &KvPool, step: &StepContext) -> Result<Array> {
        let (tokens, d) = (x.shape()[0], self.head_dim);
        let parts = self.projection.apply(x)?;
        let query_gate = parts[0].reshape([tokens, self.heads, 2 * d])?;
        let query = query_gate.slice_axis(-1, 0, d)?;
        let gate = query_gate.slice_axis(-1, d, 2 * d)?;
        let turn = |x: &Array, norm: &RmsNorm| {
            x.norm_rope(&step.positions, &step.frequencies, &norm.scale, self.rope.clone(), norm.eps)
        };
        let query = turn(&query, &self.q_norm)?;
        let key = turn(&parts[1].reshape([tokens, self.kv_heads, d])?, &self.k_norm)?;
        let value = parts[2].reshape([tokens, self.kv_heads, d])?;
        let spec =
            AttentionSpec { scale: Real::from((d as f32).powf(-0.5)), window: None, regime: step.regime };
        let mixed = query.paged_attention(&key, &value, pool, &step.batch, spec)?;
        let gated = mixed.sigmoid_gate(&gate)?.reshape([tokens, self.heads * d])?;
        gated.linear_add(&self.output, residual)
    }
}
