//! `qwen3_next`: as `qwen3_5_moe`, but one projection holds q, k, v and z, interleaved by key head; another b and a.

use std::ops::Range;

use crate::blocks::GatedDeltaNet;
use crate::hybrid::HybridModel;
use crate::loading::{Loader, SourceRows};
use crate::naming::FamilyReader;
use crate::{HybridConfig, Result};

/// Reads a model.
pub(crate) fn load(loader: &Loader<'_>, config: HybridConfig) -> Result<HybridModel> {
    crate::model_types::qwen3_5::load_with(loader, config, gated_delta_net)
}

fn gated_delta_net(reader: &FamilyReader<'_>, prefix: &str) -> Result<GatedDeltaNet> {
    let c = reader.config.recurrent_layers();
    let (dk, ratio) = (c.key_dim, c.value_heads / c.key_heads);
    let values = ratio * c.value_dim;
    // Rows of one key head: q, k, then the values and gates of its value heads. In the other projection: its b, then
    // its a.
    let wide = format!("{prefix}in_proj_qkvz");
    let wide_total = c.key_heads * (2 * dk + 2 * values);
    let qkvz = |from: usize, len: usize| per_head(c.key_heads, 2 * dk + 2 * values, from, len);
    let qkv = [qkvz(0, dk), qkvz(dk, dk), qkvz(2 * dk, values)].concat();
    let narrow = format!("{prefix}in_proj_ba");
    let narrow_total = 2 * c.value_heads;
    let sources = vec![
        SourceRows::rows(&wide, wide_total, qkv),
        SourceRows::rows(&wide, wide_total, qkvz(2 * dk + values, values)),
        SourceRows::rows(&narrow, narrow_total, per_head(c.key_heads, 2 * ratio, ratio, ratio)),
        SourceRows::rows(&narrow, narrow_total, per_head(c.key_heads, 2 * ratio, 0, ratio)),
    ];
    crate::model_types::qwen3_5::recurrent_layer(reader, prefix, sources)
}

/// Rows `from..from + len` of each of `heads` runs of `stride` rows.
fn per_head(heads: usize, stride: usize, from: usize, len: usize) -> Vec<Range<usize>> {
    (0..heads).map(|h| h * stride + from..h * stride + from + len).collect()
}
