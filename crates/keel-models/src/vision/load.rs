//! Names of a tower's parameters in checkpoints.

use keel_array::Array;

use super::config::{TowerKind, VisionConfig};
use super::layers::{LayerNorm, TowerAttention, TowerBlock, TwoLayers};
use super::qwen::{self, Merger};
use super::siglip::Projector;
use super::tower::{Tower, TowerEnd};
use crate::blocks::RmsNorm;
use crate::loading::{Loader, Parameters, Projection, SourceRows};
use crate::{ModelError, Result};

/// Epsilon of the layer norms of Qwen's towers.
const QWEN_EPS: f32 = 1e-6;

/// The possible prefixes of the tower's parameters, and the name of the patch layer that identifies them.
fn roots(config: &VisionConfig) -> (&'static [&'static str], &'static str) {
    match config.kind {
        TowerKind::Qwen { .. } => (&["model.visual.", "visual.", "vision_tower."], "patch_embed.proj"),
        TowerKind::Siglip { .. } => (
            &[
                "vision_tower.vision_model.",
                "model.vision_tower.vision_model.",
                "vision_tower.",
                "model.vision_tower.",
            ],
            "embeddings.patch_embedding",
        ),
    }
}

/// The prefix of the tower's parameters, if the checkpoint has them.
pub(super) fn root_of(config: &VisionConfig, parameters: &dyn Parameters) -> Option<&'static str> {
    let (roots, patch) = roots(config);
    roots.iter().copied().find(|root| parameters.contains(&format!("{root}{patch}.weight")))
}

impl Tower {
    /// Reads a tower.
    ///
    /// # Errors
    /// For parameters that are missing or misshapen, or a memory limit that is too small.
    pub fn load(loader: &Loader<'_>, config: VisionConfig) -> Result<Tower> {
        let root = root_of(&config, loader.parameters()).ok_or_else(|| {
            let (roots, patch) = roots(&config);
            let tried: Vec<String> = roots.iter().map(|root| format!("{root}{patch}.weight")).collect();
            ModelError::Config(format!(
                "the checkpoint has no vision tower under any known name ({}): it reads text alone",
                tried.join(", ")
            ))
        })?;
        let reader = Reader { loader, config: &config, root };
        let (patch, positions, blocks, head) = match config.kind.clone() {
            TowerKind::Qwen { frames, table_side, theta, merge, deepstack } => {
                let table = reader.table("pos_embed", table_side * table_side)?;
                let blocks = (0..config.depth).map(|i| reader.qwen_block(i)).collect::<Result<_>>()?;
                let merged = |name: &str, after| reader.merger(name, merge * merge, after);
                let further =
                    (0..deepstack.len()).map(|i| merged(&format!("deepstack_merger_list.{i}."), true));
                let head = TowerEnd::Merged {
                    deepstack: further.collect::<Result<_>>()?,
                    merger: merged("merger.", false)?,
                    frequencies: loader.constant(&qwen::frequencies(config.head_dim(), theta))?,
                };
                (reader.patch("patch_embed.proj", frames)?, table, blocks, head)
            }
            TowerKind::Siglip { .. } => {
                let table = reader.table("embeddings.position_embedding", config.grid_side().pow(2))?;
                let blocks = (0..config.depth).map(|i| reader.siglip_block(i)).collect::<Result<_>>()?;
                let head = TowerEnd::Averaged(reader.projector()?);
                (reader.patch("embeddings.patch_embedding", 1)?, table, blocks, head)
            }
        };
        Ok(Tower { patch, positions, blocks, head, config })
    }
}

struct Reader<'a> {
    loader: &'a Loader<'a>,
    config: &'a VisionConfig,
    root: &'static str,
}

