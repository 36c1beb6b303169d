//! The APIs: OpenAI's, Anthropic's, and those that both lack.

pub(crate) mod anthropic;
pub(crate) mod field_names;
pub(crate) mod models;
pub(crate) mod numbers;
pub(crate) mod openai;
pub(crate) mod openapi;
pub mod requests;
pub(crate) mod rerank;
pub(crate) mod sampling;
pub(crate) mod tokenize;
pub(crate) mod unsupported;
