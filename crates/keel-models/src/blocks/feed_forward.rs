//! The second half of a block: a gated layer, or a mixture of experts.

use std::ops::Range;

use keel_array::{Array, DType, PairRotation, Peers, Result, Routing, SharedExpert, Weight};

use crate::loading::{Projection, RowParallel, columns_of, input};
use crate::split::sums::{SumOrder, Sums, add_up, nothing, of_their_device};

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
    pub down: RowParallel,
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
        self.down.apply(&self.inner(x)?, residual)
    }
}

/// A router and its experts.
#[derive(Debug)]
pub struct MixtureOfExperts {
    /// Router rows `[E]`, then the gate row of a shared expert, also where another device has that expert.
    pub router: Projection,
    /// Rotation of the input of `gate_up`, computed once for all experts.
    pub gate_up_rotation: Option<PairRotation>,
    /// `[E, 2F, hidden]`, gate rows then up rows.
    pub gate_up: Weight,
    /// Rotation of the input of `down`.
    pub down_rotation: Option<PairRotation>,
    /// `[E, hidden, F]`, in the parts of F whose products are added.
    pub down: Vec<Weight>,
    /// An expert for every token, weighted by its gate.
    pub shared: Option<GatedLayer>,
    /// Another device holds that expert.
    pub shared_elsewhere: bool,
    /// The experts that this device holds, if others hold the rest.
    pub own: Option<Range<usize>>,
    /// Experts per token.
    pub chosen: usize,
    /// Divide the chosen probabilities by their sum.
    pub normalise: bool,
    /// How the shares of the devices are added.
    pub sums: Sums,
}

/// The chosen experts as numbers of this device's stack.
struct OwnChoices {
    /// The chosen experts, u32 `[T, k]`. An expert of another device is replaced by the nearest one of this stack: its
    /// first or its last.
    held: Array,
    /// Whether this device holds the chosen expert, bool `[T, k]`.
    is_own: Array,
}

impl MixtureOfExperts {
    fn apply(&self, x: &Array, residual: &Array) -> Result<Array> {
        match self.sums.order {
            SumOrder::ByDevice => self.sum_by_device(x, residual),
            SumOrder::Fixed => self.sum_in_order(x, residual),
        }
    }

    /// The outputs of a device's experts, weighted and added, and then the sums of the devices. A choice of an expert
    /// that another device holds has a weight of 0: the sum over the devices is that of all choices.
    fn sum_by_device(&self, x: &Array, residual: &Array) -> Result<Array> {
        let routed = self.router.apply(x)?;
        let routing = routed[0].route_top_k(self.chosen, self.normalise)?;
        let Routing { weights, experts } = match &self.own {
            Some(own) => {
                let OwnChoices { held, is_own } = own_choices(&routing.experts, own)?;
                let none = Array::zeros(held.runtime(), held.shape().clone(), DType::F32)?;
                Routing { weights: is_own.select(&routing.weights, &none)?, experts: held }
            }
            None => routing,
        };
        let [down] = &self.down[..] else { unreachable!("columns have parts in the fixed order alone") };
        let outputs = self.inner(x, &experts)?.gather_linear(down, &experts)?;
        let start = self.sums.start(residual);
        let share = match &self.shared {
            None => outputs.combine_experts(&weights, start, None)?,
            Some(shared) => {
                let always = shared.down.share(&shared.inner(x)?, None)?;
                let shared = SharedExpert { output: &always, gate: &routed[1] };
                outputs.combine_experts(&weights, start, Some(shared))?
            }
        };
        self.sums.by_device(share)
    }

    /// In the fixed order: `(sum over the parts of the chosen experts + the shared expert) + residual`. Devices that
    /// hold experts whole hand the outputs of each choice to all before they are weighted and added.
    fn sum_in_order(&self, x: &Array, residual: &Array) -> Result<Array> {
        let routed = self.router.apply(x)?;
        let Routing { weights, experts } = routed[0].route_top_k(self.chosen, self.normalise)?;
        let own = self.own.as_ref().map(|own| own_choices(&experts, own)).transpose()?;
        let elsewhere = own.as_ref().zip(self.sums.share.peers());
        let held = own.as_ref().map_or(&experts, |own| &own.held);
        let mut parts = Vec::with_capacity(self.down.len());
        let inner = self.inner(x, held)?;
        for (columns, down) in columns_of(&inner, &self.down, 1)?.iter().zip(&self.down) {
            let mut outputs = columns.gather_linear(down, held)?;
            if let Some((OwnChoices { is_own, .. }, peers)) = elsewhere {
                let is_own = is_own.reshape([is_own.shape()[0], is_own.shape()[1], 1])?;
                outputs = of_their_device(&is_own, &outputs, peers)?;
            }
            parts.push(outputs.combine_experts(&weights, None, None)?);
        }
        let mut sum = match elsewhere {
            Some(_) => add_up(&parts)?,
            None => self.sums.in_order(&parts)?,
        };
        if let Some(shared) = self.shared_in_order(x, &routed, elsewhere.map(|(_, peers)| peers))? {
            sum = sum.add(&shared)?;
        }
        sum.add(residual)
    }

    /// The shared expert's output, weighted. Where experts are whole, one device of these has it, and hands it to all.
    fn shared_in_order(&self, x: &Array, routed: &[Array], peers: Option<Peers>) -> Result<Option<Array>> {
        let own = match &self.shared {
            Some(shared) => {
                let output = shared.down.in_order(&shared.inner(x)?)?;
                Some(output.mul(&routed[1].sigmoid()?)?)
            }
            None if self.shared_elsewhere => Some(nothing(x)?.broadcast_to(x.shape().clone())?),
            None => None,
        };
        let Some((own, peers)) = own.as_ref().zip(peers) else { return Ok(own) };
        Ok(Some(own.all_reduce(peers)?))
    }

    /// The input of `down`, f32 `[T, k, F]`.
    fn inner(&self, x: &Array, experts: &Array) -> Result<Array> {
        let inner = input(x, &self.gate_up_rotation)?.gather_linear(&self.gate_up, experts)?.swiglu()?;
        input(&inner, &self.down_rotation)
    }
}

fn own_choices(experts: &Array, own: &Range<usize>) -> Result<OwnChoices> {
    let number = |n: usize| Array::full(experts.runtime(), [1], DType::I32, n as f32);
    let at = experts.cast(DType::I32)?.sub(&number(own.start)?)?;
    let held = at.maximum(&number(0)?)?.minimum(&number(own.len() - 1)?)?;
    Ok(OwnChoices { is_own: at.equal(&held)?, held: held.cast(DType::U32)? })
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
