//! One module per command.

pub mod bench;
pub mod chat;
pub mod completions;
pub mod config;
pub mod doctor;
pub mod embed;
pub mod eval;
pub mod fit;
pub mod generate;
pub mod inspect;
#[cfg(feature = "hub")]
pub mod list;
pub mod logits;
pub mod plan;
#[cfg(feature = "hub")]
pub mod pull;
pub mod quantize;
#[cfg(feature = "hub")]
pub mod rm;
pub mod serve;
