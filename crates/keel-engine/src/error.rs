//! Errors of running a model.

use keel_array::ArrayError;
use keel_cache::CacheError;
use keel_models::ModelError;

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// An option is out of range.
    #[error("{0}")]
    Option(String),
    /// A token that the model does not have.
    #[error("token id {id} is out of range: the vocabulary has {vocab} entries")]
    TokenId {
        /// The id.
        id: u32,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// Two sequences of a batch have the same number.
    #[error("request {id} is already in the batch: each request needs a number of its own")]
    SequenceId {
        /// The number.
        id: u64,
    },
    /// The prompt is empty.
    #[error("the prompt has no tokens")]
    EmptyPrompt,
    /// More tokens than fit.
    #[error("{needed} tokens do not fit: the context is {context}; shorten the prompt or raise the context")]
    Context {
        /// Tokens needed.
        needed: usize,
        /// Tokens that fit.
        context: usize,
    },
    /// The sequence would need other rotary frequencies from its first token on.
    #[error(
        "{needed} tokens are more than {original}, the limit of the rotary frequencies with which the sequence began; run \
         it again from its start"
    )]
    Outgrown {
        /// Tokens needed.
        needed: usize,
        /// `original_max_position_embeddings`.
        original: usize,
    },
    /// More memory than the whole pool has.
    #[error(
        "{needed_tokens} tokens of prompt and answer need {needed_bytes} bytes of keys and values, but the pool has \
         {total_bytes}; ask for fewer tokens"
    )]
    NeverFits {
        /// Tokens of prompt and answer.
        needed_tokens: usize,
        /// Bytes of whole pages for them.
        needed_bytes: usize,
        /// Bytes of the pool.
        total_bytes: usize,
    },
    /// The queue is full.
    #[error(
        "{waiting} requests are waiting, and with {arriving} more the limit of {limit} is exceeded; try again later"
    )]
    QueueFull {
        /// Requests that wait.
        waiting: usize,
        /// Requests that arrive together.
        arriving: usize,
        /// Requests that may wait.
        limit: usize,
    },
    /// A request waited too long.
    #[error("no room became free within {seconds} seconds; try again later")]
    QueueTimeout {
        /// Time waited.
        seconds: f64,
    },
    /// A request ran too long.
    #[error("the request did not end within its deadline")]
    Deadline,
    /// The constraint on a sequence failed.
    #[error("the constraint on the output failed: {0}")]
    Constraint(String),
    /// Remembered prefixes cannot be written.
    #[error("{path}: remembered prefixes cannot be saved: {reason}", path = path.display())]
    PrefixFolder {
        /// The file or folder.
        path: std::path::PathBuf,
        /// The system's reason.
        reason: String,
    },
    /// Remembered prefixes are saved, but a file of an earlier save stays.
    #[error(
        "{path}: this file of an earlier save cannot be removed: {reason}; it holds what users wrote, so remove it; the \
         {texts} remembered prefixes are saved",
        path = path.display()
    )]
    StalePrefix {
        /// The first file that stays.
        path: std::path::PathBuf,
        /// The system's reason.
        reason: String,
        /// Texts that were saved.
        texts: usize,
    },
    /// A step that this sequence shared with others failed.
    #[error("a step of the batch failed: {0}")]
    Step(String),
    /// A device of a split model has failed.
    #[error("{device}: {error}")]
    Device {
        /// The device's name.
        device: String,
        /// Its error.
        error: Box<EngineError>,
    },
    /// The model has no vision tower.
    #[error("this model reads only text: it has no vision tower")]
    NoVisionTower,
    /// The features of a picture are missing.
    #[error(
        "token {token} belongs to a picture whose features are missing: give the sequence its features first"
    )]
    Unseen {
        /// The token.
        token: usize,
    },
    /// A picture is larger than planned for.
    #[error(
        "the picture has {patches} patches, but memory is planned for at most {planned}: send a smaller picture, or start \
         with a larger --image-pixels"
    )]
    PicturePatches {
        /// Patches of the picture.
        patches: usize,
        /// Most patches.
        planned: usize,
    },
    /// The features of a request's pictures do not fit.
    #[error(
        "the pictures of the request need {needed_bytes} bytes of features, but there are {total_bytes} for all requests: \
         send fewer or smaller pictures, or start with more --images"
    )]
    PicturesNeverFit {
        /// Bytes of their features.
        needed_bytes: u64,
        /// Bytes for features.
        total_bytes: u64,
    },
    /// The model has no multi-token-prediction head.
    #[error("this model has no multi-token-prediction head")]
    NoMtpHead,
    /// An error of the model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// An error of the cache.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// An error of the runtime.
    #[error(transparent)]
    Array(#[from] ArrayError),
}

impl EngineError {
    /// Whether a device has failed for good: no later step can succeed.
    pub fn is_device_lost(&self) -> bool {
        let lost = |error: &ArrayError| matches!(error, ArrayError::DeviceLost { .. });
        match self {
            EngineError::Array(error)
            | EngineError::Model(ModelError::Array(error))
            | EngineError::Cache(CacheError::Array(error)) => lost(error),
            EngineError::Device { error, .. } => error.is_device_lost(),
            _ => false,
        }
    }
}

/// Result of this crate.
pub type Result<T, E = EngineError> = std::result::Result<T, E>;
