//! The second half of a block: a gated layer, or a mixture of experts.

use keel_array::{Array, Result, Weight};

use crate::loading::Projection;

/// `down(silu(gate(x)) * up(x))`.
#[derive(Debug)]
pub struct SwiGluLayer {
    /// Gate rows, then up rows; two products where their formats differ.
    pub gate_up: Projection,
    /// Back to the residual stream.
    pub down: Weight,
}

impl SwiGluLayer {
    fn inner(&self, x: &Array) -> Result<Array> {
        self.gate_up.apply_wide(x)?.swiglu()
    }

    fn apply(&self, x: &Array, residual: &Array) -> Result<Array> {
        self.inner(x)?.linear_add(&self.down, residual)
    }
}

/// A router and its experts.
#[derive(Debug)]
pub struct MixtureOfExperts {
    /// Router rows `[E]`, then, with a shared expert, its gate row.
    pub router: Projection,
    /// `[E, 2F, hidden]`, gate rows then up rows.
    pub gate_up: Weight,
    /// `[E, hidden, F]`.
    pub down: Weight,
    /// An expert that every token passes, weighted by its gate.
    pub shared: Option<SwiGluLayer>,
    /// Experts per token.
    pub chosen: usize,
    /// Divide the chosen probabilities by their sum.
    pub normalise: bool,
}

impl MixtureOfExperts {
    fn apply(&self, x: &Array, residual: &Array) -> Result<Array> {
        let routed = self.router.apply(x)?;
        let (weights, experts) = routed[0].route_top_k(self.chosen, self.normalise)?;
        let inner = x.gather_linear(&self.gate_up, &experts)?.swiglu()?;
        let outputs = inner.gather_linear(&self.down, &experts)?;
        match &self.shared {
            None => outputs.combine_experts(&weights, residual, None),
            Some(shared) => {
                let always = shared.inner(x)?.linear(&shared.down)?;
                outputs.combine_experts(&weights, residual, Some((&always, &routed[1])))
            }
        }
    }
}

/// The second half of a block.
#[derive(Debug)]
pub enum FeedForward {
    /// One gated layer.
    Dense(SwiGluLayer),
    /// Experts.
    Experts(MixtureOfExperts),
}

impl FeedForward {
    /// `residual + ff(x)` for x `[T, hidden]`, already normed.
    ///
    /// # Errors
    /// If the operands do not fit.
    pub fn apply(&self, x: &Array, residual: &Array) -> Result<Array> {
        match self {
            FeedForward::Dense(layer) => layer.apply(x, residual),
            FeedForward::Experts(experts) => experts.apply(x, residual),
        }
    }
}
