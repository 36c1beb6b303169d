//! Shared code of plain transformers: it reads their numbers and their layers.
//!
//! The model types differ in a few [`Traits`] and in the kinds of their layers. Each has a separate file.

use std::ops::Range;

use serde_json::Value;

use crate::blocks::{Activation, Attention, FeedForward, GatedLayer, HeadNorm};
use crate::config::fields::Fields;
use crate::hybrid::{Block, GrowingQueries, HybridModel, Mixer};
use crate::loading::{Loader, SourceRows};
use crate::naming::{self, FamilyReader};
use crate::{HybridConfig, MixerKind, ModelError, Result};

/// Most layers. A config with more is refused.
pub(crate) const LAYERS_MAX: usize = 4096;

/// Differences between the blocks of the model types.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Traits {
    /// Queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Attention's output has a bias.
    pub output_bias: bool,
    /// The layers of the feed-forward half have biases.
    pub mlp_bias: bool,
    /// Norms of queries and keys.
    pub head_norms: HeadNorms,
    /// The norms of a block.
    pub norms: NormNames,
    /// Norms are stored as offsets from one.
    pub offset_norms: bool,
    /// Embeddings are multiplied by the square root of their width.
    pub scaled_embedding: bool,
    /// Queries, keys and values are one layer, `qkv_proj`.
    pub fused_qkv: bool,
    /// Gate and up are one layer, `gate_up_proj`.
    pub fused_gate_up: bool,
    /// Elements `2 j` and `2 j + 1` of a head rotate together, not `j` and `j + rotary / 2`.
    pub rotates_neighbours: bool,
    /// Function of the feed-forward half.
    pub activation: Activation,
}

/// Norms of queries and keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum HeadNorms {
    #[default]
    None,
    /// Head by head.
    Each,
    /// All heads together.
    Together,
}

/// The names of a block's norms; `None` if there is no such norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NormNames {
    /// Before attention.
    pub mixer: Option<&'static str>,
    /// Of attention's output.
    pub mixer_out: Option<&'static str>,
    /// Before the feed-forward half.
    pub ff: Option<&'static str>,
    /// Of the feed-forward half's output.
    pub ff_out: Option<&'static str>,
}

impl Default for NormNames {
    fn default() -> NormNames {
        NormNames {
            mixer: Some("input_layernorm"),
            mixer_out: None,
            ff: Some("post_attention_layernorm"),
            ff_out: None,
        }
    }
}

/// The reference's defaults for keys that a config leaves out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Defaults {
    /// The number of query heads if `None`.
    pub kv_heads: Option<usize>,
    /// `hidden / heads` if `None`.
    pub head_dim: Option<usize>,
    pub context: usize,
    pub eps: f64,
    pub theta: f64,
    /// `partial_rotary_factor`.
    pub rotary: f64,
    pub tied: bool,
    /// `sliding_window`.
    pub window: Option<usize>,
    pub activation: ActivationKey,
}

/// The key of the function of the feed-forward half, and the function if it is missing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ActivationKey {
    pub key: &'static str,
    pub default: Activation,
}

/// Where most model types give the function of the feed-forward half.
pub(crate) const ACTIVATION: ActivationKey = ActivationKey { key: "hidden_act", default: Activation::Silu };

impl Default for Defaults {
    fn default() -> Defaults {
        Defaults {
            kv_heads: None,
            head_dim: None,
            context: 32768,
            eps: 1e-6,
            theta: 10_000.0,
            rotary: 1.0,
            tied: false,
            window: None,
            activation: ACTIVATION,
        }
    }
}

