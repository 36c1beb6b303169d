//! Errors of caches.

use std::path::PathBuf;

use keel_array::ArrayError;

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// The pool has no page left.
    #[error(
        "no room for {needed} more pages of 256 tokens: {free} of {total} are free; lower the context or the batch"
    )]
    NoPages {
        /// Pages asked for.
        needed: usize,
        /// Pages free.
        free: usize,
        /// Pages of the pool.
        total: usize,
    },
    /// A sequence of another cache.
    #[error(
        "the sequence was opened by another model or engine: continue it there, or save it and load it here"
    )]
    Foreign,
    /// All slots are taken.
    #[error("all {total} sequences are in use; end one first, or plan for more")]
    NoSlot {
        /// Slots of the pool.
        total: usize,
    },
    /// Host memory has no room for a sequence.
    #[error(
        "parking the sequence takes {needed_bytes} bytes of host memory: {free_bytes} of {total_bytes} are free"
    )]
    NoSwap {
        /// Bytes needed.
        needed_bytes: usize,
        /// Bytes free.
        free_bytes: usize,
        /// Bytes in all.
        total_bytes: usize,
    },
    /// There is no checkpoint to go back to.
    #[error("cannot go back to token {wanted}: the recurrent state is kept at {kept:?}")]
    NoCheckpoint {
        /// Position asked for.
        wanted: usize,
        /// Positions with a checkpoint.
        kept: Vec<usize>,
    },
    /// The last rows of a sequence are not part of its state yet.
    #[error("{accepted} accepted rows of the sequence are not committed yet; commit them first")]
    OpenRows {
        /// Rows accepted.
        accepted: usize,
    },
    /// A step failed after it had changed part of a sequence's state.
    #[error(
        "a step of the sequence failed after {layers} of its recurrent layers had changed; release the sequence, or \
         rewind it to a checkpoint"
    )]
    TornState {
        /// Layers that had moved on; 0 if it is not known how many.
        layers: usize,
    },
    /// A step has run that does not count, and the sequence's state cannot go back.
    #[error(
        "the state of the sequence is ahead of its {len} tokens, because a step was given up or its results were \
         lost; release the sequence, or rewind it to a checkpoint"
    )]
    AheadState {
        /// Tokens of the sequence.
        len: usize,
    },
    /// Keys and values cannot be kept in 8 or 4 bits.
    #[error(
        "keys and values cannot be stored in 8 or 4 bits: a head has {head_dim} values, which is not a multiple of 32; \
         leave out --kv-bits"
    )]
    HeadSize {
        /// Values of a head.
        head_dim: usize,
    },
    /// A saved cache cannot be used.
    #[error("{path}: {problem}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The problem with it.
        problem: String,
    },
    /// A file cannot be read or written.
    #[error(transparent)]
    Weights(#[from] keel_weights::WeightsError),
    /// An error of the runtime.
    #[error(transparent)]
    Array(#[from] ArrayError),
}

/// Result of this crate.
pub type Result<T, E = CacheError> = std::result::Result<T, E>;
