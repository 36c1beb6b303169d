//! The numbers of a tower, read from `vision_config`.

use serde_json::Value;

use super::positions::ImageRun;
use crate::{ModelError, Result};

/// Largest width, count or length of a tower: far above all towers, and products stay far from an overflow.
const EXTENT_MAX: usize = 1 << 20;

/// Functions between the two layers of a feed-forward block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TowerActivation {
    /// GELU in its tanh form.
    GeluTanh,
    /// GELU with the error function.
    Gelu,
    /// `x * sigmoid(x)`.
    Silu,
}

/// The special tokens around a picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VisionTokens {
    /// Stands for one row of a picture.
    pub image: u32,
    /// Stands for one row of a video, if the model reads videos.
    pub video: Option<u32>,
    /// Before the rows of a picture.
    pub start: u32,
    /// After them.
    pub end: u32,
}

/// Differences between towers.
#[derive(Clone, Debug, PartialEq)]
pub enum TowerKind {
    /// Qwen3-VL and Qwen3.5: any grid of patches, positions rotated and interpolated, `merge * merge` patches in a row.
    Qwen {
        /// Frames of a patch.
        frames: usize,
        /// Patches along a side of the square that becomes one row.
        merge: usize,
        /// Entries along a side of the table of positions.
        table_side: usize,
        /// Base of the rotary frequencies.
        theta: f64,
        /// Blocks whose outputs give further features, in the order of their mergers in the checkpoint. In the order of
        /// the blocks, the features are added after the first text layers.
        deepstack: Vec<usize>,
    },
    /// Gemma 3: SigLIP on pictures of one size, averaged to a fixed number of rows. These rows see each other in the
    /// text model.
    Siglip {
        /// Pixels along a side of a picture.
        image_size: usize,
        /// Rows of a picture.
        rows: usize,
    },
}

/// A tower.
#[derive(Clone, Debug, PartialEq)]
pub struct VisionConfig {
    /// Kind, with its own numbers.
    pub kind: TowerKind,
    /// Blocks.
    pub depth: usize,
    /// Width.
    pub hidden: usize,
    /// Heads of attention.
    pub heads: usize,
    /// Width of the feed-forward layer.
    pub intermediate: usize,
    /// Added to the variance under every root.
    pub eps: f32,
    /// Function of the feed-forward layer.
    pub activation: TowerActivation,
    /// Pixels along a side of a patch.
    pub patch: usize,
    /// Width of the text model.
    pub text_hidden: usize,
    /// The tokens around pictures.
    pub tokens: VisionTokens,
}

/// A section of a config, in which numbers are looked up.
struct Section<'a>(&'a Value);

impl Section<'_> {
    fn size_of(&self, keys: &[&str], default: Option<usize>) -> Result<usize> {
        let found = keys.iter().find_map(|key| self.0.get(*key).filter(|v| !v.is_null()).map(|v| (*key, v)));
        let (key, number) = match found {
            Some((key, value)) => (key, value.as_u64().map(|n| n as usize).ok_or_else(|| value.to_string())),
            None => (keys[0], default.ok_or_else(|| "missing".to_string())),
        };
        match number {
            Ok(n) if (1..=EXTENT_MAX).contains(&n) => Ok(n),
            Ok(n) => Err(format!("{n}")),
            Err(found) => Err(found),
        }
        .map_err(|found| {
            let reason =
                format!("vision_config.{key} is {found}, expected a whole number from 1 to {EXTENT_MAX}");
            ModelError::Config(reason)
        })
    }

    fn number_or(&self, key: &str, default: f64) -> Result<f64> {
        match self.0.get(key).filter(|v| !v.is_null()) {
            None => Ok(default),
            // Also as f32, in which most are used.
            Some(value) => {
                value.as_f64().filter(|x| (*x as f32).is_finite() && *x as f32 > 0.0).ok_or_else(|| {
                    ModelError::Config(format!("vision_config.{key} is {value}, expected a number above 0"))
                })
            }
        }
    }

    fn activation(&self, default: &str) -> Result<TowerActivation> {
        match self.0["hidden_act"].as_str().unwrap_or(default) {
            "gelu_pytorch_tanh" | "gelu_new" => Ok(TowerActivation::GeluTanh),
            "gelu" => Ok(TowerActivation::Gelu),
            "silu" | "swish" => Ok(TowerActivation::Silu),
            other => Err(ModelError::Config(format!(
                "vision_config.hidden_act {other:?} is not supported; there are gelu_pytorch_tanh, gelu and silu"
            ))),
        }
    }
}

