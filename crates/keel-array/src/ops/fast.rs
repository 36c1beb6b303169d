//! Fused operations that every transformer needs.

use serde::{Deserialize, Serialize};

use super::reduce::expect_float;
use super::{Op, Real};
use crate::error::{expect_dtype, expect_shape, wrong_shape};
use crate::{Array, ArrayError, ArraySpec, DType, Result, Shape};

/// A rotary embedding over the first `rotary` elements of each head, in half-split pairs `(i, i + rotary / 2)`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RopeSpec {
    /// Elements of a head that turn; even, at most the head size.
    pub rotary: usize,
    /// For positions in three rows (time, height, width): how many frequencies read each row. `None` for one row.
    pub sections: Option<[usize; 3]>,
    /// If true, frequency `i` reads row `i % 3` while that row has frequencies left. If false, each row has one run.
    pub interleaved: bool,
}

/// A scale for each column, followed by rounds in which columns turn in pairs:
///
/// `x[c] *= scales[c]`; in round `r`, for each pair `(a, b) = (pairs[r, 2 i], pairs[r, 2 i + 1])` with
/// `(cos, sin) = (cos_sin[r, 2 i], cos_sin[r, 2 i + 1])`: `(x[a], x[b]) = (x[a] cos + x[b] sin, x[b] cos - x[a] sin)`.
///
/// ParoQuant (Liang et al., 2025) puts one before each quantised layer. The pairs of a round share no column.
#[derive(Clone, Debug)]
pub struct PairRotation {
    /// f32 `[K]`.
    pub scales: Array,
    /// u32 `[R, K]`.
    pub pairs: Array,
    /// f32 `[R, K]`.
    pub cos_sin: Array,
}

/// The results of [`Array::add_rms_norm`].
#[derive(Clone, Debug)]
pub struct AddedNorm {
    /// The sum of both operands.
    pub sum: Array,
    /// The norm of the sum.
    pub norm: Array,
}

/// The experts of each token, from [`Array::route_top_k`].
#[derive(Clone, Debug)]
pub struct Routing {
    /// Their weights, f32 `[T, k]`.
    pub weights: Array,
    /// Their indices, u32 `[T, k]`.
    pub experts: Array,
}

/// An expert for every token, as [`Array::combine_experts`] adds it.
#[derive(Clone, Copy, Debug)]
pub struct SharedExpert<'a> {
    /// Its output, f32 `[T, N]`.
    pub output: &'a Array,
    /// Its weight before the sigmoid, f32 `[T, 1]`.
    pub gate: &'a Array,
}

impl Array {
    /// The rotation of each row of x f32 `[.., K]`; see [`PairRotation`]. An index of a column that does not exist is
    /// an error when the kernel runs.
    ///
    /// # Errors
    /// If shapes or types differ from this, or K is odd.
    pub fn rotate_pairs(&self, rotation: &PairRotation) -> Result<Array> {
        const OP: &str = "rotate_pairs";
        let PairRotation { scales, pairs, cos_sin } = rotation;
        expect_f32(OP, &[self, scales, cos_sin])?;
        super::indexing::expect_index(OP, pairs)?;
        let k = self.last_extent(OP)?;
        let rounds = pairs.shape().first().copied().unwrap_or(0);
        if !k.is_multiple_of(2) {
            return Err(ArrayError::Argument { op: OP, reason: format!("{k} columns are no pairs") });
        }
        expect_shape(OP, "scales", &[k], scales.shape())?;
        expect_shape(OP, "pairs", &[rounds, k], pairs.shape())?;
        expect_shape(OP, "cos_sin", &[rounds, k], cos_sin.shape())?;
        Array::build(Op::RotatePairs, &[self, scales, pairs, cos_sin], self.shape().clone(), DType::F32)
    }

    fn last_extent(&self, op: &'static str) -> Result<usize> {
        self.shape().last().copied().ok_or(ArrayError::Axis { op, axis: -1, shape: self.shape().clone() })
    }

    /// `x / sqrt(mean(x^2) + eps) * w` over the last axis; x f32 `[.., D]`, w f32 `[D]`.
    ///
    /// # Errors
    /// If shapes or types differ from this.
    pub fn rms_norm(&self, weight: &Array, eps: f32) -> Result<Array> {
        const OP: &str = "rms_norm";
        expect_f32(OP, &[self, weight])?;
        expect_shape(OP, "weight", &[self.last_extent(OP)?], weight.shape())?;
        Array::build(Op::RmsNorm { eps: Real::from(eps) }, &[self, weight], self.shape().clone(), DType::F32)
    }

