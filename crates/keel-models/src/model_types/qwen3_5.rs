//! `qwen3_5` and `qwen3_5_moe`: Gated DeltaNet and gated attention, dense or with experts, text part.
//!
//! Source: the Hugging Face checkpoints and their conversion by MLX. Vision parameters are not read.

use crate::blocks::GatedDeltaNet;
use crate::hybrid::{Block, HybridModel, Mixer, MtpHead};
use crate::loading::{Loader, SourceRows};
use crate::naming::{FamilyReader, mtp_root};
use crate::{HybridConfig, MixerKind, Result};

/// Reads a model.
pub(crate) fn load(loader: &Loader<'_>, config: HybridConfig) -> Result<HybridModel> {
    load_with(loader, config, gated_delta_net)
}

/// Reads a model with `read_recurrent` for the recurrent layers. The rest is the same for the family.
pub(crate) fn load_with(
    loader: &Loader<'_>,
    config: HybridConfig,
    read_recurrent: fn(&FamilyReader<'_>, &str) -> Result<GatedDeltaNet>,
) -> Result<HybridModel> {
    let reader = FamilyReader::new(loader, &config)?;
    let root = &reader.root;
    let embedding = reader.embedding()?;
    let blocks = reader
        .part()
        .of(&config.layers)
        .map(|(i, kind)| {
            let prefix = format!("{root}layers.{i}.");
            let mixer = match kind {
                MixerKind::Attention | MixerKind::SlidingAttention => {
                    Mixer::Attention(reader.attention(&format!("{prefix}self_attn."))?)
                }
                MixerKind::GatedDelta => {
                    Mixer::GatedDelta(read_recurrent(&reader, &format!("{prefix}linear_attn."))?)
                }
            };
            block(&reader, &prefix, mixer)
        })
        .collect::<Result<_>>()?;
    let output = reader.output(embedding.as_ref())?;
    let mtp = if reader.part().is_last() { mtp_head(&reader)? } else { None };
    Ok(HybridModel {
        part: loader.part().clone(),
        embedding,
        embedding_scale: None,
        growing_queries: None,
        blocks,
        output,
        mtp,
        config,
    })
}

fn block(reader: &FamilyReader<'_>, prefix: &str, mixer: Mixer) -> Result<Block> {
    let hidden = reader.config.hidden;
    Ok(Block {
        mixer_norm: Some(reader.norm(&format!("{prefix}input_layernorm"), hidden)?),
        mixer,
        mixer_out_norm: None,
        ff_norm: Some(reader.norm(&format!("{prefix}post_attention_layernorm"), hidden)?),
        ff: reader.feed_forward(&format!("{prefix}mlp."))?,
        ff_out_norm: None,
    })
}

fn gated_delta_net(reader: &FamilyReader<'_>, prefix: &str) -> Result<GatedDeltaNet> {
    let c = reader.config.recurrent_layers();
    let sources = vec![
        SourceRows::whole(format!("{prefix}in_proj_qkv"), c.conv_channels()),
        SourceRows::whole(format!("{prefix}in_proj_z"), c.values()),
        SourceRows::whole(format!("{prefix}in_proj_a"), c.value_heads),
        SourceRows::whole(format!("{prefix}in_proj_b"), c.value_heads),
    ];
    recurrent_layer(reader, prefix, sources)
}

/// A recurrent layer. `sources` are the rows of qkv, z, a and b.
pub(crate) fn recurrent_layer(
    reader: &FamilyReader<'_>,
    prefix: &str,
    sources: Vec<SourceRows>,
) -> Result<GatedDeltaNet> {
    let (hidden, c) = (reader.config.hidden, reader.config.recurrent_layers());
    let loader = reader.loader;
    Ok(GatedDeltaNet {
        projection: loader.projection(sources, hidden)?,
        conv: reader.conv(&format!("{prefix}conv1d.weight"))?,
        a_log: loader.vector(&format!("{prefix}A_log"), &[c.value_heads], |w| w)?,
        dt_bias: loader.vector(&format!("{prefix}dt_bias"), &[c.value_heads], |w| w)?,
        norm: reader.plain_norm(&format!("{prefix}norm"), c.value_dim)?,
        output: loader.row_parallel(
            SourceRows::whole(format!("{prefix}out_proj"), hidden),
            c.values(),
            loader.sums(),
        )?,
        key_heads: c.key_heads,
        value_heads: c.value_heads,
        key_dim: c.key_dim,
        value_dim: c.value_dim,
    })
}

/// The multi-token-prediction head, if the config has one and the checkpoint contains it: some converters drop it.
///
/// `mtp_num_hidden_layers` counts the layers between the head's one projection and its one norm. All of them run, one
/// after the other, for every draft. (vLLM uses layer i for draft i instead. No published checkpoint has more than one
/// layer. With several, a wrong choice would make drafts worse but change no text.)
fn mtp_head(reader: &FamilyReader<'_>) -> Result<Option<MtpHead>> {
    let c = reader.config;
    if c.mtp_layers == 0 {
        return Ok(None);
    }
    let Some(root) = mtp_root(reader.loader.parameters()) else {
        tracing::info!("the config names a multi-token-prediction head that the checkpoint does not have");
        return Ok(None);
    };
    let blocks = (0..c.mtp_layers)
        .map(|i| {
            let prefix = format!("{root}layers.{i}.");
            let mixer = Mixer::Attention(reader.attention(&format!("{prefix}self_attn."))?);
            block(reader, &prefix, mixer)
        })
        .collect::<Result<_>>()?;
    Ok(Some(MtpHead {
        embedding_norm: reader.norm(&format!("{root}pre_fc_norm_embedding"), c.hidden)?,
        hidden_norm: reader.norm(&format!("{root}pre_fc_norm_hidden"), c.hidden)?,
        fc: reader.loader.linear(SourceRows::whole(format!("{root}fc"), c.hidden), 2 * c.hidden)?,
        blocks,
        norm: reader.norm(&format!("{root}norm"), c.hidden)?,
    }))
}
