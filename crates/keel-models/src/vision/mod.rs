//! Vision: towers that turn pictures into rows of embeddings, and the positions of those rows.
//!
//! A tower is a lazy graph like any model. Its rows see each other within one picture, or one group of a video's
//! frames, so each of these is one pass, in one or more pieces ([`Tower::piece`]).

mod config;
pub mod layers;
mod load;
mod positions;
pub mod qwen;
pub mod siglip;
mod tower;

pub use config::{TowerActivation, TowerKind, VisionConfig, VisionTokens};
pub use positions::{ImageRun, PromptLayout, prompt_layout, run_ends};
pub use tower::{LevelFeatures, PassPiece, PieceResult, Tower, TowerEnd, TowerInput, TowerRows};

use serde_json::Value;

use crate::Result;
use crate::loading::Parameters;

/// The vision part of a config, if the model has one.
///
/// # Errors
/// If the part is incomplete, or contradicts itself or the text part.
pub fn read_vision(config: &Value) -> Result<Option<VisionConfig>> {
    let vision = VisionConfig::from_json(config)?;
    if vision.is_some() {
        // Text has one position on all axes, so its reader does not check the sections.
        crate::read_config(config)?.check_sections()?;
    }
    Ok(vision)
}

/// Whether a checkpoint contains the tower of its config: some converters drop it.
pub fn has_tower(config: &VisionConfig, parameters: &dyn Parameters) -> bool {
    load::root_of(config, parameters).is_some()
}
