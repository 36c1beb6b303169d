//! What plain transformers have in common: their numbers, and reading their layers.
//!
//! The model types differ in a few [`Traits`] and in the kinds of their layers; each has a file of its own.

use serde_json::Value;

use crate::blocks::{Activation, Attention, FeedForward, GatedLayer, RmsNorm};
use crate::fields::Fields;
use crate::hybrid::{Block, HybridModel, Mixer};
use crate::loading::{Loader, Piece};
use crate::naming::FamilyReader;
use crate::{HybridConfig, MixerKind, ModelError, Result};

/// Most layers: a config that claims more is not believed.
const LAYERS_MAX: usize = 4096;

/// In what the blocks of the model types differ.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Traits {
    /// Queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Attention's output has a bias.
    pub output_bias: bool,
    /// Queries and keys are normed head by head.
    pub head_norms: bool,
    /// The halves of a block are normed again before they are added, and norms are stored as offsets from one.
    pub four_norms: bool,
    /// Of the feed-forward half.
    pub activation: Activation,
}

/// The numbers that all of them name alike; every layer sees everything.
///
/// # Errors
/// [`ModelError::Config`] naming the key that is missing or wrong.
pub(crate) fn config(fields: &Fields<'_>) -> Result<HybridConfig> {
    let (hidden, heads) = (fields.size("hidden_size")?, fields.size("num_attention_heads")?);
    let head_dim = fields.size_or("head_dim", hidden / heads.max(1))?;
    let rotary = (head_dim as f64 * fields.rope("partial_rotary_factor", 1.0)?) as usize;
    let layers = fields.size("num_hidden_layers")?;
    if layers > LAYERS_MAX {
        return Err(ModelError::Config(format!(
            "num_hidden_layers is {layers}, at most {LAYERS_MAX} are read"
        )));
    }
    let rope_scaling = fields.rope_scaling("full_attention")?;
    if rotary != head_dim && rope_scaling.attention_factor() != 1.0 {
        return Err(ModelError::Config("yarn is not supported where only part of a head turns".into()));
    }
    // YaRN multiplies turned queries and keys by a factor each, so scores by its square.
    let sharpened = rope_scaling.attention_factor().powi(2);
    Ok(HybridConfig {
        model_type: fields.model_type(),
        hidden,
        vocab: fields.size("vocab_size")?,
        layers: fields.layer_types()?.unwrap_or(vec![MixerKind::Attention; layers]),
        mtp_layers: 0,
        eps: fields.number_or("rms_norm_eps", 1e-6)? as f32,
        tied: fields.flag("tie_word_embeddings"),
        context_max: fields.size_or("max_position_embeddings", 32768)?,
        heads,
        kv_heads: fields.size_or("num_key_value_heads", heads)?,
        head_dim,
        rope_theta: fields.rope("rope_theta", 10000.0)?,
        rotary,
        rope_scaling,
        sliding_rope_theta: fields.rope("rope_theta", 10000.0)?,
        window: fields.size_or("sliding_window", 0)?,
        attention_scale: (head_dim as f64).powf(-0.5) * sharpened,
        gated: false,
        key_heads: 0,
        value_heads: 0,
        key_dim: 0,
        value_dim: 0,
        conv_width: 0,
        intermediate: fields.size_or("intermediate_size", 0)?,
        moe: None,
    })
}

/// The kinds of layers of a model type whose configs turn windows on by `use_sliding_window`.
pub(crate) fn windows_on_request(fields: &Fields<'_>, config: &mut HybridConfig) -> Result<()> {
    if !fields.flag("use_sliding_window") || config.window == 0 {
        config.layers.fill(MixerKind::Attention);
        config.window = 0;
    } else if fields.get("layer_types").is_none() {
        let from = fields.size_or("max_window_layers", config.layers.len())?;
        config.layers.iter_mut().skip(from).for_each(|kind| *kind = MixerKind::SlidingAttention);
    }
    Ok(())
}

