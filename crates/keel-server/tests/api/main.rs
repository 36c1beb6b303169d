//! The APIs and their answers to clients.

#[path = "../common/mod.rs"]
mod common;

mod embeddings;
mod grammars;
mod named_fields;
mod openai;
mod other_apis;
mod pictures;
mod saved_prefixes;
mod split;
mod split_tensor;
mod videos;
mod wire;
