//! Plain transformers computed in plain loops: f64, one token after the other, from a config and parameters by name.

use keel_array::{RowData, WeightFormat, WeightSpec};
use keel_models::loading::Parameters;
use serde_json::Value;

/// Logits of every token, row by row.
pub fn logits(config: &Value, parameters: &dyn Parameters, ids: &[u32]) -> Vec<f32> {
    let model = Model { config, parameters, kind: config["model_type"].as_str().expect("a type") };
    let (hidden, vocab) = (model.size("hidden_size"), model.size("vocab_size"));
    let embedding = model.matrix("model.embed_tokens", vocab, hidden);
    let mut rows: Vec<Vec<f64>> =
        ids.iter().map(|&id| embedding[id as usize * hidden..][..hidden].to_vec()).collect();
    for layer in 0..model.size("num_hidden_layers") {
        model.block(layer, &mut rows);
    }
    let tied = config["tie_word_embeddings"] == true;
    let head = if tied { embedding } else { model.matrix("lm_head", vocab, hidden) };
    let norm = model.vector("model.norm.weight", hidden);
    rows.iter().flat_map(|row| product(&head, &model.normed(row, &norm))).map(|x| x as f32).collect()
}

struct Model<'a> {
    config: &'a Value,
    parameters: &'a dyn Parameters,
    kind: &'a str,
}

