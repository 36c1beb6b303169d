//! Vision towers of GGUF models, which are files of their own (`mmproj`): a config and a processor from their metadata.
//! `tower_tensors.rs` has their tensors.
//!
//! Names and keys are those of llama.cpp's converter (`conversion/qwen3vl.py`, `conversion/gemma.py` and gguf-py's
//! `constants.py`). The converter does this to a checkpoint:
//!
//! - Qwen's patch layer is split into one tensor for each of its two frames.
//! - Qwen's mergers of earlier blocks are numbered by their block, not by their place in the list.
//! - Gemma's norm before the projection becomes a scale. The projection stays `[hidden, text hidden]`.
//! - Older files of Gemma have the two feed-forward layers in each other's place. Their shapes tell.

use keel_weights::TensorSource;
use keel_weights::gguf::{GgufFile, GgufValue};
use serde_json::{Value, json};

use super::architecture;
use super::tower_tensors::SECOND_FRAME;
use crate::{ModelError, Result};

/// Projectors that are read, each with the architectures of the text models that it fits.
const PROJECTORS: [(&str, &[&str]); 2] =
    [("qwen3vl_merger", &["qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe"]), ("gemma3", &["gemma3"])];

/// Bounds on the pixels of pictures and videos in the processor files of Qwen3-VL and Qwen3.5. Files rarely have the
/// first two, and have no keys for the others.
const IMAGE_PIXELS: (u64, u64) = (65_536, 16_777_216);
const VIDEO_PIXELS: (u64, u64) = (4096, 25_165_824);

/// Patches along a side of the square that Gemma 3 averages, unless the file says otherwise.
const GEMMA_POOL: u64 = 4;

/// Whether a GGUF model of this architecture may have a vision tower that is read.
pub fn may_see(text: &GgufFile) -> bool {
    PROJECTORS.iter().any(|(_, architectures)| architectures.contains(&architecture(text)))
}

/// Adds a tower to the [config](fn@super::config) of a text model.
///
/// # Errors
/// For a file that is no tower, a tower that is not supported or is for another text model, and for a key or a token
/// that is missing.
pub fn add_tower(config: &mut Value, text: &GgufFile, tower: &GgufFile) -> Result<()> {
    let keys = Keys { file: tower };
    let width = config["hidden_size"].as_u64().unwrap_or(0);
    let is_gemma = keys.projector(architecture(text))? == "gemma3";
    keys.needed("v.patch_embd.weight", 0)?;
    let out = match is_gemma {
        true => keys.needed("mm.input_projection.weight", 1)?,
        false => keys.needed("mm.2.weight", 0)?,
    };
    if out != width {
        let reason =
            format!("the vision tower gives rows of {out} values, and the text model reads rows of {width}");
        return Err(ModelError::Config(reason));
    }
    if !is_gemma {
        keys.check_deepstack(text)?;
    }
    let vocabulary = Vocabulary::of(text);
    let added = if is_gemma { keys.gemma(&vocabulary)? } else { keys.qwen(&vocabulary)? };
    if let (Value::Object(into), Value::Object(from)) = (config, added) {
        into.extend(from);
    }
    Ok(())
}

/// The processor of a tower, as `processor_config.json` has it.
///
/// # Errors
/// As [`add_tower`].
pub fn processor(text: &GgufFile, tower: &GgufFile) -> Result<Value> {
    let keys = Keys { file: tower };
    let (mean, deviation) = (keys.triple("image_mean")?, keys.triple("image_std")?);
    if deviation.contains(&0.0) {
        return Err(ModelError::Config("a clip.vision.image_std of 0 in the mmproj file".into()));
    }
    let scale = |json: &mut Value| {
        json["image_mean"] = json!(mean);
        json["image_std"] = json!(deviation);
    };
    if keys.projector(architecture(text))? == "gemma3" {
        let side = keys.size("image_size")?;
        let mut image = json!({
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": side, "width": side},
        });
        scale(&mut image);
        return Ok(json!({"image_processor": image, "image_seq_length": keys.gemma_rows()?}));
    }
    let bound = |key: &str, default: u64| keys.number(key).unwrap_or(default);
    let processor = |kind: &str, (least, most): (u64, u64)| -> Result<Value> {
        let mut json = json!({
            kind: "Qwen",
            "patch_size": keys.size("patch_size")?,
            "merge_size": bound("spatial_merge_size", 2),
            "temporal_patch_size": keys.frames(),
            "size": {"shortest_edge": least, "longest_edge": most},
        });
        scale(&mut json);
        Ok(json)
    };
    let pixels = (bound("image_min_pixels", IMAGE_PIXELS.0), bound("image_max_pixels", IMAGE_PIXELS.1));
    if pixels.0 > pixels.1 {
        let reason =
            format!("pictures of at least {} and at most {} pixels in the mmproj file", pixels.0, pixels.1);
        return Err(ModelError::Config(reason));
    }
    Ok(json!({
        "image_processor": processor("image_processor_type", pixels)?,
        "video_processor": processor("video_processor_type", VIDEO_PIXELS)?,
    }))
}

