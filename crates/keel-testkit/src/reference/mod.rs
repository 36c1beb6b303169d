//! A whole model in plain loops: it computes the reference outputs of the repository's fixtures.
//!
//! It runs in f64, one token at a time. It is correct by inspection, not made for speed, and shares no code with
//! `keel-models` or a backend. If `../shared/fixtures` exists, a test compares it with outputs of Hugging Face's
//! transformers.
//!
//! Formulas: Qwen3.5 and Qwen3-Next (Gated DeltaNet, Yang et al., 2024; gated attention; mixtures with a shared expert;
//! the multi-token-prediction head), Qwen3, Llama, Gemma 3.

mod attention;
mod config;
mod gated_delta;
mod mixture;

use std::collections::BTreeMap;

pub use config::{Config, LayerKind, Mixture, Recurrent};
use gated_delta::State;

/// A model: its sizes, and its weights under Hugging Face's names without the model's prefix.
pub struct Reference<'a> {
    config: &'a Config,
    weights: BTreeMap<&'a str, Vec<f64>>,
}

/// A layer's memory of earlier tokens.
#[derive(Clone, Default)]
struct LayerMemory {
    /// Keys and values of every token, `[KV * D]` each.
    keys: Vec<Vec<f64>>,
    values: Vec<Vec<f64>>,
    state: State,
}

/// The memory of all layers after a text.
#[derive(Clone)]
pub struct Memory {
    layers: Vec<LayerMemory>,
    mtp: LayerMemory,
}

impl<'a> Reference<'a> {
    /// A model with these weights.
    pub fn new(config: &'a Config, weights: impl IntoIterator<Item = (&'a str, &'a [f32])>) -> Reference<'a> {
        let wide = |(name, values): (&'a str, &[f32])| (name, values.iter().map(|x| f64::from(*x)).collect());
        Reference { config, weights: weights.into_iter().map(wide).collect() }
    }

    /// The memory of an empty text.
    pub fn memory(&self) -> Memory {
        Memory { layers: vec![LayerMemory::default(); self.config.layers.len()], mtp: LayerMemory::default() }
    }

    /// Runs the next token. Returns its hidden state after the last norm.
    pub fn step(&self, memory: &mut Memory, token: u32) -> Vec<f64> {
        let mut x = self.embedding(token);
        if self.config.is_gemma {
            // As in the Hugging Face reference, this factor is rounded to f32.
            let factor = f64::from((self.config.hidden as f32).sqrt());
            x.iter_mut().for_each(|x| *x *= factor);
        }
        for (i, (kind, memory)) in self.config.layers.iter().zip(&mut memory.layers).enumerate() {
            x = self.block(&x, &format!("layers.{i}."), *kind, memory);
        }
        self.norm(&x, "norm")
    }

    /// The output head.
    pub fn logits(&self, hidden: &[f64]) -> Vec<f64> {
        self.linear(hidden, if self.config.tied { "embed_tokens" } else { "lm_head" })
    }

    /// The MTP head's logits for token t + 2, from the hidden state of token t and token t + 1. Call it for every t in
    /// order.
    pub fn mtp_logits(&self, memory: &mut Memory, hidden: &[f64], next: u32) -> Vec<f64> {
        let mut joined = self.norm(&self.embedding(next), "mtp.pre_fc_norm_embedding");
        joined.extend(self.norm(hidden, "mtp.pre_fc_norm_hidden"));
        let x = self.linear(&joined, "mtp.fc");
        let x = self.block(&x, "mtp.layers.0.", LayerKind::Full, &mut memory.mtp);
        self.logits(&self.norm(&x, "mtp.norm"))
    }

    fn embedding(&self, token: u32) -> Vec<f64> {
        let hidden = self.config.hidden;
        self.weight("embed_tokens.weight")[token as usize * hidden..][..hidden].to_vec()
    }

    fn block(&self, x: &[f64], prefix: &str, kind: LayerKind, memory: &mut LayerMemory) -> Vec<f64> {
        let norm = |x: &[f64], name: &str| self.norm(x, &format!("{prefix}{name}"));
        let h = norm(x, "input_layernorm");
        let mixed = match kind {
            LayerKind::Recurrent => self.gated_delta(&h, &format!("{prefix}linear_attn."), &mut memory.state),
            LayerKind::Full | LayerKind::Sliding => {
                self.attention(&h, &format!("{prefix}self_attn."), kind, memory)
            }
        };
        let mlp = format!("{prefix}mlp.");
        if self.config.is_gemma {
            let x = add(x, &norm(&mixed, "post_attention_layernorm"));
            let out = self.mlp(&norm(&x, "pre_feedforward_layernorm"), &mlp);
            return add(&x, &norm(&out, "post_feedforward_layernorm"));
        }
        let x = add(x, &mixed);
        let out = self.mlp(&norm(&x, "post_attention_layernorm"), &mlp);
        add(&x, &out)
    }

    fn weight(&self, name: &str) -> &[f64] {
        self.weights.get(name).unwrap_or_else(|| panic!("the reference has no {name}"))
    }

    /// `W x`.
    fn linear(&self, x: &[f64], name: &str) -> Vec<f64> {
        self.weight(&format!("{name}.weight")).chunks_exact(x.len()).map(|row| dot(row, x)).collect()
    }

    /// `x / rms(x) * w`; `1 + w` instead of `w` in families that store offsets from one.
    fn norm(&self, x: &[f64], name: &str) -> Vec<f64> {
        let offset = if self.config.norms_are_offsets { 1.0 } else { 0.0 };
        let weight = self.weight(&format!("{name}.weight"));
        self.normalised(x).iter().zip(weight).map(|(x, w)| x * (offset + w)).collect()
    }

    /// `x / sqrt(mean(x^2) + eps)`.
    fn normalised(&self, x: &[f64]) -> Vec<f64> {
        let mean = dot(x, x) / x.len() as f64;
        let scale = 1.0 / (mean + self.config.norm_eps).sqrt();
        x.iter().map(|x| x * scale).collect()
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

fn softmax(x: &[f64]) -> Vec<f64> {
    let most = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let exp: Vec<f64> = x.iter().map(|x| (x - most).exp()).collect();
    let sum: f64 = exp.iter().sum();
    exp.iter().map(|x| x / sum).collect()
}