    /// `s = self + residual` and the RMS norm of `s`.
    ///
    /// # Errors
    /// As [`Array::rms_norm`]; or if the residual has another shape.
    pub fn add_rms_norm(&self, residual: &Array, weight: &Array, eps: f32) -> Result<AddedNorm> {
        const OP: &str = "add_rms_norm";
        expect_f32(OP, &[self, residual, weight])?;
        expect_shape(OP, "residual", self.shape(), residual.shape())?;
        expect_shape(OP, "weight", &[self.last_extent(OP)?], weight.shape())?;
        let spec = ArraySpec::new(self.shape().clone(), DType::F32);
        let op = Op::AddRmsNorm { eps: Real::from(eps) };
        let mut outputs =
            Array::build_many(op, &[self, residual, weight], vec![spec.clone(), spec])?.into_iter();
        match (outputs.next(), outputs.next()) {
            (Some(sum), Some(norm)) => Ok(AddedNorm { sum, norm }),
            _ => unreachable!("add_rms_norm has two outputs"),
        }
    }

    /// `rms_norm(x) * w * silu(z)` over the last axis; x and z f32 of one shape `[.., D]`, w f32 `[D]`.
    ///
    /// # Errors
    /// If shapes or types differ from this.
    pub fn gated_rms_norm(&self, weight: &Array, z: &Array, eps: f32) -> Result<Array> {
        const OP: &str = "gated_rms_norm";
        expect_f32(OP, &[self, weight, z])?;
        expect_shape(OP, "z", self.shape(), z.shape())?;
        expect_shape(OP, "weight", &[self.last_extent(OP)?], weight.shape())?;
        let op = Op::GatedRmsNorm { eps: Real::from(eps) };
        Array::build(op, &[self, weight, z], self.shape().clone(), DType::F32)
    }

    /// `(x - mean) / sqrt(var + eps) * w + b` over the last axis.
    ///
    /// # Errors
    /// If x is not a float, or w or b are not `[D]` of the same type.
    pub fn layer_norm(&self, weight: &Array, bias: &Array, eps: f32) -> Result<Array> {
        const OP: &str = "layer_norm";
        expect_float(OP, self)?;
        let d = self.last_extent(OP)?;
        expect_shape(OP, "weight", &[d], weight.shape())?;
        expect_shape(OP, "bias", &[d], bias.shape())?;
        let (w, b) = (weight.cast(self.dtype())?, bias.cast(self.dtype())?);
        Array::build(
            Op::LayerNorm { eps: Real::from(eps) },
            &[self, &w, &b],
            self.shape().clone(),
            self.dtype(),
        )
    }

    /// Rotary embedding of x f32 `[T, H, D]` at positions i32 `[T]` (`[3, T]` with sections), with the inverse
    /// frequencies f32 `[rotary / 2]`.
    ///
    /// # Errors
    /// If shapes or types differ from this.
    pub fn rope(&self, positions: &Array, inverse_frequencies: &Array, spec: RopeSpec) -> Result<Array> {
        check_rope("rope", self, positions, inverse_frequencies, &spec)?;
        Array::build(
            Op::Rope(spec),
            &[self, positions, inverse_frequencies],
            self.shape().clone(),
            DType::F32,
        )
    }

    /// RMS norm of each head with weight f32 `[D]`, then the rotary embedding.
    ///
    /// # Errors
    /// As [`Array::rope`]; or if the weight is not `[D]`.
    pub fn norm_rope(
        &self,
        positions: &Array,
        inverse_frequencies: &Array,
        weight: &Array,
        spec: RopeSpec,
        eps: f32,
    ) -> Result<Array> {
        const OP: &str = "norm_rope";
        check_rope(OP, self, positions, inverse_frequencies, &spec)?;
        expect_f32(OP, &[weight])?;
        expect_shape(OP, "weight", &[self.last_extent(OP)?], weight.shape())?;
        let op = Op::NormRope { rope: spec, eps: Real::from(eps) };
        Array::build(op, &[self, positions, inverse_frequencies, weight], self.shape().clone(), DType::F32)
    }

    /// `silu(x[.., :F]) * x[.., F:]` for x f32 `[.., 2F]`.
    ///
    /// # Errors
    /// If the last extent is odd or x is not f32.
    pub fn swiglu(&self) -> Result<Array> {
        const OP: &str = "swiglu";
        expect_f32(OP, &[self])?;
        let wide = self.last_extent(OP)?;
        if !wide.is_multiple_of(2) {
            return Err(wrong_shape(OP, "x", "(.., 2F)", self.shape()));
        }
        let mut shape = self.shape().to_vec();
        shape[self.shape().rank() - 1] = wide / 2;
        Array::build(Op::SwiGlu, &[self], shape.into(), DType::F32)
    }

    /// `x * sigmoid(gate)`, both f32 of one shape.
    ///
    /// # Errors
    /// If shapes or types differ from this.
    pub fn sigmoid_gate(&self, gate: &Array) -> Result<Array> {
        const OP: &str = "sigmoid_gate";
        expect_f32(OP, &[self, gate])?;
        expect_shape(OP, "gate", self.shape(), gate.shape())?;
        Array::build(Op::SigmoidGate, &[self, gate], self.shape().clone(), DType::F32)
    }

