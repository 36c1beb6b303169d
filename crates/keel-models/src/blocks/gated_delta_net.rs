//! Gated DeltaNet: a recurrent layer with a matrix state per head.

use keel_array::{Array, ConvWindow, DType, DeltaState, GatedDeltaSpec, Result};

use super::{RmsNorm, StepContext};
use crate::loading::{Projection, RowParallel};

/// `out_proj(gated_norm(gated_delta(conv(qkv), a, b), z))`.
#[derive(Debug)]
pub struct GatedDeltaNet {
    /// qkv, z, a, b; qkv in the order q heads, k heads, v heads.
    pub projection: Projection,
    /// Convolution f32 `[K, channels]`.
    pub conv: Array,
    /// f32 `[Hv]`.
    pub a_log: Array,
    /// f32 `[Hv]`.
    pub dt_bias: Array,
    /// Norm of each head's output, `[Dv]`.
    pub norm: RmsNorm,
    /// Output projection. If its columns have tiles, they hold the first value head of every key head first, then the
    /// second, and so on.
    pub output: RowParallel,
    /// `Hk`.
    pub key_heads: usize,
    /// `Hv`.
    pub value_heads: usize,
    /// `Dk`.
    pub key_dim: usize,
    /// `Dv`.
    pub value_dim: usize,
}

impl GatedDeltaNet {
    /// `residual + mix(x)` for x `[T, hidden]`, already normed.
    ///
    /// # Errors
    /// If the operands do not fit.
    pub fn apply(
        &self,
        x: &Array,
        residual: &Array,
        window: &ConvWindow,
        state: &DeltaState,
        step: &StepContext,
    ) -> Result<Array> {
        let tokens = x.shape()[0];
        let parts = self.projection.apply(x)?;
        let mixed = parts[0].causal_conv(&self.conv, window, &step.batch, step.log)?;
        let out = self.delta(&mixed, &parts[2], &parts[3], state, step)?;
        let z = parts[1].reshape([tokens, self.value_heads, self.value_dim])?;
        let mut normed = out.gated_rms_norm(&self.norm.scale, &z, self.norm.eps)?;
        if self.output.is_tiled() {
            let ratio = self.value_heads / self.key_heads;
            let by_key = normed.reshape([tokens, self.key_heads, ratio, self.value_dim])?;
            normed = by_key.transpose(&[0, 2, 1, 3])?;
        }
        self.output.apply(&normed.reshape([tokens, self.value_heads * self.value_dim])?, Some(residual))
    }

    /// Commits the accepted open rows in a step without rows of its own. Commits those of the window only if `window`
    /// is given. The result, f32 `[1, Hv, Dv]`, is undefined.
    ///
    /// # Errors
    /// If the operands do not fit.
    pub fn commit(
        &self,
        window: Option<&ConvWindow>,
        state: &DeltaState,
        step: &StepContext,
    ) -> Result<Array> {
        // A row that belongs to no sequence.
        let row = |width: usize| Array::full(self.conv.runtime(), [1, width], DType::F32, 0.0);
        let mixed = row(self.conv.shape()[1])?;
        let mixed = match window {
            Some(window) => mixed.causal_conv(&self.conv, window, &step.batch, step.log)?,
            None => mixed,
        };
        self.delta(&mixed, &row(self.value_heads)?, &row(self.value_heads)?, state, step)
    }

    fn delta(
        &self,
        qkv: &Array,
        a: &Array,
        b: &Array,
        state: &DeltaState,
        step: &StepContext,
    ) -> Result<Array> {
        let spec = GatedDeltaSpec {
            key_heads: self.key_heads,
            value_heads: self.value_heads,
            key_dim: self.key_dim,
            value_dim: self.value_dim,
            regime: step.regime,
            log: step.log,
        };
        qkv.gated_delta(a, b, &self.a_log, &self.dt_bias, state, &step.batch, spec)
    }
}