impl Reader<'_> {
    /// Layers that read the same input, with their biases.
    fn projection(&self, names: &[String], rows: usize, cols: usize) -> Result<Projection> {
        let sources: Vec<_> = names.iter().map(|name| SourceRows::whole(name.clone(), rows)).collect();
        let bias = self.loader.biases(&sources)?;
        let mut projection = self.loader.projection(sources, cols)?;
        projection.bias = Some(bias);
        Ok(projection)
    }

    fn one(&self, name: &str, rows: usize, cols: usize) -> Result<Projection> {
        self.projection(&[format!("{}{name}", self.root)], rows, cols)
    }

    fn norm(&self, name: &str, width: usize, eps: f32) -> Result<LayerNorm> {
        let vector = |part: &str| self.loader.vector(&format!("{}{name}.{part}", self.root), &[width], |x| x);
        Ok(LayerNorm { weight: vector("weight")?, bias: vector("bias")?, eps })
    }

    fn table(&self, name: &str, entries: usize) -> Result<Array> {
        self.loader.vector(&format!("{}{name}.weight", self.root), &[entries, self.config.hidden], |x| x)
    }

    /// The convolution over patches as a product. Checkpoints have `[hidden, 3, frames, y, x]`, MLX
    /// `[hidden, frames, y, x, 3]`.
    fn patch(&self, name: &str, frames: usize) -> Result<Projection> {
        let name = format!("{}{name}", self.root);
        let (rows, side) = (self.config.hidden, self.config.patch);
        let inner = frames * side * side;
        let shape = self.loader.parameters().shape(&format!("{name}.weight")).unwrap_or_default();
        let channels_last = shape.last() == Some(&3) && shape.get(1) != Some(&3);
        let order = move |values: Vec<f32>| -> Vec<f32> {
            if !channels_last {
                return values;
            }
            let value = |i: usize| values[i / (3 * inner) * 3 * inner + i % inner * 3 + i / inner % 3];
            (0..values.len()).map(value).collect()
        };
        let mut projection = self.loader.dense(&format!("{name}.weight"), rows, 3 * inner, order)?;
        projection.bias = Some(self.loader.vector(&format!("{name}.bias"), &[rows], |x| x)?);
        Ok(projection)
    }

    fn qwen_block(&self, i: usize) -> Result<TowerBlock> {
        let VisionConfig { hidden, heads, intermediate, activation, .. } = *self.config;
        let name = |part: &str| format!("blocks.{i}.{part}");
        Ok(TowerBlock {
            norm1: self.norm(&name("norm1"), hidden, QWEN_EPS)?,
            attention: TowerAttention {
                projection: self.one(&name("attn.qkv"), 3 * hidden, hidden)?,
                output: self.one(&name("attn.proj"), hidden, hidden)?,
                heads,
                head_dim: self.config.head_dim(),
            },
            norm2: self.norm(&name("norm2"), hidden, QWEN_EPS)?,
            mlp: TwoLayers {
                up: self.one(&name("mlp.linear_fc1"), intermediate, hidden)?,
                down: self.one(&name("mlp.linear_fc2"), hidden, intermediate)?,
                activation,
            },
        })
    }

    fn merger(&self, name: &str, patches: usize, norm_after: bool) -> Result<Merger> {
        let wide = patches * self.config.hidden;
        let normed = if norm_after { wide } else { self.config.hidden };
        Ok(Merger {
            norm: self.norm(&format!("{name}norm"), normed, QWEN_EPS)?,
            norm_after,
            patches,
            layers: TwoLayers {
                up: self.one(&format!("{name}linear_fc1"), wide, wide)?,
                down: self.one(&format!("{name}linear_fc2"), self.config.text_hidden, wide)?,
                // Always GELU, also if the blocks have another activation.
                activation: super::config::TowerActivation::Gelu,
            },
        })
    }

    fn siglip_block(&self, i: usize) -> Result<TowerBlock> {
        let VisionConfig { hidden, heads, intermediate, activation, eps, .. } = *self.config;
        let name = |part: &str| format!("encoder.layers.{i}.{part}");
        let qkv = ["q_proj", "k_proj", "v_proj"]
            .map(|n| format!("{}{}", self.root, name(&format!("self_attn.{n}"))));
        Ok(TowerBlock {
            norm1: self.norm(&name("layer_norm1"), hidden, eps)?,
            attention: TowerAttention {
                projection: self.projection(&qkv, hidden, hidden)?,
                output: self.one(&name("self_attn.out_proj"), hidden, hidden)?,
                heads,
                head_dim: self.config.head_dim(),
            },
            norm2: self.norm(&name("layer_norm2"), hidden, eps)?,
            mlp: TwoLayers {
                up: self.one(&name("mlp.fc1"), intermediate, hidden)?,
                down: self.one(&name("mlp.fc2"), hidden, intermediate)?,
                activation,
            },
        })
    }

    fn projector(&self) -> Result<Projector> {
        let VisionConfig { hidden, text_hidden, eps, .. } = *self.config;
        let block = self.config.block_side();
        let roots = ["multi_modal_projector.", "model.multi_modal_projector."];
        let has = |root: &&&str| self.loader.parameters().contains(&format!("{root}mm_soft_emb_norm.weight"));
        let root = roots.iter().find(has).unwrap_or(&roots[0]);
        let norm = |w: f32| w + if self.loader.parameters().norms_are_scales() { 0.0 } else { 1.0 };
        // Stored as [hidden, text hidden].
        let transposed = |values: Vec<f32>| -> Vec<f32> {
            (0..values.len()).map(|i| values[i % hidden * text_hidden + i / hidden]).collect()
        };
        let name = format!("{root}mm_input_projection_weight");
        Ok(Projector {
            post_norm: self.norm("post_layernorm", hidden, eps)?,
            patches: block * block,
            norm: RmsNorm {
                scale: self.loader.vector(&format!("{root}mm_soft_emb_norm.weight"), &[hidden], norm)?,
                eps,
            },
            projection: self.loader.dense(&name, text_hidden, hidden, transposed)?,
        })
    }
}