/// Reads the numbers whose keys all model types share. Of the traits it reads the activation.
///
/// # Errors
/// [`ModelError::Config`] naming the key that is missing or wrong.
pub(crate) fn config(fields: &Fields<'_>, defaults: Defaults) -> Result<HybridConfig> {
    let traits = Traits { activation: activation(fields, defaults.activation)?, ..Traits::default() };
    let (hidden, heads) = (fields.size("hidden_size")?, fields.size("num_attention_heads")?);
    let head_dim = fields.size_or("head_dim", defaults.head_dim.unwrap_or(hidden / heads.max(1)))?;
    let rotary = (head_dim as f64 * fields.rope("partial_rotary_factor", defaults.rotary)?) as usize;
    let layers = fields.size("num_hidden_layers")?;
    if layers > LAYERS_MAX {
        return Err(ModelError::Config(format!(
            "num_hidden_layers is {layers}, at most {LAYERS_MAX} are read"
        )));
    }
    let rope_scaling = fields.rope_scaling("full_attention")?;
    Ok(HybridConfig {
        model_type: fields.model_type(),
        hidden,
        vocab: fields.size("vocab_size")?,
        layers: fields.layer_types()?.unwrap_or(vec![MixerKind::Attention; layers]),
        mtp_layers: 0,
        eps: fields.number_or("rms_norm_eps", defaults.eps)? as f32,
        tied: fields.get("tie_word_embeddings").and_then(Value::as_bool).unwrap_or(defaults.tied),
        context_max: rope_scaling.context_max(fields.size_or("max_position_embeddings", defaults.context)?),
        heads,
        kv_heads: fields.size_or("num_key_value_heads", defaults.kv_heads.unwrap_or(heads))?,
        head_dim,
        rope_theta: fields.rope_theta("full_attention", defaults.theta)?,
        rotary,
        rope_sections: fields.rope_sections()?,
        rope_scaling,
        sliding_rope_theta: fields.rope_theta("sliding_attention", defaults.theta)?,
        sliding_rope_scaling: fields.rope_scaling("sliding_attention")?,
        unrotated_layers: Vec::new(),
        window: match fields.is_mentioned("sliding_window") || defaults.window.is_none() {
            true => fields.size_if_any("sliding_window")?,
            false => defaults.window,
        },
        attention_scale: (head_dim as f64).powf(-0.5),
        query_growth: None,
        gated: false,
        recurrent: None,
        intermediate: fields.size_if_any("intermediate_size")?,
        moe: None,
        traits,
    })
}

/// `sliding_window` of configs that enable windows and leave the key out.
pub(crate) const WINDOW_ON_REQUEST: Option<usize> = Some(4096);
/// `max_window_layers` of such configs: the first layer that sees the window.
const WINDOWED_FROM: usize = 28;

/// Sets the kinds of layers for model types whose configs enable windows with `use_sliding_window`.
pub(crate) fn windows_on_request(fields: &Fields<'_>, config: &mut HybridConfig) -> Result<()> {
    if !fields.flag("use_sliding_window") || config.window.is_none() {
        windows_nowhere(config);
    } else if fields.get("layer_types").is_none() {
        let from = fields.size_or("max_window_layers", WINDOWED_FROM)?;
        config.layers.iter_mut().skip(from).for_each(|kind| *kind = MixerKind::SlidingAttention);
    }
    drop_unused_windows(config);
    Ok(())
}

/// Gives all layers the window, if there is one, for model types that ignore `layer_types`.
pub(crate) fn windows_everywhere(config: &mut HybridConfig) {
    config.layers.fill(MixerKind::SlidingAttention);
    drop_unused_windows(config);
}

/// Makes sliding layers full-attention layers if no window ends within the context and both kinds rotate alike.
pub(crate) fn drop_unused_windows(config: &mut HybridConfig) {
    let slides = config.layers.contains(&MixerKind::SlidingAttention);
    if !slides || config.window.is_none_or(|window| window >= config.context_max) {
        let alike = (config.rope_theta, &config.rope_scaling)
            == (config.sliding_rope_theta, &config.sliding_rope_scaling);
        if !slides || alike {
            windows_nowhere(config);
        }
    }
}

pub(crate) fn windows_nowhere(config: &mut HybridConfig) {
    config.layers.fill(MixerKind::Attention);
    config.window = None;
}

/// The function in `key`; `default` if it is missing.
///
/// # Errors
/// If the function is not supported.
fn activation(fields: &Fields<'_>, ActivationKey { key, default }: ActivationKey) -> Result<Activation> {
    let Some(function) = fields.get(key) else { return Ok(default) };
    match function.as_str() {
        Some("silu" | "swish") => Ok(Activation::Silu),
        Some("gelu_pytorch_tanh" | "gelu_new") => Ok(Activation::GeluTanh),
        _ => Err(ModelError::Config(format!(
            "{key} is {function}, which is not supported; supported are silu and gelu_pytorch_tanh"
        ))),
    }
}

/// Refuses other functions than SiLU, for model types with experts or recurrent layers, which have no other.
///
/// # Errors
/// If `hidden_act` is another function.
pub(crate) fn silu_alone(fields: &Fields<'_>) -> Result<()> {
    if activation(fields, ACTIVATION)? == Activation::Silu { Ok(()) } else { refuse(fields, "hidden_act") }
}

