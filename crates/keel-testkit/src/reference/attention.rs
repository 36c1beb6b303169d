//! Causal attention with grouped heads, partial rotation and, in some families, an output gate.

use super::{LayerKind, LayerMemory, Reference, dot, sigmoid, softmax};

impl Reference<'_> {
    pub(super) fn attention(
        &self,
        x: &[f64],
        prefix: &str,
        kind: LayerKind,
        memory: &mut LayerMemory,
    ) -> Vec<f64> {
        let config = self.config;
        let (heads, kv, size) = (config.heads, config.kv_heads, config.head_dim);
        let project = |name: &str| self.linear(x, &format!("{prefix}{name}"));
        let head_norm = |x: &[f64], name: &str| {
            if config.has_head_norms { self.norm(x, &format!("{prefix}{name}")) } else { x.to_vec() }
        };
        let base = if kind == LayerKind::Sliding { config.local_rope_base } else { config.rope_base };
        let position = memory.keys.len();
        let turned = |x: Vec<f64>| rotated(x, config.rotary_dim, base, position);
        // Each head has its query, then its gate.
        let queries = project("q_proj");
        let keys = project("k_proj");
        let keys = keys.chunks_exact(size).flat_map(|key| turned(head_norm(key, "k_norm"))).collect();
        memory.keys.push(keys);
        memory.values.push(project("v_proj"));
        let seen = if kind == LayerKind::Sliding { config.window } else { usize::MAX };
        let first = (position + 1).saturating_sub(seen);
        let mut out = Vec::with_capacity(heads * size);
        for (head, query) in queries.chunks_exact(queries.len() / heads).enumerate() {
            let at = head / (heads / kv) * size;
            let (query, gate) = query.split_at(size);
            let query = turned(head_norm(query, "q_norm"));
            let score = |key: &Vec<f64>| dot(&query, &key[at..at + size]) * config.score_scale;
            let weights = softmax(&memory.keys[first..].iter().map(score).collect::<Vec<_>>());
            for column in 0..size {
                let values = memory.values[first..].iter().zip(&weights);
                let sum: f64 = values.map(|(value, weight)| value[at + column] * weight).sum();
                out.push(if config.has_output_gate { sum * sigmoid(gate[column]) } else { sum });
            }
        }
        self.linear(&out, &format!("{prefix}o_proj"))
    }
}

/// Rotates the first `dim` columns in pairs `(i, i + dim / 2)`.
fn rotated(mut x: Vec<f64>, dim: usize, base: f64, position: usize) -> Vec<f64> {
    for i in 0..dim / 2 {
        let angle = position as f64 * base.powf(-2.0 * i as f64 / dim as f64);
        let (sin, cos) = angle.sin_cos();
        let (a, b) = (x[i], x[i + dim / 2]);
        (x[i], x[i + dim / 2]) = (a * cos - b * sin, b * cos + a * sin);
    }
    x
}