impl VisionConfig {
    pub(super) fn from_json(config: &Value) -> Result<Option<VisionConfig>> {
        let vision = &config["vision_config"];
        if !vision.is_object() {
            return Ok(None);
        }
        let parsed = match config["model_type"].as_str().unwrap_or_default() {
            "qwen3_5" | "qwen3_5_moe" | "qwen3_vl" | "qwen3_vl_moe" => qwen(config, &Section(vision))?,
            "gemma3" => gemma(config, &Section(vision))?,
            _ => return Ok(None),
        };
        parsed.check()?;
        Ok(Some(parsed))
    }

    fn check(&self) -> Result<()> {
        let wrong = if !self.hidden.is_multiple_of(self.heads) {
            format!("hidden_size {} is not a multiple of the {} heads", self.hidden, self.heads)
        } else if self.depth > 4096 {
            format!("a depth of {} is above 4096", self.depth)
        } else {
            match &self.kind {
                TowerKind::Qwen { table_side: 0, .. } => {
                    "num_position_embeddings is not a square".to_string()
                }
                TowerKind::Qwen { .. } if !self.head_dim().is_multiple_of(4) => {
                    format!("heads of {} cannot be turned by rows and columns", self.head_dim())
                }
                TowerKind::Qwen { deepstack, .. } if deepstack.iter().any(|&block| block >= self.depth) => {
                    format!("deepstack_visual_indexes {deepstack:?} name blocks beyond {}", self.depth)
                }
                TowerKind::Qwen { deepstack, .. } if has_repeats(deepstack) => {
                    format!("deepstack_visual_indexes {deepstack:?} name a block twice")
                }
                TowerKind::Siglip { image_size, .. } if !image_size.is_multiple_of(self.patch) => {
                    format!("image_size {image_size} is not a multiple of patch_size {}", self.patch)
                }
                TowerKind::Siglip { rows, .. } if self.pool().is_none() => {
                    format!("{rows} rows do not divide a grid of {} patches a side", self.grid_side())
                }
                _ => return Ok(()),
            }
        };
        Err(ModelError::Config(format!("vision_config: {wrong}")))
    }

    /// Size of a head.
    pub fn head_dim(&self) -> usize {
        self.hidden / self.heads
    }

    /// Patches along a side of a picture, for a tower with one picture size; otherwise 0.
    pub fn grid_side(&self) -> usize {
        match self.kind {
            TowerKind::Qwen { .. } => 0,
            TowerKind::Siglip { image_size, .. } => image_size / self.patch,
        }
    }

    /// Patches along a side of the square that is averaged to one row.
    pub fn pool(&self) -> Option<usize> {
        let TowerKind::Siglip { rows, .. } = self.kind else { return None };
        let side = rows.isqrt();
        (side > 0 && side * side == rows && self.grid_side().is_multiple_of(side))
            .then(|| self.grid_side() / side)
    }

    /// Patches along a side of a block whose patches are consecutive in the tower's order.
    pub fn block_side(&self) -> usize {
        match self.kind {
            TowerKind::Qwen { merge, .. } => merge,
            TowerKind::Siglip { .. } => self.pool().unwrap_or(1),
        }
    }

    /// Values of a patch.
    pub fn patch_values(&self) -> usize {
        let frames = match self.kind {
            TowerKind::Qwen { frames, .. } => frames,
            TowerKind::Siglip { .. } => 1,
        };
        3 * frames * self.patch * self.patch
    }

    /// Number of sets of features: one that replaces embeddings, and those added after text layers.
    pub fn levels(&self) -> usize {
        match &self.kind {
            TowerKind::Qwen { deepstack, .. } => 1 + deepstack.len(),
            TowerKind::Siglip { .. } => 1,
        }
    }

    /// Rows that a picture of `h` by `w` patches becomes, or a group of a video's frames.
    pub fn rows_of(&self, h: usize, w: usize) -> usize {
        match self.kind {
            TowerKind::Qwen { merge, .. } => h * w / (merge * merge),
            TowerKind::Siglip { rows, .. } => rows,
        }
    }

    /// The token runs of `t` groups of `h` by `w` patches. `first` is the row of the first run, and afterwards the row
    /// after the last run.
    pub fn runs_of(&self, t: usize, h: usize, w: usize, first: &mut usize) -> Vec<ImageRun> {
        let (groups, height, width) = match self.kind {
            TowerKind::Qwen { merge, .. } => (t, h / merge, w / merge),
            TowerKind::Siglip { rows, .. } => (1, 1, rows),
        };
        let run = |_| {
            let run = ImageRun { height, width, first: *first };
            *first += height * width;
            run
        };
        (0..groups).map(run).collect()
    }

