//! Lower bounds on the cost of a step: bytes to read and operations to execute.

use anyhow::Result;
use keel_array::{Category, Runtime, RuntimeOptions, Weight};
use keel_cache::LayerSpec;
use keel_engine::{Engine, EngineOptions};
use keel_models::blocks::FeedForward;
use keel_models::{HybridConfig, HybridModel, MixerKind};
use serde_json::Value;

use crate::placed_model::PlacedModel;

/// The least memory traffic and arithmetic of a model.
#[derive(Clone, Debug)]
pub struct Cost {
    /// All weights in memory.
    pub weights_bytes: u64,
    /// Bytes of the weights that every step reads, for any tokens.
    shared_bytes: f64,
    /// Bytes of all expert weights.
    expert_bytes: f64,
    /// Share of the experts that one token reads.
    expert_share: f64,
    /// Bytes of one sequence's recurrent state, counted for both the read and the write per token.
    state_bytes: f64,
    /// Bytes of a token's keys and values in all full-attention layers.
    kv_bytes: f64,
    /// Bytes of a token's keys and values in all sliding-window layers.
    sliding_kv_bytes: f64,
    config: HybridConfig,
}

impl Cost {
    /// The cost of the model in an engine. Plain decoding does not read the MTP head. So its bytes are excluded by
    /// planning without it.
    ///
    /// # Errors
    /// Those of the plan.
    pub fn of(engine: &Engine, model: PlacedModel<'_>) -> Result<Cost> {
        // Of a split model each device knows its part alone. A plan of the whole has the same bytes.
        let whole = match engine.is_split() {
            true => Some(whole_engine(engine.options(), model)?),
            false => None,
        };
        let engine = whole.as_ref().unwrap_or(engine);
        let ledger = engine.runtime().ledger().active();
        // A step reads each weight once: as coded, or its 8-bit copy. The copy is 6% smaller than 8-bit codes and
        // larger than all other codings.
        let compute = engine.options().compute.without_copy();
        let least = EngineOptions {
            context: 1,
            prefill_step: 64,
            sequences: 1,
            drafts: 0,
            compute,
            ..*engine.options()
        };
        let (device, config) = (&model.device.on(model.device.device()), &without_draft_head(model.config));
        let without_head = PlacedModel { device, config, ..model }.plan(least)?;
        let model = engine.model();
        let read = without_head.get(Category::Weights) - unread_embedding_bytes(model);
        let expert_bytes = expert_bytes(model);
        let moe = model.config.moe.as_ref();
        let layers_of = |wanted| model.config.layers.iter().filter(|kind| **kind == wanted).count();
        let (kv_heads, head_dim) = (model.config.kv_heads, model.config.head_dim);
        let layer = LayerSpec::Attention { kv_heads, head_dim };
        let layer_bytes = layer.token_bytes(engine.options().kv_format()) as f64;
        Ok(Cost {
            weights_bytes: ledger.get(Category::Weights),
            shared_bytes: (read - expert_bytes) as f64,
            expert_bytes: expert_bytes as f64,
            expert_share: moe.map_or(0.0, |moe| moe.chosen as f64 / moe.experts as f64),
            state_bytes: 2.0 * ledger.get(Category::Recurrent) as f64 / engine.options().sequences as f64,
            kv_bytes: layers_of(MixerKind::Attention) as f64 * layer_bytes,
            sliding_kv_bytes: layers_of(MixerKind::SlidingAttention) as f64 * layer_bytes,
            config: model.config.clone(),
        })
    }

    /// Bytes of one decode step of `batch` sequences that hold `depth` tokens each. Experts count by the expected
    /// number of different experts, if each token chooses at random.
    pub fn decode_bytes(&self, batch: usize, depth: usize) -> f64 {
        let experts_read = 1.0 - (1.0 - self.expert_share).powf(batch as f64);
        let seen = self.config.window.map_or(0, |window| depth.min(window)) as f64;
        let sequence = self.state_bytes + self.kv_bytes * depth as f64 + self.sliding_kv_bytes * seen;
        self.shared_bytes + self.expert_bytes * experts_read + sequence * batch as f64
    }

    /// Operations of a prompt: two per weight and token, the output head once, and the attention scores.
    pub fn prefill_ops(&self, tokens: usize) -> f64 {
        let c = &self.config;
        // A row attends to half of the prompt on average, or to its window.
        let scores = |seen: f64| 4.0 * seen * (c.heads * c.head_dim) as f64;
        let query_and_output = if c.gated { 3 } else { 2 };
        let projected = c.head_dim * (query_and_output * c.heads + 2 * c.kv_heads);
        let attention = |seen: f64| 2.0 * (c.hidden * projected) as f64 + scores(seen);
        let half = tokens as f64 / 2.0;
        let layer = |kind: &MixerKind| match kind {
            MixerKind::Attention => attention(half),
            MixerKind::SlidingAttention => attention(c.window.map_or(half, |window| half.min(window as f64))),
            MixerKind::GatedDelta => {
                let r = c.recurrent_layers();
                2.0 * (c.hidden * (r.conv_channels() + 2 * r.values() + 2 * r.value_heads)) as f64
            }
        };
        let mixers: f64 = c.layers.iter().map(layer).sum();
        let per_token = mixers + (2 * c.layers.len() * self.feed_forward_weights()) as f64;
        per_token * tokens as f64 + (2 * c.hidden * c.vocab) as f64
    }

    fn feed_forward_weights(&self) -> usize {
        let c = &self.config;
        match &c.moe {
            None => 3 * c.hidden * c.intermediate.unwrap_or(0),
            Some(moe) => {
                let width = moe.chosen * moe.intermediate + moe.shared_intermediate.unwrap_or(0);
                c.hidden * (3 * width + moe.experts)
            }
        }
    }
}

/// The whole model on one device that only plans.
fn whole_engine(options: &EngineOptions, model: PlacedModel<'_>) -> Result<Engine> {
    let PlacedModel { device, parameters, config } = model;
    let runtime = Runtime::new(device.planning_backend(options.compute), RuntimeOptions::default());
    let options = device.options().engine_options(*options);
    Ok(Engine::load(&runtime, parameters, config, options, &|_| ())?)
}

/// The model's config without its multi-token-prediction head.
fn without_draft_head(config: &Value) -> Value {
    let mut config = config.clone();
    let nested = config["text_config"].is_object();
    let text = if nested { &mut config["text_config"] } else { &mut config };
    text["mtp_num_hidden_layers"] = 0.into();
    config
}

/// Bytes of an embedding that is not also the output head. A token reads only one of its rows.
fn unread_embedding_bytes(model: &HybridModel) -> u64 {
    if model.config.tied { 0 } else { model.embedding.as_ref().map_or(0, |weight| weight.bytes()) as u64 }
}

fn expert_bytes(model: &HybridModel) -> u64 {
    let of_block = |ff: &FeedForward| match ff {
        FeedForward::Dense(_) => 0,
        FeedForward::Experts(experts) => {
            experts.gate_up.bytes() + experts.down.iter().map(Weight::bytes).sum::<usize>()
        }
    };
    model.blocks.iter().map(|block| of_block(&block.ff) as u64).sum()
}