/// Metadata of a tower.
pub(super) struct Keys<'a> {
    pub file: &'a GgufFile,
}

impl Keys<'_> {
    fn get(&self, key: &str) -> Option<&GgufValue> {
        self.file.metadata().get(&format!("clip.{key}"))
    }

    pub fn number(&self, key: &str) -> Option<u64> {
        self.get(&format!("vision.{key}"))?.as_u64()
    }

    fn size(&self, key: &str) -> Result<u64> {
        let missing = || ModelError::Config(format!("the mmproj file has no whole number clip.vision.{key}"));
        self.number(key).ok_or_else(missing)
    }

    /// An extent of a tensor.
    pub fn extent(&self, tensor: &str, axis: usize) -> Option<u64> {
        let shape = &self.file.entry(tensor)?.shape;
        shape.get(axis).map(|extent| *extent as u64)
    }

    /// An extent of a tensor that a tower has.
    fn needed(&self, tensor: &str, axis: usize) -> Result<u64> {
        self.extent(tensor, axis)
            .ok_or_else(|| ModelError::Config(format!("the mmproj file has no {tensor}; download it again")))
    }

    fn triple(&self, key: &str) -> Result<[f64; 3]> {
        let values = self.get(&format!("vision.{key}")).and_then(GgufValue::as_array).unwrap_or_default();
        let values: Option<Vec<f64>> = values.iter().map(GgufValue::as_f64).collect();
        let triple = values.and_then(|values| <[f64; 3]>::try_from(values).ok());
        triple.ok_or_else(|| {
            ModelError::Config(format!("clip.vision.{key} of the mmproj file is not three numbers"))
        })
    }

    /// Frames of a patch. The converter splits those of two frames.
    fn frames(&self) -> usize {
        if self.file.contains(SECOND_FRAME) { 2 } else { 1 }
    }

    /// The projector, which is one that fits the text model.
    fn projector(&self, text: &str) -> Result<&str> {
        let wrong = |reason: String| Err(ModelError::Config(reason));
        let own = architecture(self.file);
        if own != "clip" {
            return wrong(format!(
                "its general.architecture is {own:?}: this is no mmproj file, which has \"clip\""
            ));
        }
        let kind = self.get("projector_type").or(self.get("vision.projector_type"));
        let kind = kind.and_then(GgufValue::as_str).unwrap_or_default();
        let supported = || PROJECTORS.map(|(name, _)| name).join(" and ");
        match PROJECTORS.iter().find(|(name, _)| *name == kind) {
            None => {
                wrong(format!("its clip.projector_type {kind:?} is not supported; there are {}", supported()))
            }
            Some((_, fitting)) if !fitting.contains(&text) => wrong(format!(
                "a tower of {kind} does not fit a text model of {text}; it fits {}",
                fitting.join(", ")
            )),
            Some(_) => Ok(kind),
        }
    }

    fn activation(&self) -> Result<&'static str> {
        let is = |key: &str| self.get(key).and_then(GgufValue::as_bool) == Some(true);
        match (is("use_gelu"), is("use_silu")) {
            (true, _) => Ok("gelu_pytorch_tanh"),
            (false, true) => Ok("silu"),
            (false, false) => Err(ModelError::Config(
                "the mmproj file has neither clip.use_gelu nor clip.use_silu; the quick GELU that this stands for is not \
                 supported"
                    .into(),
            )),
        }
    }

    /// The blocks with a merger of their own, ascending, as their tensors say.
    pub fn deepstack(&self) -> Vec<usize> {
        let blocks = self
            .file
            .names()
            .filter_map(|name| name.strip_prefix("v.deepstack.")?.strip_suffix(".fc1.weight")?.parse().ok());
        let mut blocks: Vec<usize> = blocks.collect();
        blocks.sort_unstable();
        blocks
    }

    /// Refuses a tower whose mergers of earlier blocks are not those that its flags name, or that the text model adds.
    fn check_deepstack(&self, text: &GgufFile) -> Result<()> {
        let found = self.deepstack();
        let flags = self.get("vision.is_deepstack_layers").and_then(GgufValue::as_array);
        let is_set = |flag: &GgufValue| flag.as_bool().unwrap_or_else(|| flag.as_u64().unwrap_or(0) != 0);
        let named = flags.map(|all| (0..all.len()).filter(|&i| is_set(&all[i])).collect::<Vec<_>>());
        let kind = architecture(text);
        // Qwen3.5 adds no features of earlier blocks.
        let wanted = match kind {
            "qwen3vl" | "qwen3vlmoe" => {
                text.metadata().get(&format!("{kind}.n_deepstack_layers")).and_then(GgufValue::as_u64)
            }
            _ => Some(0),
        };
        let reason = if named.as_ref().is_some_and(|named| *named != found) {
            format!("the mmproj file has mergers of blocks {found:?}, and its flags name {named:?}")
        } else if wanted.is_some_and(|wanted| wanted != found.len() as u64) {
            let (wanted, count) = (wanted.unwrap_or(0), found.len());
            format!(
                "the vision tower gives features of {count} earlier blocks, and this {kind} text model adds {wanted}"
            )
        } else {
            return Ok(());
        };
        Err(ModelError::Config(reason))
    }

    fn qwen(&self, vocabulary: &Vocabulary<'_>) -> Result<Value> {
        Ok(json!({
            "image_token_id": vocabulary.id("<|image_pad|>")?,
            "video_token_id": vocabulary.id("<|video_pad|>")?,
            "vision_start_token_id": vocabulary.id("<|vision_start|>")?,
            "vision_end_token_id": vocabulary.id("<|vision_end|>")?,
            "vision_config": {
                "depth": self.size("block_count")?,
                "hidden_size": self.size("embedding_length")?,
                "num_heads": self.size("attention.head_count")?,
                "intermediate_size": self.size("feed_forward_length")?,
                "num_position_embeddings": self.extent("v.position_embd.weight", 0),
                "patch_size": self.size("patch_size")?,
                "spatial_merge_size": self.number("spatial_merge_size").unwrap_or(2),
                "temporal_patch_size": self.frames(),
                "hidden_act": self.activation()?,
                "deepstack_visual_indexes": self.deepstack(),
            },
        }))
    }

    fn gemma_rows(&self) -> Result<u64> {
        let side = self.size("image_size")? / self.size("patch_size")?.max(1);
        let pool = self.number("projector.scale_factor").unwrap_or(GEMMA_POOL).max(1);
        // A side that is too large is refused when the config is read.
        Ok((side / pool).saturating_mul(side / pool))
    }

    fn gemma(&self, vocabulary: &Vocabulary<'_>) -> Result<Value> {
        let eps = self.get("vision.attention.layer_norm_epsilon").and_then(GgufValue::as_f64);
        Ok(json!({
            "model_type": "gemma3",
            "image_token_id": vocabulary.image_of_gemma()?,
            "boi_token_id": vocabulary.id("<start_of_image>")?,
            "eoi_token_id": vocabulary.id("<end_of_image>")?,
            "mm_tokens_per_image": self.gemma_rows()?,
            "vision_config": {
                "num_hidden_layers": self.size("block_count")?,
                "hidden_size": self.size("embedding_length")?,
                "num_attention_heads": self.size("attention.head_count")?,
                "intermediate_size": self.size("feed_forward_length")?,
                "image_size": self.size("image_size")?,
                "patch_size": self.size("patch_size")?,
                "layer_norm_eps": eps.unwrap_or(1e-6),
                "hidden_act": self.activation()?,
            },
        }))
    }
}

/// The tokens of a text model.
struct Vocabulary<'a>(&'a [GgufValue]);

impl Vocabulary<'_> {
    fn of(text: &GgufFile) -> Vocabulary<'_> {
        let tokens = text.metadata().get("tokenizer.ggml.tokens").and_then(GgufValue::as_array);
        Vocabulary(tokens.unwrap_or_default())
    }

    fn find(&self, is: impl Fn(&str) -> bool) -> Option<usize> {
        self.0.iter().rposition(|token| token.as_str().is_some_and(&is))
    }

    fn id(&self, token: &str) -> Result<usize> {
        self.find(|text| text == token).ok_or_else(|| {
            ModelError::Config(format!(
                "the text model's vocabulary has no {token}, which stands for pictures"
            ))
        })
    }

    /// The token that stands for a row of a picture. Published files of Gemma 3 end one entry before it. Then an unused
    /// entry stands for it: the tower's features replace its embedding, so nothing depends on which it is.
    fn image_of_gemma(&self) -> Result<usize> {
        let own = self.id("<image_soft_token>");
        own.or_else(|error| self.find(|text| text.starts_with("<unused")).ok_or(error))
    }
}
