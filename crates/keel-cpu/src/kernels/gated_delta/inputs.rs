//! Inputs of the gated delta rule, and the norms and gates before it.

use crate::kernels::rows::Rows;
use crate::simd::{Simd, lanes, sigmoid};

/// Added to the sum of squares of queries and keys.
const L2_EPS: f32 = 1e-6;

/// Sizes of the heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatedDeltaShape {
    /// Hk
    pub key_heads: usize,
    /// Hv, a multiple of Hk
    pub value_heads: usize,
    /// Dk
    pub key_size: usize,
    /// Dv
    pub value_size: usize,
}

impl GatedDeltaShape {
    /// Values of a row of q, k and v.
    pub fn qkv_len(&self) -> usize {
        2 * self.key_heads * self.key_size + self.value_heads * self.value_size
    }

    /// Values of a sequence's state.
    pub fn state_len(&self) -> usize {
        self.value_heads * self.key_size * self.value_size
    }

    /// Values of a record of the delta log: k `[Hk, Dk]`, u `[Hv, Dv]`, g `[Hv]`.
    pub fn record_len(&self) -> usize {
        self.key_heads * self.key_size + self.value_heads * (self.value_size + 1)
    }
}

/// Inputs of the rule for each row, in both regimes.
#[derive(Clone, Copy)]
pub struct GatedDeltaInputs<'a> {
    /// Sizes of the heads.
    pub shape: GatedDeltaShape,
    /// `[T, 2 Hk Dk + Hv Dv]`: queries, keys, values, after the convolution.
    pub qkv: Rows<'a>,
    /// `[T, Hv]`
    pub a: Rows<'a>,
    /// `[T, Hv]`
    pub b: Rows<'a>,
    /// `[Hv]`
    pub a_log: &'a [f32],
    /// `[Hv]`
    pub dt_bias: &'a [f32],
}

impl<'a> GatedDeltaInputs<'a> {
    pub(crate) fn check(&self, rows: usize) {
        let shape = &self.shape;
        assert!(shape.key_heads > 0 && shape.value_heads.is_multiple_of(shape.key_heads), "{shape:?}");
        assert_eq!(self.qkv.width(), shape.qkv_len());
        assert!(self.a.width() == shape.value_heads && self.b.width() == shape.value_heads);
        assert!(self.a_log.len() == shape.value_heads && self.dt_bias.len() == shape.value_heads);
        assert!(self.qkv.len() >= rows && self.a.len() >= rows && self.b.len() >= rows);
    }

    /// The key head that value head `head` reads.
    #[inline(always)]
    pub(crate) fn key_head(&self, head: usize) -> usize {
        head / (self.shape.value_heads / self.shape.key_heads)
    }

    /// `y = q / |q| * Dk^-0.5` of row `t`.
    #[inline(always)]
    pub(crate) fn query<S: Simd>(&self, s: S, t: usize, key_head: usize, y: &mut [f32]) {
        let size = self.shape.key_size;
        l2_norm(s, &self.qkv.row(t)[key_head * size..][..size], (size as f32).sqrt().recip(), y);
    }

    /// `y = k / |k|` of row `t`.
    #[inline(always)]
    pub(crate) fn key<S: Simd>(&self, s: S, t: usize, key_head: usize, y: &mut [f32]) {
        let size = self.shape.key_size;
        l2_norm(s, &self.qkv.row(t)[(self.shape.key_heads + key_head) * size..][..size], 1.0, y);
    }

    /// v of row `t`.
    #[inline(always)]
    pub(crate) fn value(&self, t: usize, head: usize) -> &'a [f32] {
        let start = 2 * self.shape.key_heads * self.shape.key_size;
        &self.qkv.row(t)[start + head * self.shape.value_size..][..self.shape.value_size]
    }

    /// q, k and v of row `t` that value head `head` reads, before the norms.
    #[inline(always)]
    pub(crate) fn parts(&self, t: usize, head: usize) -> [&'a [f32]; 3] {
        let (row, size, key_head) = (self.qkv.row(t), self.shape.key_size, self.key_head(head));
        let k = self.shape.key_heads + key_head;
        [&row[key_head * size..][..size], &row[k * size..][..size], self.value(t, head)]
    }

    /// `g = -e^A_log * softplus(a + dt_bias)`
    pub(crate) fn log_decay(&self, t: usize, head: usize) -> f32 {
        let x = self.a.row(t)[head] + self.dt_bias[head];
        // Above 20, softplus(x) equals x in f32.
        let softplus = if x > 20.0 { x } else { x.exp().ln_1p() };
        -self.a_log[head].exp() * softplus
    }

    /// `sigmoid(b)`
    #[inline(always)]
    pub(crate) fn beta<S: Simd>(&self, s: S, t: usize, head: usize) -> f32 {
        s.to_array(sigmoid(s, s.splat(self.b.row(t)[head])))[0]
    }
}

/// `y = x / sqrt(sum(x^2) + eps) * scale`
#[inline(always)]
fn l2_norm<S: Simd>(s: S, x: &[f32], scale: f32, y: &mut [f32]) {
    let factor = s.splat(scale / (s.dot(x, x) + L2_EPS).sqrt());
    lanes!(s, y, [x = x] => s.mul(x, factor));
}