    /// Rows of a picture that see each other in the text model; 0 if they do not.
    pub fn run_rows(&self) -> usize {
        match self.kind {
            TowerKind::Qwen { .. } => 0,
            TowerKind::Siglip { rows, .. } => rows,
        }
    }

    /// Products of numbers that each block costs for `patches` patches. The first also makes rows of the patches, and
    /// the last makes the features.
    pub fn products_per_block(&self, patches: usize) -> Vec<u64> {
        // No product of a sound config reaches 2^128: each factor is at most 2^63.
        let [n, hidden, inner] = [patches, self.hidden, self.intermediate].map(|n| n as u128);
        let merged = self.block_side().pow(2) as u128;
        let wide = merged * hidden;
        let text = self.text_hidden as u128;
        let (features, deepstack): (u128, &[usize]) = match &self.kind {
            TowerKind::Qwen { deepstack, .. } => {
                ((n / merged).saturating_mul(wide * (wide + text)), deepstack)
            }
            TowerKind::Siglip { .. } => (n / merged * hidden * text, &[]),
        };
        let block = n * hidden * (4 * hidden + 2 * inner) + 2 * n * n * hidden;
        let of = |i: usize| {
            let first = if i == 0 { n * hidden * self.patch_values() as u128 } else { 0 };
            let last = if i + 1 == self.depth { features } else { 0 };
            let deep = deepstack.iter().filter(|&&of| of == i).count() as u128;
            let sum = block
                .saturating_add(first)
                .saturating_add(last)
                .saturating_add(deep.saturating_mul(features));
            u64::try_from(sum).unwrap_or(u64::MAX)
        };
        (0..self.depth).map(of).collect()
    }

    /// Whether the rows of a picture see each other in the text model.
    pub fn is_bidirectional(&self) -> bool {
        matches!(self.kind, TowerKind::Siglip { .. })
    }
}

fn has_repeats(list: &[usize]) -> bool {
    list.iter().enumerate().any(|(i, one)| list[..i].contains(one))
}

/// The level of the features of block `block`, if it has any. The features that replace embeddings are level 0.
pub(super) fn level_of(deepstack: &[usize], block: usize) -> Option<usize> {
    deepstack.contains(&block).then(|| 1 + deepstack.iter().filter(|&&other| other < block).count())
}

fn token(config: &Value, keys: [&str; 2], default: Option<u32>) -> Result<u32> {
    let found = keys.iter().find_map(|key| config.get(*key).filter(|v| !v.is_null()));
    let id = match found {
        None => default,
        Some(value) => value.as_u64().and_then(|id| u32::try_from(id).ok()),
    };
    id.ok_or_else(|| ModelError::Config(format!("{} is missing or no token id", keys[0])))
}

fn text_hidden(config: &Value) -> Result<usize> {
    let size = config["text_config"]["hidden_size"].as_u64().or(config["hidden_size"].as_u64());
    size.map(|n| n as usize).ok_or_else(|| ModelError::Config("hidden_size is missing".into()))
}

fn qwen(config: &Value, section: &Section<'_>) -> Result<VisionConfig> {
    let table = section.size_of(&["num_position_embeddings"], None)?;
    let table_side = table.isqrt();
    let theta = &section.0["rope_parameters"];
    let deepstack = match section.0["deepstack_visual_indexes"].as_array() {
        None => Vec::new(),
        Some(list) => {
            let blocks: Option<Vec<usize>> = list.iter().map(|v| v.as_u64().map(|n| n as usize)).collect();
            blocks.ok_or_else(|| {
                ModelError::Config(
                    "vision_config.deepstack_visual_indexes is no list of whole numbers".into(),
                )
            })?
        }
    };
    let channels = section.size_of(&["in_channels", "in_chans"], Some(3))?;
    if channels != 3 {
        return Err(ModelError::Config(format!("vision_config.in_channels is {channels}, expected 3")));
    }
    let text_hidden = text_hidden(config)?;
    let out = section.size_of(&["out_hidden_size"], Some(text_hidden))?;
    if out != text_hidden {
        return Err(ModelError::Config(format!(
            "vision_config.out_hidden_size is {out}, the text model's hidden_size {text_hidden}"
        )));
    }
    Ok(VisionConfig {
        kind: TowerKind::Qwen {
            frames: section.size_of(&["temporal_patch_size"], Some(2))?,
            merge: section.size_of(&["spatial_merge_size"], Some(2))?,
            table_side: if table_side * table_side == table { table_side } else { 0 },
            theta: Section(theta).number_or("rope_theta", 10000.0)?,
            deepstack,
        },
        depth: section.size_of(&["depth"], None)?,
        hidden: section.size_of(&["hidden_size"], None)?,
        heads: section.size_of(&["num_heads"], None)?,
        intermediate: section.size_of(&["intermediate_size"], None)?,
        eps: 1e-6,
        activation: section.activation("gelu_pytorch_tanh")?,
        patch: section.size_of(&["patch_size"], Some(16))?,
        text_hidden,
        tokens: VisionTokens {
            image: token(config, ["image_token_id", "image_token_index"], None)?,
            video: token(config, ["video_token_id", "video_token_index"], None).ok(),
            start: token(config, ["vision_start_token_id", "vision_start_token_index"], None)?,
            end: token(config, ["vision_end_token_id", "vision_end_token_index"], None)?,
        },
    })
}

