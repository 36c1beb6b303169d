//! What can go wrong when a model runs.

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
    /// Nothing to start from.
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
    /// The model has no multi-token-prediction head.
    #[error("this model has no multi-token-prediction head")]
    NoMtpHead,
    /// The model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The cache.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The runtime.
    #[error(transparent)]
    Array(#[from] ArrayError),
}

/// Result of this crate.
pub type Result<T, E = EngineError> = std::result::Result<T, E>;