/// Returns an error if the config sets a key that is not supported.
///
/// # Errors
/// If `key` is neither absent, null nor false.
pub(crate) fn refuse(fields: &Fields<'_>, key: &str) -> Result<()> {
    match fields.get(key).filter(|value| **value != Value::Bool(false)) {
        None => Ok(()),
        Some(value) => Err(ModelError::Config(format!("{key} is {value}, which is not supported"))),
    }
}

/// Reads a model.
pub(crate) fn load(loader: &Loader<'_>, config: HybridConfig) -> Result<HybridModel> {
    let mut reader = FamilyReader::new(loader, &config)?;
    reader.norms_are_offsets = config.traits.offset_norms && !loader.parameters().norms_are_scales();
    let root = &reader.root;
    let embedding = reader.embedding()?;
    let slides = reader.part().of(&config.layers).any(|(_, kind)| *kind == MixerKind::SlidingAttention);
    let rotation = || naming::rotation(loader, &config, MixerKind::SlidingAttention);
    let sliding = config.window.filter(|_| slides).map(|_| rotation()).transpose()?;
    let mut blocks = Vec::new();
    for (i, kind) in reader.part().of(&config.layers) {
        let prefix = format!("{root}layers.{i}.");
        let mut mixer = attention(&reader, &format!("{prefix}self_attn."))?;
        mixer.scale = config.score_scale(*kind) as f32;
        let is_sliding = *kind == MixerKind::SlidingAttention;
        mixer.window = config.window.filter(|_| is_sliding);
        mixer.rotation = match &sliding {
            _ if config.unrotated_layers.contains(&i) => {
                mixer.scale = config.attention_scale as f32;
                None
            }
            Some(sliding) if is_sliding => Some(sliding.clone()),
            _ => Some(reader.rotation()?),
        };
        blocks.push(block(&reader, &prefix, i, mixer)?);
    }
    let output = reader.output(embedding.as_ref())?;
    let embedding_scale = config.traits.scaled_embedding.then(|| (config.hidden as f32).sqrt());
    let embedding_scale = embedding_scale.map(|scale| loader.constant(&[scale])).transpose()?;
    let growing_queries = growing_queries(loader, &config)?;
    let part = loader.part().clone();
    Ok(HybridModel { part, embedding, embedding_scale, growing_queries, blocks, output, mtp: None, config })
}

fn growing_queries(loader: &Loader<'_>, config: &HybridConfig) -> Result<Option<GrowingQueries>> {
    let Some(growth) = config.query_growth else { return Ok(None) };
    Ok(Some(GrowingQueries {
        original: loader.whole_constant(growth.original as i32)?,
        beta: loader.constant(&[growth.beta as f32])?,
        one: loader.constant(&[1.0])?,
    }))
}

/// The rows of queries, keys and values.
fn qkv_sources(config: &HybridConfig, prefix: &str) -> Vec<SourceRows> {
    let (d, traits) = (config.head_dim, config.traits);
    let parts = [("q_proj", config.heads), ("k_proj", config.kv_heads), ("v_proj", config.kv_heads)];
    let total = (config.heads + 2 * config.kv_heads) * d;
    let mut start = 0;
    let source = |(name, heads): (&str, usize)| {
        let first = if traits.fused_qkv { start } else { 0 };
        start += heads * d;
        let rows = match name {
            "q_proj" | "k_proj" if traits.rotates_neighbours => {
                (0..heads).flat_map(|head| halves(first + head * d, d, config.rotary)).collect()
            }
            _ => std::iter::once(first..first + heads * d).collect(),
        };
        match traits.fused_qkv {
            true => SourceRows::rows(format!("{prefix}qkv_proj"), total, rows),
            false => SourceRows::rows(format!("{prefix}{name}"), heads * d, rows),
        }
    };
    parts.map(source).into()
}

/// Brings the rows of a head with rotating neighbours into the order of a head with rotating halves. Scores do not
/// change if queries and keys are reordered in the same way.
fn halves(first: usize, size: usize, rotary: usize) -> impl Iterator<Item = Range<usize>> {
    let rotating = (0..2).flat_map(move |half| (0..rotary / 2).map(move |i| first + 2 * i + half));
    let rest = first + rotary..first + size;
    rotating.map(|row| row..row + 1).chain((!rest.is_empty()).then_some(rest))
}

