//! The parts that models are made of. They know tensors and shapes, not the names in checkpoints.

mod attention;
mod feed_forward;
mod gated_delta_net;
mod norm;

pub use attention::{Attention, HeadNorm, Rotation};
pub use feed_forward::{Activation, FeedForward, GatedLayer, MixtureOfExperts};
pub use gated_delta_net::GatedDeltaNet;
pub use norm::RmsNorm;

use keel_array::{Array, Batch, Regime, Result, RowLog};

/// The rows of a step in which pictures are seen.
#[derive(Clone, Debug)]
pub struct SightRows {
    /// Whether a row is a picture's, bool `[T, 1]`.
    pub sees: Array,
    /// What takes the place of embeddings, f32 `[T, hidden]`; then what is added after the first layers.
    pub features: Vec<Array>,
    /// Time, row and column of each row, i32 `[3, T]`.
    pub positions: Array,
    /// The last position that each row sees, u32 `[T]`, where the rows of a picture see each other.
    pub until: Option<Array>,
    /// `sees` and the first of `features` of the tokens behind the rows, which the multi-token-prediction head reads.
    pub next: Option<(Array, Array)>,
}

impl SightRows {
    /// Embeddings with the pictures' rows in their places.
    fn place(sees: &Array, features: &Array, embedded: &Array) -> Result<Array> {
        sees.select(features, embedded)
    }

    /// The embeddings of a step's tokens.
    ///
    /// # Errors
    /// If the operands do not fit.
    pub fn embed(&self, embedded: &Array) -> Result<Array> {
        SightRows::place(&self.sees, &self.features[0], embedded)
    }

    /// The embeddings of the tokens behind the rows.
    ///
    /// # Errors
    /// If the operands do not fit.
    pub fn embed_next(&self, embedded: &Array) -> Result<Array> {
        match &self.next {
            Some((sees, features)) => SightRows::place(sees, features, embedded),
            None => Ok(embedded.clone()),
        }
    }

    /// The hidden state behind layer `layer`.
    ///
    /// # Errors
    /// If the operands do not fit.
    pub fn deepen(&self, layer: usize, x: Array) -> Result<Array> {
        match self.features.get(layer + 1) {
            Some(further) => self.sees.select(&x.add(further)?, &x),
            None => Ok(x),
        }
    }
}

/// Positions of rows, i32 `[T]` each, where long sequences turn by other frequencies.
#[derive(Clone, Debug)]
pub struct TurnPositions {
    /// 0 in rows of long sequences.
    pub short: Array,
    /// 0 in rows of all other sequences.
    pub long: Array,
}

/// What the rows of a step have in common.
#[derive(Clone, Debug)]
pub struct StepContext {
    /// Which rows belong to which sequence, and where its memory is.
    pub batch: Batch,
    /// The same with the pages of layers that see a window.
    pub window_batch: Batch,
    /// Position of each row, i32 `[T]`.
    pub positions: Array,
    /// Positions by which rows turn, where long sequences turn by other frequencies.
    pub turns: Option<TurnPositions>,
    /// Where some rows are those of pictures.
    pub sight: Option<SightRows>,
    /// How rows are computed.
    pub regime: Regime,
    /// Whether rows may be taken back.
    pub log: RowLog,
}
