//! The parts that models are made of. They know tensors and shapes, not the names in checkpoints.

mod attention;
mod feed_forward;
mod gated_delta_net;
mod norm;

pub use attention::{Attention, HeadNorm, Rotation};
pub use feed_forward::{Activation, FeedForward, GatedLayer, MixtureOfExperts};
pub use gated_delta_net::GatedDeltaNet;
pub use norm::RmsNorm;

use keel_array::{Array, Batch, Regime, RowLog};

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
    /// How rows are computed.
    pub regime: Regime,
    /// Whether rows may be taken back.
    pub log: RowLog,
}