fn attention(reader: &FamilyReader<'_>, prefix: &str) -> Result<Attention> {
    let c = reader.config;
    let (d, traits, loader) = (c.head_dim, c.traits, reader.loader);
    if traits.head_norms == HeadNorms::Together && reader.part().share.count > 1 {
        let reason = format!(
            "{} norms all heads together, so its heads are not split: use --split pipeline",
            c.model_type
        );
        return Err(ModelError::Part(reason));
    }
    let sources = qkv_sources(c, prefix);
    let bias = traits.qkv_bias.then(|| loader.biases(&sources)).transpose()?;
    let mut projection = loader.projection(sources, c.hidden)?;
    projection.bias = bias;
    let head_norm = |name: &str, heads: usize| -> Result<Option<HeadNorm>> {
        let name = format!("{prefix}{name}");
        Ok(match traits.head_norms {
            HeadNorms::None => None,
            HeadNorms::Each => Some(HeadNorm::Each(reader.norm(&name, d)?)),
            HeadNorms::Together => Some(HeadNorm::Together(reader.norm(&name, heads * d)?)),
        })
    };
    let output = SourceRows::whole(format!("{prefix}o_proj"), c.hidden);
    let mut output = loader.row_parallel(output, c.heads * d, loader.sums())?;
    if traits.output_bias {
        output.bias = Some(loader.biases(&[SourceRows::whole(format!("{prefix}o_proj"), c.hidden)])?);
    }
    Ok(Attention {
        projection,
        gated: false,
        q_norm: head_norm("q_norm", c.heads)?,
        k_norm: head_norm("k_norm", c.kv_heads)?,
        output,
        heads: c.heads,
        kv_heads: c.kv_heads,
        head_dim: d,
        rotation: None,
        scale: c.attention_scale as f32,
        window: None,
    })
}

fn block(reader: &FamilyReader<'_>, prefix: &str, layer: usize, mixer: Attention) -> Result<Block> {
    let (hidden, norms) = (reader.config.hidden, reader.config.traits.norms);
    let norm =
        |name: Option<&str>| name.map(|name| reader.norm(&format!("{prefix}{name}"), hidden)).transpose();
    Ok(Block {
        mixer_norm: norm(norms.mixer)?,
        mixer: Mixer::Attention(mixer),
        mixer_out_norm: norm(norms.mixer_out)?,
        ff_norm: norm(norms.ff)?,
        ff: feed_forward(reader, &format!("{prefix}mlp."), layer)?,
        ff_out_norm: norm(norms.ff_out)?,
    })
}

fn feed_forward(reader: &FamilyReader<'_>, prefix: &str, layer: usize) -> Result<FeedForward> {
    let traits = reader.config.traits;
    let dense = reader.config.moe.as_ref().is_none_or(|moe| moe.dense_layers.contains(&layer));
    if !dense {
        return reader.feed_forward(prefix);
    }
    let (loader, hidden, width) = (reader.loader, reader.config.hidden, reader.config.dense_width()?);
    let part = |name: &str| SourceRows::whole(format!("{prefix}{name}"), width);
    let gate_up = match traits.fused_gate_up {
        true => {
            let half = |rows| SourceRows::rows(format!("{prefix}gate_up_proj"), 2 * width, vec![rows]);
            vec![half(0..width), half(width..2 * width)]
        }
        false => vec![part("gate_proj"), part("up_proj")],
    };
    let down = SourceRows::whole(format!("{prefix}down_proj"), hidden);
    let bias = |sources: &[SourceRows]| traits.mlp_bias.then(|| loader.biases(sources)).transpose();
    let (gate_up_bias, down_bias) = (bias(&gate_up)?, bias(std::slice::from_ref(&down))?);
    let mut layer = GatedLayer {
        gate_up: loader.projection(gate_up, hidden)?,
        down: loader.row_parallel(down, width, loader.sums())?,
        activation: traits.activation,
    };
    (layer.gate_up.bias, layer.down.bias) = (gate_up_bias, down_bias);
    Ok(FeedForward::Dense(layer))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_brought_into_halves() {
        let rows: Vec<usize> = halves(10, 8, 6).flatten().collect();
        assert_eq!(rows, [10, 12, 14, 11, 13, 15, 16, 17]);
        let all: Vec<usize> = halves(0, 4, 4).flatten().collect();
        assert_eq!(all, [0, 2, 1, 3]);
    }
}
