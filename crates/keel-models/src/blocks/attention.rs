//! Softmax attention, over all earlier tokens or over a window; with a gate on its output (Qwen3.5) or without.

use keel_array::{Array, AttentionSpec, KvPool, KvRows, Real, Result, RopeSpec};

use super::{RmsNorm, StepContext};
use crate::loading::{Projection, RowParallel};

/// Rotation of queries and keys by their position.
#[derive(Clone, Debug)]
pub struct Rotation {
    /// Elements of a head that rotate. The sections are used only in steps with pictures.
    pub spec: RopeSpec,
    /// Inverse rotary frequencies, f32 `[rotary / 2]`.
    pub frequencies: Array,
    /// Frequencies of long sequences, if the model has a separate list for these.
    pub long_frequencies: Option<Array>,
    /// Factors on the elements of a rotated query, f32 `[D]`.
    pub query_scales: Option<Array>,
}

impl Rotation {
    /// Applies the norm of each head, if there is one, and the rotation to heads f32 `[T, heads, D]`.
    fn apply(&self, x: &Array, norm: Option<&RmsNorm>, step: &StepContext) -> Result<Array> {
        let own = &self.frequencies;
        // A text token has the same position on all axes.
        let (positions, spec) = match (&step.vision, self.spec.sections) {
            (Some(vision), Some(_)) => (&vision.positions, self.spec.clone()),
            _ => (&step.positions, RopeSpec { sections: None, interleaved: false, ..self.spec.clone() }),
        };
        let turn = |x: &Array, positions: &Array, frequencies: &Array| match norm {
            Some(norm) => x.norm_rope(positions, frequencies, &norm.scale, spec.clone(), norm.eps),
            None => x.rope(positions, frequencies, spec.clone()),
        };
        match (&self.long_frequencies, &step.rope_positions) {
            // One of the two positions of a row is 0, and position 0 rotates nothing, to the bit.
            (Some(long), Some(turns)) => turn(x, &turns.short, own)?.rope(&turns.long, long, spec.clone()),
            _ => turn(x, positions, own),
        }
    }
}

/// Norm of queries or of keys.
#[derive(Debug)]
pub enum HeadNorm {
    /// Of each head, with the same scale `[D]`.
    Each(RmsNorm),
    /// Of all heads together, with a scale `[heads D]`.
    Together(RmsNorm),
}

/// `o_proj(attention(rope(norm(q)), rope(norm(k)), v) [* sigmoid(gate)])`.
#[derive(Debug)]
pub struct Attention {
    /// Query (with a gate: per head query, then gate), key, value.
    pub projection: Projection,
    /// Whether the output has a gate.
    pub gated: bool,
    /// Norm of queries.
    pub q_norm: Option<HeadNorm>,
    /// Norm of keys.
    pub k_norm: Option<HeadNorm>,
    /// Output projection.
    pub output: RowParallel,
    /// `H`.
    pub heads: usize,
    /// `KV`.
    pub kv_heads: usize,
    /// `D`.
    pub head_dim: usize,
    /// Rotation of queries and keys; `None` for a layer without positions.
    pub rotation: Option<Rotation>,
    /// Factor on `q . k`.
    pub scale: f32,
    /// Tokens that a row sees, itself included; `None` for all before it.
    pub window: Option<usize>,
}

/// The output of the heads.
struct Mixed {
    /// f32 `[T, H, D]`.
    heads: Array,
    /// The gate on it.
    gate: Option<Array>,
}

/// Rotated keys, and values, each f32 `[T, KV, D]`.
struct NewRows {
    key: Array,
    value: Array,
}