    /// Router of a mixture of experts. This array holds the logits f32 `[T, E]`. The result holds the softmax
    /// probabilities of the `k` most probable experts, divided by their sum if `normalise`, and their indices. The most
    /// probable comes first; among equals the lower index.
    ///
    /// # Errors
    /// If the logits are not f32 `[T, E]` with `E >= k >= 1`.
    pub fn route_top_k(&self, k: usize, normalise: bool) -> Result<Routing> {
        const OP: &str = "route_top_k";
        expect_f32(OP, &[self])?;
        let &[tokens, experts] = &self.shape()[..] else {
            return Err(wrong_shape(OP, "logits", "(T, E)", self.shape()));
        };
        if k == 0 || k > experts {
            return Err(ArrayError::Argument {
                op: OP,
                reason: format!("{k} experts per token of {experts}"),
            });
        }
        let shape = Shape::from([tokens, k]);
        let specs = vec![ArraySpec::new(shape.clone(), DType::F32), ArraySpec::new(shape, DType::U32)];
        let mut outputs = Array::build_many(Op::RouteTopK { k, normalise }, &[self], specs)?.into_iter();
        match (outputs.next(), outputs.next()) {
            (Some(weights), Some(experts)) => Ok(Routing { weights, experts }),
            _ => unreachable!("route_top_k has two outputs"),
        }
    }

    /// Sum of the experts' outputs: `sum_j weights[t, j] self[t, j]`, with a residual `+ residual[t]`, and with a
    /// shared expert `+ sigmoid(gate[t]) output[t]`. This array is f32 `[T, J, N]`, weights `[T, J]`,
    /// residual `[T, N]`.
    ///
    /// # Errors
    /// If shapes or types differ from this.
    pub fn combine_experts(
        &self,
        weights: &Array,
        residual: Option<&Array>,
        shared: Option<SharedExpert<'_>>,
    ) -> Result<Array> {
        const OP: &str = "combine_experts";
        expect_f32(OP, &[self, weights])?;
        let &[tokens, choices, width] = &self.shape()[..] else {
            return Err(wrong_shape(OP, "y", "(T, J, N)", self.shape()));
        };
        expect_shape(OP, "weights", &[tokens, choices], weights.shape())?;
        let mut inputs = vec![self, weights];
        if let Some(SharedExpert { output, gate }) = shared {
            expect_f32(OP, &[output, gate])?;
            expect_shape(OP, "shared", &[tokens, width], output.shape())?;
            expect_shape(OP, "gate", &[tokens, 1], gate.shape())?;
            inputs.extend([output, gate]);
        }
        if let Some(residual) = residual {
            expect_f32(OP, &[residual])?;
            expect_shape(OP, "residual", &[tokens, width], residual.shape())?;
            inputs.push(residual);
        }
        let op = Op::CombineExperts { shared: shared.is_some(), residual: residual.is_some() };
        Array::build(op, &inputs, Shape::from([tokens, width]), DType::F32)
    }
}

/// `Ok` if all operands are f32.
pub(crate) fn expect_f32(op: &'static str, operands: &[&Array]) -> Result<()> {
    operands.iter().try_for_each(|x| expect_f32_in(op, "every operand", x))
}

/// `Ok` if x is f32; otherwise an error that calls it `operand`.
pub(crate) fn expect_f32_in(op: &'static str, operand: &'static str, x: &Array) -> Result<()> {
    expect_dtype(op, operand, x.dtype() == DType::F32, "f32", x.dtype())
}

fn check_rope(
    op: &'static str,
    x: &Array,
    positions: &Array,
    inverse: &Array,
    spec: &RopeSpec,
) -> Result<()> {
    expect_f32(op, &[x, inverse])?;
    let &[tokens, _, size] = &x.shape()[..] else {
        return Err(wrong_shape(op, "x", "(T, H, D)", x.shape()));
    };
    if !spec.rotary.is_multiple_of(2) || spec.rotary > size {
        return Err(ArrayError::Argument {
            op,
            reason: format!(
                "{} rotary elements: expected an even number of at most the head size {size}",
                spec.rotary
            ),
        });
    }
    expect_dtype(op, "positions", positions.dtype() == DType::I32, "i32", positions.dtype())?;
    match spec.sections {
        None => expect_shape(op, "positions", &[tokens], positions.shape())?,
        Some(sections) if sections.iter().sum::<usize>() == spec.rotary / 2 => {
            expect_shape(op, "positions", &[3, tokens], positions.shape())?;
        }
        Some(sections) => {
            let reason = format!("sections {sections:?} do not add up to {} frequencies", spec.rotary / 2);
            return Err(ArrayError::Argument { op, reason });
        }
    }
    expect_shape(op, "inverse frequencies", &[spec.rotary / 2], inverse.shape())
}
