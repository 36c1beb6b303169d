//! One module per command.

pub mod bench;
pub mod chat;
pub mod eval;
pub mod generate;
pub mod inspect;
pub mod logits;
pub mod plan;
pub mod quantize;
pub mod serve;
