//! A server of OpenAI's and Anthropic's APIs with continuous batching, on one engine or on several that come and go
//! (`model_manager`).
//!
//! The life of a request:
//!
//! 1. A handler checks its JSON and makes an `EngineRequest` (`api`).
//! 2. The prompt is rendered and encoded ([`ServedText`]).
//! 3. The engine's thread runs the request or lets it wait ([`EngineHandle`], `engine`).
//! 4. The events of that thread become text, reasoning and tool calls ([`answer::Answer`]).
//!
//! When a client disconnects, its answer is dropped. That ends the sequence before the next step and frees its memory.
//!
//! One table maps errors to HTTP statuses: [`ServerError::reply`].

#![forbid(unsafe_code)]

mod access;
pub mod answer;
mod api;
mod collect;
mod collected;
mod engine;
mod error;
mod events;
mod http;
mod loaded_model;
mod memory;
mod metrics;
mod model_manager;
mod options;
mod pictures;
mod shared;
mod sync;
mod text;

pub use access::keys::{ApiKey, KeyLimits};
pub use api::requests;
pub use engine::view::{DeviceReport, EngineView};
pub use engine::worker::EngineHandle;
pub use error::{Reply, Result, ServerError};
pub use events::Events;
pub use http::blocking_work::WORK_THREADS;
pub use http::routes::router;
pub use http::serve::{Server, bind, wait_for_signal};
pub use loaded_model::LoadedModel;
pub use memory::requests::{REQUEST_MEMORY_MIN, RequestMemory};
pub use metrics::{Metrics, RequestTimer};
pub use model_manager::{Load, LoadOutput, Modalities, ModelManager, ModelManagerOptions, ServedModel};
pub use options::{CONNECTION_BYTES, PrefixStore, ServerOptions};
pub use pictures::{Fetch, FetchLimits, ImagePreprocessor, PictureSources, placeholders};
pub use shared::Shared;
pub use text::ServedText;
