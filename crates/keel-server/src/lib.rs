//! An OpenAI-compatible server on one engine, with continuous batching.
//!
//! The life of a request: a handler checks its JSON and makes an `Ask` (`openai/`), the prompt is rendered and encoded
//! ([`ModelText`]), the engine's thread admits it or lets it wait ([`EngineHandle`]), and what the thread sends back
//! becomes text, reasoning and tool calls ([`answer::Answer`]). Dropping the answer, which is what happens when a client
//! leaves, ends the sequence before the next step and gives its bytes back.
//!
//! One table says which error is which status: [`ServerError::reply`].

#![forbid(unsafe_code)]

pub mod answer;
mod anthropic;
mod app;
mod caller;
mod collect;
mod connections;
mod error;
mod gate;
mod grammar;
mod held;
mod http;
mod keys;
mod memory;
mod metrics;
mod openai;
mod openapi;
mod options;
mod page;
pub mod requests;
mod routes;
mod sampling;
mod serve;
mod status;
mod text;
mod tokenize;
mod unsupported;
mod work;
mod worker;

pub use app::App;
pub use error::{Reply, Result, ServerError};
pub use keys::{ApiKey, KeyLimits};
pub use memory::RequestMemory;
pub use metrics::{Metrics, RequestTimer};
pub use options::{PrefixStore, ServerOptions};
pub use routes::router;
pub use serve::{Server, bind, wait_for_signal};
pub use text::ModelText;
pub use work::WORK_THREADS;
pub use worker::{EngineHandle, Events};
