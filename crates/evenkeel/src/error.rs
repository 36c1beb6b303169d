//! The one error type of this crate.

use std::path::PathBuf;

use keel_array::{ArrayError, MemoryReport};
use keel_cache::CacheError;
use keel_cuda::CudaError;
use keel_engine::EngineError;
use keel_models::ModelError;
use keel_text::TextError;
use keel_weights::WeightsError;

use crate::human_bytes;

/// Why something could not be done. Errors of the other crates are variants.
///
/// ```
/// use evenkeel::{Error, LoadOptions, Model};
/// let error = Model::open("no/such/model", &LoadOptions::default()).err().expect("there is none");
/// assert!(matches!(error, Error::NoSuchModel { .. }));
/// assert_eq!(error.to_string(), "no/such/model: there is no such file or folder");
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no such model.
    #[error("{}: there is no such file or folder", path.display())]
    NoSuchModel {
        /// The path.
        path: PathBuf,
    },
    /// The model's config cannot be used.
    #[error("cannot use {}: {reason}", path.display())]
    Unusable {
        /// The model's path.
        path: PathBuf,
        /// The reason.
        reason: Box<ModelError>,
    },
    /// Several files next to a GGUF model fit it as a vision tower.
    #[error(
        "{} files next to {} fit it as a vision tower: {}; name one (TowerFile::At, --mmproj FILE) or none (TowerFile::None, \
         --mmproj none)",
        found.len(), model.display(), names(found)
    )]
    SeveralTowers {
        /// The model's path.
        model: PathBuf,
        /// The files.
        found: Vec<PathBuf>,
    },
    /// A file of a vision tower for a model that takes none.
    #[error("{}: a model that is no GGUF file has its vision tower in its own files, so it takes none from --mmproj", path.display())]
    NoTowerFile {
        /// The model's path.
        path: PathBuf,
    },
    /// A model's file cannot be read.
    #[error("cannot read {}: {reason}", path.display())]
    Read {
        /// The file's path.
        path: PathBuf,
        /// The system's reason.
        reason: String,
    },
    /// The plan needs more memory than there is.
    #[error(transparent)]
    OutOfMemory(#[from] Box<OutOfMemory>),
    /// More tokens than the model was made for.
    #[error(
        "{tokens} tokens are more than the model's context of {context_max} (max_position_embeddings; with a rope scaling of \
         type yarn also factor times original_max_position_embeddings)"
    )]
    Context {
        /// Tokens asked for.
        tokens: usize,
        /// Tokens of the longest sequence.
        context_max: usize,
    },
    /// The prompt has no tokens.
    #[error("the prompt is empty: there is nothing to continue")]
    EmptyPrompt,
    /// The model has no tokenizer, so it takes and gives token ids only.
    #[error("this model has no tokenizer: it takes token ids, not text")]
    NoTokenizer,
    /// The model has no chat template.
    #[error("this model has no chat template: it can continue a text, but not answer messages")]
    NoChatTemplate,
    /// A message contains a picture or a video, which [`crate::Model::chat`] cannot show to the model.
    #[error(
        "message {message} has a part {kind:?}, but a chat of the library reads text alone: leave the part out, or send the \
         messages to keel serve"
    )]
    Picture {
        /// The number of the message, from 0.
        message: usize,
        /// The type of the part.
        kind: String,
    },
    /// A text that has failed has no sequence.
    #[error("the text has failed, so there is no sequence to continue or to save; ask for the text again")]
    FailedText,
    /// An error of the GPU, its driver or its libraries.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// An error of the weights or their files.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// An error of the tokenizer, the chat template or a grammar.
    #[error(transparent)]
    Text(#[from] TextError),
    /// An error of the model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// An error of the cache.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// An error of the engine.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// An error of the runtime.
    #[error(transparent)]
    Array(#[from] ArrayError),
}

/// A plan, and the memory that it does not fit into.
///
/// ```
/// use evenkeel::{DeviceOptions, Error, LoadOptions, Model};
/// let device = DeviceOptions { memory_limit: Some(1 << 20), ..DeviceOptions::default() };
/// let options = LoadOptions { device, ..LoadOptions::default() };
/// let Err(Error::OutOfMemory(error)) = Model::built_in(&options) else { panic!("1 MiB is too little") };
/// assert!(error.needed > error.limit);
/// ```
#[derive(Debug, thiserror::Error)]
#[error(
    "out of memory: {needed} bytes ({}) are needed for a context of {context} and {sequences} sequence(s), which is {} more than \
     the {limit} ({}) of {whose}: {}; keel fit shows what fits: fewer bits, a shorter context, fewer sequences",
    human_bytes(*needed), human_bytes(needed.saturating_sub(*limit)), human_bytes(*limit), parts(planned)
)]
pub struct OutOfMemory {
    /// Bytes needed.
    pub needed: u64,
    /// Bytes that may be used.
    pub limit: u64,
    /// The source of the limit.
    pub whose: String,
    /// Tokens of the longest sequence.
    pub context: usize,
    /// Sequences at once.
    pub sequences: usize,
    /// Planned bytes by category.
    pub planned: MemoryReport,
}

fn names(paths: &[PathBuf]) -> String {
    let name = |path: &PathBuf| path.file_name().unwrap_or_default().display().to_string();
    paths.iter().map(name).collect::<Vec<_>>().join(", ")
}

fn parts(planned: &MemoryReport) -> String {
    let used = planned.iter().filter(|(_, bytes)| *bytes > 0);
    used.map(|(category, bytes)| format!("{category} {bytes}")).collect::<Vec<_>>().join(", ")
}

/// Result of this crate.
///
/// ```
/// fn title() -> evenkeel::Result<String> {
///     Ok(evenkeel::ModelFiles::built_in()?.path.display().to_string())
/// }
/// assert_eq!(title()?, "built-in/demo");
/// # Ok::<(), evenkeel::Error>(())
/// ```
pub type Result<T, E = Error> = std::result::Result<T, E>;
