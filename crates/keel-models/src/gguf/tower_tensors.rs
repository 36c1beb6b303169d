//! The tensors of a vision tower's GGUF file under the names of Hugging Face checkpoints.

use std::ops::Range;

use keel_array::{WeightFormat, WeightSpec};
use keel_weights::TensorSource;
use keel_weights::gguf::GgufFile;
use keel_weights::quantize::RowSource;

use super::names::split;
use super::tower::Keys;
use crate::loading::{CheckpointParameters, Parameters, RowSink};
use crate::{ModelError, Result};

/// The roots of a tower's parameters in checkpoints.
const QWEN: &str = "model.visual.";
const SIGLIP: &str = "vision_tower.vision_model.";
const PROJECTOR: &str = "multi_modal_projector.";

/// Parts of a block.
const BLOCK: [(&str, &str); 14] = [
    ("norm1", "ln1"),
    ("norm2", "ln2"),
    ("attn.qkv", "attn_qkv"),
    ("attn.proj", "attn_out"),
    ("mlp.linear_fc1", "ffn_up"),
    ("mlp.linear_fc2", "ffn_down"),
    ("layer_norm1", "ln1"),
    ("layer_norm2", "ln2"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.out_proj", "attn_out"),
    ("mlp.fc1", "ffn_up"),
    ("mlp.fc2", "ffn_down"),
];

/// Layers outside the blocks.
const OUTSIDE: [(&str, &str); 10] = [
    ("model.visual.patch_embed.proj", "v.patch_embd"),
    ("model.visual.pos_embed", "v.position_embd"),
    ("model.visual.merger.norm", "v.post_ln"),
    ("model.visual.merger.linear_fc1", "mm.0"),
    ("model.visual.merger.linear_fc2", "mm.2"),
    ("vision_tower.vision_model.embeddings.patch_embedding", "v.patch_embd"),
    ("vision_tower.vision_model.embeddings.position_embedding", "v.position_embd"),
    ("vision_tower.vision_model.post_layernorm", "v.post_ln"),
    ("multi_modal_projector.mm_soft_emb_norm", "mm.soft_emb_norm"),
    ("multi_modal_projector.mm_input_projection_weight", "mm.input_projection.weight"),
];

/// The weights of Qwen's patch layer for the second of its two frames.
pub(super) const SECOND_FRAME: &str = "v.patch_embd.weight.1";

/// The tensors of a tower.
pub(super) struct TowerTensors<'a> {
    file: &'a GgufFile,
    deepstack: Vec<usize>,
    /// Whether the feed-forward layers have each other's names.
    is_swapped: bool,
}

