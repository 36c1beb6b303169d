//! Errors when a model is read.

use keel_array::ArrayError;
use keel_weights::WeightsError;

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The config is incomplete or contradicts itself.
    #[error("config.json: {0}")]
    Config(String),
    /// No model of this type is known.
    #[error("config.json: model_type {found:?} is not supported; supported are {supported}")]
    UnknownModelType {
        /// The type in the config.
        found: String,
        /// The types that are supported.
        supported: String,
    },
    /// A parameter has another shape than the config implies.
    #[error("{name}: the config implies {expected}, the checkpoint has {got}")]
    Shape {
        /// Parameter.
        name: String,
        /// Shape from the config.
        expected: String,
        /// Shape in the checkpoint.
        got: String,
    },
    /// Something was asked of a part of a model that another part has.
    #[error("{0}")]
    Part(String),
    /// Another part of the model could not be loaded.
    #[error("loading was stopped, because another device of the model could not load its part")]
    Stopped,
    /// An error of the checkpoint.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// An error of the runtime.
    #[error(transparent)]
    Array(#[from] ArrayError),
}

/// Result of this crate.
pub type Result<T, E = ModelError> = std::result::Result<T, E>;