/// Reads Gemma 3's tower. Published configs leave out keys whose value is the reference's default.
fn gemma(config: &Value, section: &Section<'_>) -> Result<VisionConfig> {
    let rows = config["mm_tokens_per_image"].as_u64().unwrap_or(256) as usize;
    Ok(VisionConfig {
        kind: TowerKind::Siglip { image_size: section.size_of(&["image_size"], Some(224))?, rows },
        depth: section.size_of(&["num_hidden_layers"], Some(12))?,
        hidden: section.size_of(&["hidden_size"], Some(768))?,
        heads: section.size_of(&["num_attention_heads"], Some(12))?,
        intermediate: section.size_of(&["intermediate_size"], Some(3072))?,
        eps: section.number_or("layer_norm_eps", 1e-6)? as f32,
        activation: section.activation("gelu_pytorch_tanh")?,
        patch: section.size_of(&["patch_size"], Some(16))?,
        text_hidden: text_hidden(config).or_else(|error| {
            if config["text_config"]["hidden_size"].is_null() { Ok(2304) } else { Err(error) }
        })?,
        tokens: VisionTokens {
            image: token(config, ["image_token_id", "image_token_index"], Some(262_144))?,
            video: None,
            start: token(config, ["boi_token_id", "boi_token_index"], Some(255_999))?,
            end: token(config, ["eoi_token_id", "eoi_token_index"], Some(256_000))?,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn minimal() -> Value {
        json!({"model_type": "qwen3_vl", "image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7,
            "vision_end_token_id": 8, "text_config": {"hidden_size": 96},
            "vision_config": {"depth": 2, "hidden_size": 48, "num_heads": 2, "intermediate_size": 64,
                "num_position_embeddings": 81, "out_hidden_size": 96, "deepstack_visual_indexes": [0, 1]}})
    }

    #[test]
    fn numbers_are_found() {
        let c = read(minimal()).expect("sound").expect("a tower");
        assert_eq!((c.head_dim(), c.patch_values(), c.levels(), c.block_side()), (24, 1536, 3, 2));
        assert!(read(json!({"model_type": "qwen3"})).expect("sound").is_none());
        let gemma = json!({"model_type": "gemma3", "mm_tokens_per_image": 256, "text_config": {"hidden_size": 2560},
            "vision_config": {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
                "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14}});
        let c = read(gemma).expect("sound").expect("a tower");
        assert_eq!((c.grid_side(), c.pool(), c.tokens.image), (64, Some(4), 262_144));
    }

    fn read(config: Value) -> Result<Option<VisionConfig>> {
        VisionConfig::from_json(&config)
    }

    #[test]
    fn levels_follow_the_blocks_and_mergers_the_list() {
        let levels = [0, 1, 2, 3].map(|block| level_of(&[3, 0, 2], block));
        assert_eq!(levels, [Some(1), None, Some(2), Some(3)]);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (key, value, named) in [
            ("depth", json!(null), "depth"),
            ("num_heads", json!(5), "hidden_size 48 is not a multiple of the 5 heads"),
            ("num_position_embeddings", json!(80), "num_position_embeddings"),
            ("out_hidden_size", json!(97), "out_hidden_size"),
            (
                "deepstack_visual_indexes",
                json!([0, 2]),
                "deepstack_visual_indexes [0, 2] name blocks beyond 2",
            ),
            ("deepstack_visual_indexes", json!([1, 1]), "deepstack_visual_indexes [1, 1] name a block twice"),
            ("hidden_act", json!("relu"), "hidden_act"),
            ("in_channels", json!(1), "in_channels"),
            ("patch_size", json!(0), "patch_size"),
        ] {
            let mut config = minimal();
            config["vision_config"][key] = value;
            let message = read(config).expect_err(key).to_string();
            assert!(message.contains(named) && message.contains("vision_config"), "{key}: {message}");
        }
    }
}
