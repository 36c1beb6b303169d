//! The parts of models. They know tensors and shapes, not the names in checkpoints.

mod attention;
mod feed_forward;
mod gated_delta_net;
mod norm;

pub use attention::{Attention, HeadNorm, Rotation};
pub use feed_forward::{Activation, FeedForward, GatedLayer, MixtureOfExperts};
pub use gated_delta_net::GatedDeltaNet;
pub use norm::RmsNorm;

use keel_array::{Array, Batch, Regime, Result, RowLog};

/// The pictures of a step's rows.
#[derive(Clone, Debug)]
pub struct VisionRows {
    /// Whether a row belongs to a picture, bool `[T, 1]`.
    pub is_picture: Array,
    /// First the features that replace embeddings, f32 `[T, hidden]`; then those added after the first layers.
    pub features: Vec<Array>,
    /// Time, row and column of each row, i32 `[3, T]`.
    pub positions: Array,
    /// The last position that each row sees, u32 `[T]`, if the rows of a picture see each other.
    pub until: Option<Array>,
    /// The same for the token after each row, for the multi-token-prediction head.
    pub next: Option<NextVisionRows>,
}

/// `is_picture` and the first of `features` of [`VisionRows`], for other tokens.
#[derive(Clone, Debug)]
pub struct NextVisionRows {
    /// Whether a token belongs to a picture, bool `[T, 1]`.
    pub is_picture: Array,
    /// The features that replace embeddings, f32 `[T, hidden]`.
    pub features: Array,
}

impl VisionRows {
    /// Embeddings, replaced by features in the rows of pictures.
    fn place(is_picture: &Array, features: &Array, embedded: &Array) -> Result<Array> {
        is_picture.select(features, embedded)
    }

    /// The embeddings of a step's tokens.
    ///
    /// # Errors
    /// If the operands do not fit.
    pub fn embed(&self, embedded: &Array) -> Result<Array> {
        VisionRows::place(&self.is_picture, &self.features[0], embedded)
    }

    /// The embeddings of the token after each row.
    ///
    /// # Errors
    /// If the operands do not fit.
    pub fn embed_next(&self, embedded: &Array) -> Result<Array> {
        match &self.next {
            Some(NextVisionRows { is_picture, features }) => {
                VisionRows::place(is_picture, features, embedded)
            }
            None => Ok(embedded.clone()),
        }
    }

    /// The hidden state after layer `layer`, with the features that are added there.
    ///
    /// # Errors
    /// If the operands do not fit.
    pub fn deepen(&self, layer: usize, x: Array) -> Result<Array> {
        match self.features.get(layer + 1) {
            Some(further) => self.is_picture.select(&x.add(further)?, &x),
            None => Ok(x),
        }
    }
}

/// Positions of rows, i32 `[T]` each, for models with separate frequencies for long sequences.
#[derive(Clone, Debug)]
pub struct RopePositions {
    /// 0 in rows of long sequences.
    pub short: Array,
    /// 0 in rows of all other sequences.
    pub long: Array,
}

/// Data that all layers of a step share.
#[derive(Clone, Debug)]
pub struct StepContext {
    /// The rows of each sequence, and the places of its memory.
    pub batch: Batch,
    /// The same, with the pages of layers with a window.
    pub window_batch: Batch,
    /// Position of each row, i32 `[T]`.
    pub positions: Array,
    /// Positions for the rotation, if long sequences have separate frequencies.
    pub rope_positions: Option<RopePositions>,
    /// The pictures, if a row belongs to one.
    pub vision: Option<VisionRows>,
    /// How rows are computed.
    pub regime: Regime,
    /// Whether rows may be taken back.
    pub log: RowLog,
}
