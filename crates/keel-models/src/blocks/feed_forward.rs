//! The second half of a block: a gated layer, or a mixture of experts.

use std::ops::Range;

use keel_array::{Array, DType, PairRotation, Result, Routing, SharedExpert, Weight};

use crate::loading::{Projection, input};

/// The function on the gate of a gated layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    #[default]
    Silu,
    /// GELU in its tanh form.
    GeluTanh,
}

/// `down(activation(gate(x)) * up(x))`.
#[derive(Debug)]
pub struct GatedLayer {
    /// Gate rows, then up rows. Two products if their formats differ.
    pub gate_up: Projection,
    /// Back to the residual stream.
    pub down: Projection,
    /// Function on the gate.
    pub activation: Activation,
}

impl GatedLayer {
    fn inner(&self, x: &Array) -> Result<Array> {
        match self.activation {
            Activation::Silu => self.gate_up.apply_wide(x)?.swiglu(),
            Activation::GeluTanh => {
                let parts = self.gate_up.apply(x)?;
                parts[0].gelu_tanh()?.mul(&parts[1])
            }
        }
    }

    fn apply(&self, x: &Array, residual: Option<&Array>) -> Result<Array> {
        let inner = self.inner(x)?;
        match residual {
            Some(residual) => self.down.apply_onto(&inner, residual),
            None => self.down.apply_wide(&inner),
        }
    }
}

/// A router and its experts.
#[derive(Debug)]
pub struct MixtureOfExperts {
    /// Router rows `[E]`, then, with a shared expert, its gate row.
    pub router: Projection,
    /// Rotation of the input of `gate_up`, computed once for all experts.
    pub gate_up_rotation: Option<PairRotation>,
    /// `[E, 2F, hidden]`, gate rows then up rows.
    pub gate_up: Weight,
    /// Rotation of the input of `down`.
    pub down_rotation: Option<PairRotation>,
    /// `[E, hidden, F]`.
    pub down: Weight,
    /// An expert for every token, weighted by its gate.
    pub shared: Option<GatedLayer>,
    /// The experts that this device holds, if others hold the rest.
    pub own: Option<Range<usize>>,
    /// Experts per token.
    pub chosen: usize,
    /// Divide the chosen probabilities by their sum.
    pub normalise: bool,
}

impl MixtureOfExperts {
    fn apply(&self, x: &Array, residual: &Array) -> Result<Array> {
        let routed = self.router.apply(x)?;
        let routing = routed[0].route_top_k(self.chosen, self.normalise)?;
        let Routing { weights, experts } = match &self.own {
            Some(own) => own_choices(&routing, own)?,
            None => routing,
        };
        let inner = input(x, &self.gate_up_rotation)?.gather_linear(&self.gate_up, &experts)?.swiglu()?;
        let outputs = input(&inner, &self.down_rotation)?.gather_linear(&self.down, &experts)?;
        match &self.shared {
            None => outputs.combine_experts(&weights, residual, None),
            Some(shared) => {
                let always = shared.apply(x, None)?;
                let shared = SharedExpert { output: &always, gate: &routed[1] };
                outputs.combine_experts(&weights, residual, Some(shared))
            }
        }
    }
}

/// The chosen experts as numbers of this device's stack, and their weights. In place of an expert that another device
/// holds stands the first or the last of this one, with a weight of 0: the sum over the devices is that of all choices.
fn own_choices(Routing { weights, experts }: &Routing, own: &Range<usize>) -> Result<Routing> {
    let number = |n: usize| Array::full(experts.runtime(), [1], DType::I32, n as f32);
    let at = experts.cast(DType::I32)?.sub(&number(own.start)?)?;
    let held = at.maximum(&number(0)?)?.minimum(&number(own.len() - 1)?)?;
    let none = Array::zeros(weights.runtime(), weights.shape().clone(), DType::F32)?;
    Ok(Routing { weights: at.equal(&held)?.select(weights, &none)?, experts: held.cast(DType::U32)? })
}

/// The second half of a block.
#[derive(Debug)]
pub enum FeedForward {
    /// One gated layer.
    Dense(GatedLayer),
    /// Experts.
    Experts(Box<MixtureOfExperts>),
}

impl FeedForward {
    /// `ff(x)` for x `[T, hidden]`, already normed; added to the residual, if there is one.
    ///
    /// # Errors
    /// If the operands do not fit.
    pub fn apply(&self, x: &Array, residual: Option<&Array>) -> Result<Array> {
        match (self, residual) {
            (FeedForward::Dense(layer), residual) => layer.apply(x, residual),
            (FeedForward::Experts(experts), Some(residual)) => experts.apply(x, residual),
            (FeedForward::Experts(_), None) => unreachable!("no model norms what its experts give"),
        }
    }
}