/// Refuses what a config asks for and is not done here.
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
pub(crate) fn load(loader: &Loader<'_>, config: HybridConfig, traits: Traits) -> Result<HybridModel> {
    let mut reader = FamilyReader::new(loader, &config)?;
    reader.norms_are_offsets = traits.four_norms && !loader.parameters().norms_are_scales();
    let root = &reader.root;
    let embedding =
        loader.linear(Piece::whole(format!("{root}embed_tokens"), config.vocab), config.hidden)?;
    let sliding = match config.window {
        0 => reader.frequencies.clone(),
        _ => loader.constant(&config.sliding_inverse_frequencies())?,
    };
    let mut blocks = Vec::with_capacity(config.layers.len());
    for (i, kind) in config.layers.iter().enumerate() {
        let prefix = format!("{root}layers.{i}.");
        let mut mixer = attention(&reader, &format!("{prefix}self_attn."), traits)?;
        if *kind == MixerKind::SlidingAttention {
            mixer.frequencies = sliding.clone();
            mixer.window = Some(config.window);
        }
        blocks.push(block(&reader, &prefix, i, mixer, traits)?);
    }
    let head = if config.tied {
        embedding.clone()
    } else {
        loader.linear(Piece::whole(reader.head_module(), config.vocab), config.hidden)?
    };
    let norm = reader.norm(&format!("{root}norm"), config.hidden)?;
    let embedding_scale = traits.four_norms.then(|| (config.hidden as f32).sqrt());
    let embedding_scale = embedding_scale.map(|scale| loader.constant(&[scale])).transpose()?;
    Ok(HybridModel { embedding, embedding_scale, blocks, norm, head, mtp: None, config })
}

fn attention(reader: &FamilyReader<'_>, prefix: &str, traits: Traits) -> Result<Attention> {
    let c = reader.config;
    let (d, loader) = (c.head_dim, reader.loader);
    let widths = [("q_proj", c.heads * d), ("k_proj", c.kv_heads * d), ("v_proj", c.kv_heads * d)];
    let pieces = widths.map(|(name, rows)| Piece::whole(format!("{prefix}{name}"), rows));
    let mut projection = loader.projection(pieces.into(), c.hidden)?;
    if traits.qkv_bias {
        let names = widths.map(|(name, rows)| (format!("{prefix}{name}.bias"), rows));
        projection.bias = Some(loader.vectors(&names)?);
    }
    let head_norm = |name: &str| match traits.head_norms {
        true => reader.norm(&format!("{prefix}{name}"), d).map(Some),
        false => Ok(None),
    };
    let mut output = loader.single(Piece::whole(format!("{prefix}o_proj"), c.hidden), c.heads * d)?;
    if traits.output_bias {
        output.bias = Some(loader.vector(&format!("{prefix}o_proj.bias"), &[c.hidden], |b| b)?);
    }
    Ok(Attention {
        projection,
        gated: false,
        q_norm: head_norm("q_norm")?,
        k_norm: head_norm("k_norm")?,
        output,
        heads: c.heads,
        kv_heads: c.kv_heads,
        head_dim: d,
        rope: c.rope(),
        frequencies: reader.frequencies.clone(),
        scale: c.attention_scale as f32,
        window: None,
    })
}

fn block(
    reader: &FamilyReader<'_>,
    prefix: &str,
    layer: usize,
    mixer: Attention,
    traits: Traits,
) -> Result<Block> {
    let hidden = reader.config.hidden;
    let norm = |name: &str| reader.norm(&format!("{prefix}{name}"), hidden);
    // Gemma's post_attention_layernorm norms what attention gives; elsewhere it norms what the second half is given.
    let (mixer_out_norm, ff_norm, ff_out_norm): (Option<RmsNorm>, RmsNorm, Option<RmsNorm>) =
        match traits.four_norms {
            false => (None, norm("post_attention_layernorm")?, None),
            true => (
                Some(norm("post_attention_layernorm")?),
                norm("pre_feedforward_layernorm")?,
                Some(norm("post_feedforward_layernorm")?),
            ),
        };
    Ok(Block {
        mixer_norm: norm("input_layernorm")?,
        mixer: Mixer::Attention(mixer),
        mixer_out_norm,
        ff_norm,
        ff: feed_forward(reader, &format!("{prefix}mlp."), layer, traits)?,
        ff_out_norm,
    })
}

fn feed_forward(
    reader: &FamilyReader<'_>,
    prefix: &str,
    layer: usize,
    traits: Traits,
) -> Result<FeedForward> {
    let dense = reader.config.moe.as_ref().is_none_or(|moe| moe.dense_layers.contains(&layer));
    if !dense {
        return reader.feed_forward(prefix);
    }
    let layer = reader.swiglu(prefix, reader.config.intermediate)?;
    Ok(FeedForward::Dense(GatedLayer { activation: traits.activation, ..layer }))
}