/// `W x`, where the rows of W are as long as x.
fn product(weight: &[f64], x: &[f64]) -> Vec<f64> {
    weight.chunks_exact(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
}

fn add(x: &mut [f64], y: &[f64]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

impl Model<'_> {
    fn size(&self, key: &str) -> usize {
        self.config[key].as_u64().unwrap_or_else(|| panic!("{key} is a size")) as usize
    }

    fn head_dim(&self) -> usize {
        let computed = self.size("hidden_size") / self.size("num_attention_heads");
        self.config["head_dim"].as_u64().map_or(computed, |d| d as usize)
    }

    fn vector(&self, name: &str, len: usize) -> Vec<f64> {
        let values = self.parameters.values(name, len).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(values.len(), len, "{name}");
        values.into_iter().map(f64::from).collect()
    }

    fn matrix(&self, module: &str, rows: usize, cols: usize) -> Vec<f64> {
        let format = self.parameters.linear_format(module, None, rows, cols);
        let WeightFormat::Dense(dtype) = format.unwrap_or_else(|e| panic!("{module}: {e}")) else {
            panic!("{module} is not dense")
        };
        let compute = keel_array::Compute::F32;
        let spec = WeightSpec { experts: 1, rows, cols, format: WeightFormat::Dense(dtype), compute };
        let mut all = Vec::new();
        let mut sink = |count: usize, data: RowData<'_>| {
            let RowData::Dense(bytes) = data else { panic!("dense rows were asked for") };
            let mut values = vec![0.0; count * cols];
            keel_weights::float::decode(dtype, bytes, &mut values);
            all.extend(values.into_iter().map(f64::from));
            Ok(())
        };
        self.parameters.linear_rows(module, None, 0..rows, &spec, &mut sink).expect("the rows are there");
        all
    }

    fn normed(&self, x: &[f64], weight: &[f64]) -> Vec<f64> {
        let eps = self.config["rms_norm_eps"].as_f64().expect("an eps");
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        x.iter().zip(weight).map(|(x, w)| x / (mean + eps).sqrt() * w).collect()
    }

    /// The names of the norms before and after attention, and before and after the feed-forward half.
    fn norms(&self) -> [Option<&'static str>; 4] {
        match self.kind {
            "olmo3" => [None, Some("post_attention_layernorm"), None, Some("post_feedforward_layernorm")],
            "glm4" => [
                Some("input_layernorm"),
                Some("post_self_attn_layernorm"),
                Some("post_attention_layernorm"),
                Some("post_mlp_layernorm"),
            ],
            _ => [Some("input_layernorm"), None, Some("post_attention_layernorm"), None],
        }
    }

    fn block(&self, layer: usize, rows: &mut [Vec<f64>]) {
        let prefix = format!("model.layers.{layer}.");
        let norms = self.norms().map(|name| {
            name.map(|name| self.vector(&format!("{prefix}{name}.weight"), self.size("hidden_size")))
        });
        let apply = |norm: &Option<Vec<f64>>, x: &[f64]| match norm {
            Some(weight) => self.normed(x, weight),
            None => x.to_vec(),
        };
        let inputs: Vec<Vec<f64>> = rows.iter().map(|row| apply(&norms[0], row)).collect();
        let attended = self.attention(layer, &format!("{prefix}self_attn."), &inputs);
        for (row, attended) in rows.iter_mut().zip(attended) {
            add(row, &apply(&norms[1], &attended));
        }
        let feed_forward = self.feed_forward(&format!("{prefix}mlp."));
        for row in rows {
            let out = feed_forward(&apply(&norms[2], row));
            add(row, &apply(&norms[3], &out));
        }
    }

    fn feed_forward(&self, prefix: &str) -> impl Fn(&[f64]) -> Vec<f64> + use<> {
        let (hidden, width) = (self.size("hidden_size"), self.size("intermediate_size"));
        let gate_up = match self.kind {
            "phi3" | "glm4" => self.matrix(&format!("{prefix}gate_up_proj"), 2 * width, hidden),
            _ => ["gate_proj", "up_proj"]
                .map(|name| self.matrix(&format!("{prefix}{name}"), width, hidden))
                .concat(),
        };
        let down = self.matrix(&format!("{prefix}down_proj"), hidden, width);
        move |x| {
            let both = product(&gate_up, x);
            let silu = |x: f64| x / (1.0 + (-x).exp());
            let inner: Vec<f64> = (0..width).map(|i| silu(both[i]) * both[width + i]).collect();
            product(&down, &inner)
        }
    }

    fn attention(&self, layer: usize, prefix: &str, inputs: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let (heads, kv_heads) = (self.size("num_attention_heads"), self.size("num_key_value_heads"));
        let (d, hidden) = (self.head_dim(), self.size("hidden_size"));
        let widths = [heads * d, kv_heads * d, kv_heads * d];
        let names = ["q_proj", "k_proj", "v_proj"];
        let weight = match self.kind {
            "phi3" => self.matrix(&format!("{prefix}qkv_proj"), widths.iter().sum(), hidden),
            _ => [0, 1, 2].map(|i| self.matrix(&format!("{prefix}{}", names[i]), widths[i], hidden)).concat(),
        };
        let bias = (self.config["attention_bias"] == true).then(|| {
            [0, 1, 2].map(|i| self.vector(&format!("{prefix}{}.bias", names[i]), widths[i])).concat()
        });
        let output = self.matrix(&format!("{prefix}o_proj"), hidden, heads * d);
        let norms = (self.kind == "olmo3").then(|| {
            [("q_norm", widths[0]), ("k_norm", widths[1])]
                .map(|(name, len)| self.vector(&format!("{prefix}{name}.weight"), len))
        });
        let turns = self.turns(layer, inputs.len());
        let (mut keys, mut values, mut results) = (Vec::new(), Vec::new(), Vec::new());
        for (at, x) in inputs.iter().enumerate() {
            let mut all = product(&weight, x);
            bias.iter().for_each(|bias| add(&mut all, bias));
            let mut query = all[..widths[0]].to_vec();
            let mut key = all[widths[0]..widths[0] + widths[1]].to_vec();
            if let Some([q, k]) = &norms {
                (query, key) = (self.normed(&query, q), self.normed(&key, k));
            }
            for head in query.chunks_exact_mut(d).chain(key.chunks_exact_mut(d)) {
                turns.apply(head, at);
            }
            keys.push(key);
            values.push(all[widths[0] + widths[1]..].to_vec());
            let scale = (d as f64).powf(-0.5) * self.growth(at);
            let first = self.window(layer).map_or(0, |window| (at + 1).saturating_sub(window));
            let mut mixed = vec![0.0; heads * d];
            for head in 0..heads {
                let shared = head / (heads / kv_heads) * d;
                let q = &query[head * d..][..d];
                let score =
                    |t: usize| q.iter().zip(&keys[t][shared..]).map(|(q, k)| q * k).sum::<f64>() * scale;
                let scores: Vec<f64> = (first..=at).map(score).collect();
                let most = scores.iter().copied().fold(f64::MIN, f64::max);
                let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
                let total: f64 = weights.iter().sum();
                for (t, weight) in (first..).zip(&weights) {
                    for i in 0..d {
                        mixed[head * d + i] += weight / total * values[t][shared + i];
                    }
                }
            }
            results.push(product(&output, &mixed));
        }
        results
    }

    /// How many tokens a row of a layer sees, itself included.
    fn window(&self, layer: usize) -> Option<usize> {
        let window = self.config["sliding_window"].as_u64()? as usize;
        let all = matches!(self.kind, "mistral" | "ministral3" | "phi3");
        (all || self.config["layer_types"][layer] == "sliding_attention").then_some(window)
    }

    fn growth(&self, at: usize) -> f64 {
        let rope = &self.config["rope_parameters"];
        let Some(beta) = rope["llama_4_scaling_beta"].as_f64() else { return 1.0 };
        let original = rope["original_max_position_embeddings"].as_u64().expect("a length") as usize;
        1.0 + beta * (1.0 + (at / original) as f64).ln()
    }

    /// How a layer rotates its heads in a sequence of `tokens` tokens.
    fn turns(&self, layer: usize, tokens: usize) -> Turns {
        let rope = &self.config["rope_parameters"];
        let rope = match self.config["layer_types"][layer].as_str() {
            Some(kind) if rope[kind].is_object() => &rope[kind],
            _ => rope,
        };
        let number = |key: &str| rope[key].as_f64().unwrap_or_else(|| panic!("{key} is a number"));
        let share = rope["partial_rotary_factor"].as_f64().unwrap_or(1.0);
        let rotary = (self.head_dim() as f64 * share) as usize;
        let theta = number("rope_theta");
        let plain = |i: usize| theta.powf(-2.0 * i as f64 / rotary as f64);
        let mut factor = 1.0;
        let frequencies: Vec<f64> = match rope["rope_type"].as_str() {
            Some("yarn") => {
                let (stretch, original) = (number("factor"), number("original_max_position_embeddings"));
                let equal = rope["mscale"].is_number() && rope["mscale"] == rope["mscale_all_dim"];
                factor = match rope["attention_factor"].as_f64() {
                    Some(factor) => factor,
                    None if equal => 1.0,
                    None => 0.1 * stretch.ln() + 1.0,
                };
                let bound = |turns: f64| {
                    rotary as f64 * (original / (turns * std::f64::consts::TAU)).ln() / (2.0 * theta.ln())
                };
                let low = bound(number("beta_fast")).floor().max(0.0);
                let high = bound(number("beta_slow")).ceil().min(rotary as f64 - 1.0);
                let divided = |i: usize| ((i as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
                (0..rotary / 2).map(|i| plain(i) * (1.0 - divided(i) + divided(i) / stretch)).collect()
            }
            Some("longrope") => {
                let original = number("original_max_position_embeddings");
                let whole = self.size("max_position_embeddings") as f64;
                factor = (1.0 + (whole / original).ln() / original.ln()).sqrt();
                let list = if tokens as f64 > original { "long_factor" } else { "short_factor" };
                let divisor = |i: usize| rope[list][i].as_f64().expect("a divisor");
                (0..rotary / 2).map(|i| plain(i) / divisor(i)).collect()
            }
            _ => (0..rotary / 2).map(plain).collect(),
        };
        let stays = self.config["no_rope_layers"][layer] == 0;
        Turns {
            frequencies: if stays { Vec::new() } else { frequencies },
            factor,
            neighbours: self.kind == "glm4",
        }
    }
}

struct Turns {
    frequencies: Vec<f64>,
    factor: f64,
    neighbours: bool,
}

impl Turns {
    fn apply(&self, head: &mut [f64], at: usize) {
        let count = self.frequencies.len();
        for (i, frequency) in self.frequencies.iter().enumerate() {
            let (sin, cos) = (at as f64 * frequency).sin_cos();
            let (a, b) = if self.neighbours { (2 * i, 2 * i + 1) } else { (i, i + count) };
            let (x, y) = (head[a], head[b]);
            head[a] = (x * cos - y * sin) * self.factor;
            head[b] = (y * cos + x * sin) * self.factor;
        }
    }
}
