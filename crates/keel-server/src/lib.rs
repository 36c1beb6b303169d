//! An OpenAI-compatible server with continuous batching, on one engine or on several that come and go
//! (`model_manager`).
//!
//! The life of a request:
//!
//! 1. A handler checks its JSON and makes an `EngineRequest` (`openai/`).
//! 2. The prompt is rendered and encoded ([`ModelText`]).
//! 3. The engine's thread runs the request or lets it wait ([`EngineHandle`]).
//! 4. The events of that thread become text, reasoning and tool calls ([`answer::Answer`]).
//!
//! When a client disconnects, its answer is dropped. That ends the sequence before the next step and frees its memory.
//!
//! One table maps errors to HTTP statuses: [`ServerError::reply`].

#![forbid(unsafe_code)]

pub mod answer;
mod anthropic;
mod app;
mod blocking_work;
mod caller;
mod charge;
mod collect;
mod connections;
mod engine_view;
mod error;
mod events;
mod grammar;
mod host_check;
mod http;
mod keys;
mod mask_ahead;
mod memory;
mod metrics;
mod model_manager;
mod openai;
mod openapi;
mod options;
mod page;
mod pictures;
mod readout;
pub mod requests;
mod rerank;
mod response_body;
mod routes;
mod sampling;
mod serve;
mod status;
mod sync;
mod text;
mod tokenize;
mod unsupported;
mod worker;

pub use app::{App, Shared};
pub use blocking_work::WORK_THREADS;
pub use engine_view::DeviceMemory;
pub use error::{Reply, Result, ServerError};
pub use events::Events;
pub use keys::{ApiKey, KeyLimits};
pub use memory::{REQUEST_MEMORY_MIN, RequestMemory};
pub use metrics::{Metrics, RequestTimer};
pub use model_manager::{Load, Loaded, Modalities, ModelManager, ModelManagerOptions, ServedModel};
pub use options::{CONNECTION_BYTES, PrefixStore, ServerOptions};
pub use pictures::{Fetch, FetchLimits, ImagePreprocessor, PictureSources, placeholders};
pub use routes::router;
pub use serve::{Server, bind, wait_for_signal};
pub use text::ModelText;
pub use worker::EngineHandle;