impl Attention {
    /// `attention(x)` for x `[T, hidden]`, already normed; added to the residual, if there is one. Queries are
    /// multiplied by `growth`, f32 `[T, 1, 1]`, if there is one.
    ///
    /// # Errors
    /// If the operands do not fit.
    pub fn apply(
        &self,
        x: &Array,
        residual: Option<&Array>,
        growth: Option<&Array>,
        pool: &KvPool,
        step: &StepContext,
    ) -> Result<Array> {
        let Mixed { heads: mut mixed, gate } = self.mix(x, growth, pool, step)?;
        if let Some(gate) = gate {
            mixed = mixed.sigmoid_gate(&gate)?;
        }
        let mixed = mixed.reshape([x.shape()[0], self.heads * self.head_dim])?;
        self.output.apply(&mixed, residual)
    }

    /// Writes the keys and values of x `[T, hidden]`, already normed, for later rows. Evaluate the result, f32
    /// `[T, KV D]`, to run this; its values are undefined.
    ///
    /// # Errors
    /// If the operands do not fit.
    pub fn write_kv(&self, x: &Array, pool: &KvPool, step: &StepContext) -> Result<Array> {
        let NewRows { key, value } = self.new_rows(&self.projection.apply_from(1, x)?, step)?;
        let batch = if self.window.is_some() { &step.window_batch } else { &step.batch };
        let spec = AttentionSpec { scale: Real::from(self.scale), window: Some(0), regime: step.regime };
        // Nothing reads the queries.
        let seen = value.paged_attention(&key, &value, pool, batch, spec)?;
        seen.reshape([x.shape()[0], self.kv_heads * self.head_dim])
    }

    fn mix(&self, x: &Array, growth: Option<&Array>, pool: &KvPool, step: &StepContext) -> Result<Mixed> {
        let (tokens, d) = (x.shape()[0], self.head_dim);
        let parts = self.projection.apply(x)?;
        let (query, gate) = if self.gated {
            let both = parts[0].reshape([tokens, self.heads, 2 * d])?;
            (both.slice_axis(-1, 0, d)?, Some(both.slice_axis(-1, d, 2 * d)?))
        } else {
            (parts[0].reshape([tokens, self.heads, d])?, None)
        };
        let mut query = self.turn(&query, self.q_norm.as_ref(), step)?;
        let scales = self.rotation.as_ref().and_then(|rotation| rotation.query_scales.as_ref());
        for factor in [scales, growth].into_iter().flatten() {
            query = query.mul(factor)?;
        }
        let NewRows { key, value } = self.new_rows(&parts[1..], step)?;
        let spec = AttentionSpec { scale: Real::from(self.scale), window: self.window, regime: step.regime };
        let batch = if self.window.is_some() { &step.window_batch } else { &step.batch };
        let until = step.vision.as_ref().and_then(|vision| vision.until.as_ref());
        let seen = match until {
            Some(until) => {
                query.attention_until(KvRows { keys: &key, values: &value }, pool, batch, until, spec)?
            }
            None => query.paged_attention(&key, &value, pool, batch, spec)?,
        };
        Ok(Mixed { heads: seen, gate })
    }

    fn new_rows(&self, parts: &[Array], step: &StepContext) -> Result<NewRows> {
        let heads = |part: &Array| part.reshape([part.shape()[0], self.kv_heads, self.head_dim]);
        let key = self.turn(&heads(&parts[0])?, self.k_norm.as_ref(), step)?;
        Ok(NewRows { key, value: heads(&parts[1])? })
    }

    /// Heads f32 `[T, heads, D]`, with norm and rotation if the model has them.
    fn turn(&self, x: &Array, norm: Option<&HeadNorm>, step: &StepContext) -> Result<Array> {
        let (x, norm) = match norm {
            Some(HeadNorm::Together(norm)) => {
                let together = x.reshape([x.shape()[0], x.shape()[1] * self.head_dim])?;
                (norm.apply(&together)?.reshape(x.shape().clone())?, None)
            }
            Some(HeadNorm::Each(norm)) => (x.clone(), Some(norm)),
            None => (x.clone(), None),
        };
        match (&self.rotation, norm) {
            (Some(rotation), norm) => rotation.apply(&x, norm, step),
            (None, Some(norm)) => norm.apply(&x),
            (None, None) => Ok(x),
        }
    }
}