impl<'a> TowerTensors<'a> {
    pub fn new(file: &'a GgufFile) -> TowerTensors<'a> {
        let keys = Keys { file };
        let (rows, cols) = (keys.extent("v.blk.0.ffn_up.weight", 0), keys.extent("v.blk.0.ffn_up.weight", 1));
        let hidden = keys.number("embedding_length");
        TowerTensors { file, deepstack: keys.deepstack(), is_swapped: rows == hidden && cols != hidden }
    }

    /// Whether a parameter belongs to a tower.
    pub fn owns(name: &str) -> bool {
        [QWEN, SIGLIP, PROJECTOR].iter().any(|root| name.starts_with(root))
    }

    /// The tensor of a parameter, with its suffix if it has one.
    fn tensor(&self, name: &str) -> Option<String> {
        let (module, suffix) = split(name);
        let found = match OUTSIDE.iter().find(|(own, _)| *own == module) {
            Some((_, stored)) => (*stored).to_string(),
            None => self.block(module).or_else(|| self.merger(module))?,
        };
        Some(format!("{found}{suffix}"))
    }

    fn block(&self, module: &str) -> Option<String> {
        let rest = module.strip_prefix(QWEN).and_then(|rest| rest.strip_prefix("blocks."));
        let rest = rest
            .or_else(|| module.strip_prefix(SIGLIP).and_then(|rest| rest.strip_prefix("encoder.layers.")));
        let (number, part) = rest?.split_once('.')?;
        let number: usize = number.parse().ok()?;
        let stored = match BLOCK.iter().find(|(own, _)| *own == part)?.1 {
            "ffn_up" if self.is_swapped => "ffn_down",
            "ffn_down" if self.is_swapped => "ffn_up",
            stored => stored,
        };
        Some(format!("v.blk.{number}.{stored}"))
    }

    /// The merger of an earlier block.
    fn merger(&self, module: &str) -> Option<String> {
        let (place, part) = module.strip_prefix("model.visual.deepstack_merger_list.")?.split_once('.')?;
        let block = self.deepstack.get(place.parse::<usize>().ok()?)?;
        let part = if part == "norm" { part } else { part.strip_prefix("linear_")? };
        Some(format!("v.deepstack.{block}.{part}"))
    }

    fn named(&self, name: &str) -> Result<String> {
        self.tensor(name).ok_or_else(|| ModelError::Config(format!("an mmproj file has no name for {name}")))
    }

    /// Whether a parameter is the patch layer's weight, in one tensor for each of two frames.
    fn is_in_frames(&self, name: &str) -> bool {
        name == "model.visual.patch_embed.proj.weight" && self.file.contains(SECOND_FRAME)
    }

    pub fn contains(&self, name: &str) -> bool {
        self.tensor(name).is_some_and(|tensor| self.file.contains(&tensor))
    }

    pub fn shape(&self, name: &str) -> Option<Vec<usize>> {
        let mut shape = self.file.entry(&self.tensor(name)?)?.shape.clone();
        if self.is_in_frames(name) && shape.len() > 1 {
            shape.insert(2, 2);
        }
        Some(shape)
    }

    pub fn linear_format(&self, module: &str, rows: usize, cols: usize) -> Result<WeightFormat> {
        CheckpointParameters(self.file).linear_format(&self.named(module)?, None, rows, cols)
    }

    pub fn linear_rows(
        &self,
        module: &str,
        rows: Range<usize>,
        spec: &WeightSpec,
        sink: &mut RowSink<'_>,
    ) -> Result<()> {
        CheckpointParameters(self.file).linear_rows(&self.named(module)?, None, rows, spec, sink)
    }

    pub fn release(&self, module: &str) {
        if let Some(tensor) = self.tensor(module) {
            self.file.release_linear(&tensor);
        }
    }

    pub fn values(&self, name: &str) -> Result<Vec<f32>> {
        let tensor = self.named(name)?;
        let values = self.all(&tensor)?;
        if !self.is_in_frames(name) {
            return Ok(values);
        }
        // `[hidden, 3, y, x]` for each frame become `[hidden, 3, frame, y, x]`.
        let shape = |name: &str| self.file.entry(name).map(|entry| entry.shape.clone());
        let (first, last) = (shape(&tensor).unwrap_or_default(), shape(SECOND_FRAME).unwrap_or_default());
        let [_, 3, height, width] = first[..] else {
            let (expected, got) = ("(hidden, 3, patch, patch)".into(), format!("{first:?}"));
            return Err(ModelError::Shape { name: tensor, expected, got });
        };
        if last != first {
            let (expected, got) = (format!("{first:?}"), format!("{last:?}"));
            return Err(ModelError::Shape { name: SECOND_FRAME.into(), expected, got });
        }
        let (second, plane) = (self.all(SECOND_FRAME)?, (height * width).max(1));
        let planes = values.chunks_exact(plane).zip(second.chunks_exact(plane));
        Ok(planes.flat_map(|(first, second)| [first, second]).flatten().copied().collect())
    }

    /// All values of a tensor in the file's order.
    fn all(&self, tensor: &str) -> Result<Vec<f32>> {
        let missing = || ModelError::Config(format!("the mmproj file has no {tensor}"));
        let shape = &self.file.entry(tensor).ok_or_else(missing)?.shape;
        let rows = if shape.len() < 2 { 1 } else { shape[..shape.len() - 1].iter().product() };
        let mut values = vec![0.0; shape.iter().product()];
        self.file.rows_f32(tensor, 0..rows, &mut values)?;
        TensorSource::check_intact(self.file)?;
        Ok(values)
    }
}
