//! The parts of towers: layer norms, feed-forward layers, bidirectional attention.

use keel_array::{Array, AttentionSpec, Batch, DType, KvPool, KvRows, Real, Regime, Result, RopeSpec};

use super::config::TowerActivation;
use crate::loading::Projection;

/// `(x - mean) / sqrt(var + eps) * weight + bias`.
#[derive(Debug)]
pub struct LayerNorm {
    /// `[D]`
    pub weight: Array,
    /// `[D]`
    pub bias: Array,
    /// Added to the variance.
    pub eps: f32,
}

impl LayerNorm {
    /// The norm of each row.
    ///
    /// # Errors
    /// If x does not fit.
    pub fn apply(&self, x: &Array) -> Result<Array> {
        x.layer_norm(&self.weight, &self.bias, self.eps)
    }
}

/// `down(activation(up(x)))`.
#[derive(Debug)]
pub struct TwoLayers {
    /// To the inner width.
    pub up: Projection,
    /// Back.
    pub down: Projection,
    /// Between them.
    pub activation: TowerActivation,
}

impl TwoLayers {
    fn inner(&self, x: &Array) -> Result<Array> {
        let wide = self.up.apply_wide(x)?;
        match self.activation {
            TowerActivation::GeluTanh => wide.gelu_tanh(),
            TowerActivation::Gelu => wide.gelu(),
            TowerActivation::Silu => wide.silu(),
        }
    }

    /// The layers' output for each row.
    ///
    /// # Errors
    /// If x does not fit.
    pub fn apply(&self, x: &Array) -> Result<Array> {
        self.down.apply_wide(&self.inner(x)?)
    }

    fn apply_onto(&self, x: &Array, residual: &Array) -> Result<Array> {
        self.down.apply_onto(&self.inner(x)?, residual)
    }
}

/// Data that all blocks of a pass share.
pub(super) struct TowerPass<'a> {
    /// Keys and values of one layer. Every layer overwrites them.
    pub pool: &'a KvPool,
    /// The rows of the run as one sequence.
    pub batch: &'a Batch,
    /// For each row, the last row of the run.
    pub until: &'a Array,
    /// If positions are rotated.
    pub turn: Option<TowerRope<'a>>,
}

/// A rotation by positions.
#[derive(Clone, Copy)]
pub(super) struct TowerRope<'a> {
    /// Row and column of each patch, i32 `[3, N]`.
    pub positions: &'a Array,
    pub frequencies: &'a Array,
}

/// Attention among all rows of a run.
#[derive(Debug)]
pub struct TowerAttention {
    /// Query, key, value.
    pub projection: Projection,
    /// Output projection.
    pub output: Projection,
    /// `H`
    pub heads: usize,
    /// `D`
    pub head_dim: usize,
}

impl TowerAttention {
    /// The heads' size in pages: kernels need whole multiples. The added elements are zero and change no product.
    pub fn padded(head_dim: usize) -> usize {
        head_dim.next_multiple_of(AttentionSpec::HEAD_UNIT)
    }

    fn apply_onto(&self, x: &Array, residual: &Array, pass: &TowerPass<'_>) -> Result<Array> {
        let (rows, width) = (x.shape()[0], self.heads * self.head_dim);
        let wide = self.projection.apply_wide(x)?;
        let part = |i: usize| {
            wide.slice_axis(-1, i * width, (i + 1) * width)?.reshape([rows, self.heads, self.head_dim])
        };
        let turned = |heads: Array| match pass.turn {
            None => Ok(heads),
            Some(TowerRope { positions, frequencies }) => {
                let quarter = self.head_dim / 4;
                let spec = RopeSpec {
                    rotary: self.head_dim,
                    sections: Some([quarter, quarter, 0]),
                    interleaved: false,
                };
                heads.rope(positions, frequencies, spec)
            }
        };
        let (q, k) = (self.pad(turned(part(0)?)?)?, self.pad(turned(part(1)?)?)?);
        let v = self.pad(part(2)?)?;
        let scale = (self.head_dim as f64).powf(-0.5) as f32;
        let spec = AttentionSpec { scale: Real::from(scale), window: None, regime: Regime::Prefill };
        let seen =
            q.attention_until(KvRows { keys: &k, values: &v }, pass.pool, pass.batch, pass.until, spec)?;
        let seen = seen.slice_axis(-1, 0, self.head_dim)?.reshape([rows, width])?;
        self.output.apply_onto(&seen, residual)
    }

    fn pad(&self, heads: Array) -> Result<Array> {
        let missing = Self::padded(self.head_dim) - self.head_dim;
        if missing == 0 {
            return Ok(heads);
        }
        let shape = [heads.shape()[0], self.heads, missing];
        let zeros = Array::zeros(heads.runtime(), shape, DType::F32)?;
        Array::concatenate(&[&heads, &zeros], -1)
    }
}

/// One block.
#[derive(Debug)]
pub struct TowerBlock {
    /// Before attention.
    pub norm1: LayerNorm,
    /// First half.
    pub attention: TowerAttention,
    /// Before the second half.
    pub norm2: LayerNorm,
    /// Second half.
    pub mlp: TwoLayers,
}

impl TowerBlock {
    pub(super) fn apply(&self, x: &Array, pass: &TowerPass<'_>) -> Result<Array> {
        let x = self.attention.apply_onto(&self.norm1.apply(x)?, x, pass)?;
        self.mlp.apply_onto(&self.norm2.apply(&x)?, &x)
    }
}
