//! Gated DeltaNet, one token: `S = exp(g) S; S += k (beta (v - S k))^T; y = S q`, after a causal convolution and before
//! a gated norm.

use super::{Reference, dot, sigmoid, silu};

/// The memory of a layer: the last rows before the convolution, and a state `[Dk, Dv]` for each value head.
#[derive(Clone, Default)]
pub struct State {
    rows: Vec<Vec<f64>>,
    heads: Vec<Vec<f64>>,
}

impl Reference<'_> {
    pub(super) fn gated_delta(&self, x: &[f64], prefix: &str, state: &mut State) -> Vec<f64> {
        let r = &self.config.recurrent;
        let (key_dim, value_dim) = (r.key_dim, r.value_dim);
        let project = |name: &str| self.linear(x, &format!("{prefix}{name}"));
        let weight = |name: &str| self.weight(&format!("{prefix}{name}"));
        if state.heads.is_empty() {
            state.heads = vec![vec![0.0; key_dim * value_dim]; r.value_heads];
        }
        state.rows.push(project("in_proj_qkv"));
        let mixed = self.convolved(&state.rows, weight("conv1d.weight"));
        let (z, a, b) = (project("in_proj_z"), project("in_proj_a"), project("in_proj_b"));
        let (queries, rest) = mixed.split_at(r.key_heads * key_dim);
        let (keys, values) = rest.split_at(r.key_heads * key_dim);
        let mut out = Vec::with_capacity(r.value_heads * value_dim);
        for (head, memory) in state.heads.iter_mut().enumerate() {
            // Value head h reads key head h / (Hv / Hk).
            let key_head = head / (r.value_heads / r.key_heads) * key_dim;
            let query = unit(&queries[key_head..][..key_dim], (key_dim as f64).powf(-0.5));
            let key = unit(&keys[key_head..][..key_dim], 1.0);
            let rate = (a[head] + weight("dt_bias")[head]).exp().ln_1p();
            let decay = (-weight("A_log")[head].exp() * rate).exp();
            memory.iter_mut().for_each(|s| *s *= decay);
            let mut answer = vec![0.0; value_dim];
            for column in 0..value_dim {
                let seen: f64 = (0..key_dim).map(|k| memory[k * value_dim + column] * key[k]).sum();
                let change = (values[head * value_dim + column] - seen) * sigmoid(b[head]);
                for k in 0..key_dim {
                    memory[k * value_dim + column] += key[k] * change;
                    answer[column] += memory[k * value_dim + column] * query[k];
                }
            }
            let gates = &z[head * value_dim..][..value_dim];
            let normed = self.normalised(&answer);
            let scaled = normed.iter().zip(weight("norm.weight")).zip(gates);
            out.extend(scaled.map(|((y, w), z)| y * w * silu(*z)));
        }
        self.linear(&out, &format!("{prefix}out_proj"))
    }

    /// The last row of a causal convolution of each channel, then SiLU. `kernel` is `[channels, K]`.
    fn convolved(&self, rows: &[Vec<f64>], kernel: &[f64]) -> Vec<f64> {
        let width = self.config.recurrent.kernel;
        let channel = |(channel, taps): (usize, &[f64])| {
            let newest_first = rows.iter().rev().zip(taps.iter().rev());
            silu(newest_first.map(|(row, tap)| row[channel] * tap).sum())
        };
        kernel.chunks_exact(width).enumerate().map(channel).collect()
    }
}

/// `scale * x / |x|`.
fn unit(x: &[f64], scale: f64) -> Vec<f64> {
    let factor = scale / (dot(x, x) + 1e-6).sqrt();
    x.iter().map(|x| x * factor).collect()
}
