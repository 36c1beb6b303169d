//! The second half of a layer: a gated product, or a mixture of gated products.

use super::{Reference, sigmoid, silu, softmax};

impl Reference<'_> {
    pub(super) fn mlp(&self, x: &[f64], prefix: &str) -> Vec<f64> {
        let Some(mixture) = &self.config.mixture else { return self.gated_product(x, prefix) };
        let mut out = vec![0.0; x.len()];
        if mixture.shared_width.is_some() {
            let gate = sigmoid(self.linear(x, &format!("{prefix}shared_expert_gate"))[0]);
            let shared = self.gated_product(x, &format!("{prefix}shared_expert."));
            out.iter_mut().zip(shared).for_each(|(out, y)| *out += gate * y);
        }
        let chances = softmax(&self.linear(x, &format!("{prefix}gate")));
        let mut order: Vec<usize> = (0..mixture.experts).collect();
        order.sort_by(|a, b| chances[*b].total_cmp(&chances[*a]));
        let taken = &order[..mixture.taken];
        let sum: f64 = taken.iter().map(|expert| chances[*expert]).sum();
        for expert in taken {
            let y = self.gated_product(x, &format!("{prefix}experts.{expert}."));
            out.iter_mut().zip(y).for_each(|(out, y)| *out += chances[*expert] / sum * y);
        }
        out
    }

    /// `down(act(gate(x)) * up(x))`.
    fn gated_product(&self, x: &[f64], prefix: &str) -> Vec<f64> {
        let act = if self.config.is_gemma { gelu } else { silu };
        let gate = self.linear(x, &format!("{prefix}gate_proj"));
        let up = self.linear(x, &format!("{prefix}up_proj"));
        let inner: Vec<f64> = gate.iter().zip(up).map(|(gate, up)| act(*gate) * up).collect();
        self.linear(&inner, &format!("{prefix}down_proj"))
    }
}

/// GELU, approximated with a hyperbolic tangent.
fn gelu(x: f64) -> f64 {
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
    0.5 * x * (1.0 + inner.tanh())
}
