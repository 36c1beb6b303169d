//! Engine, samplers, token iterators and the memory planner.
//!
//! The life of a sequence: [`Engine::open`], [`Engine::prefill`] with the prompt, [`Engine::decode`] token by token
//! (or a [`TokenIterator`], which does all of it), [`Engine::release`]. All memory is allocated by
//! [`Engine::load`]; [`plan`] gives the same numbers without a weight. A [`batch::Batcher`] runs many at once.
//! With [`EngineOptions::drafts`], [`Engine::round`] and [`MtpTokenIterator`] give several tokens to a step.

#![forbid(unsafe_code)]

mod ahead;
pub mod batch;
mod engine;
mod error;
mod eyes;
mod generate;
mod hidden;
mod options;
pub mod plan;
mod sampler;
pub mod speculation;
mod step;

pub use ahead::{Ticket, Work, WorkRows};
pub use engine::{Chunk, Engine, LateWork, LogitSink};
pub use error::{EngineError, Result};
pub use eyes::{PatchGrid, VisionOptions};
pub use generate::{FinishReason, GenerateOptions, TokenIterator};
pub use keel_cache::Features;
pub use options::{DRAFTS_MAX, EngineOptions, PREFILL_GRID};
pub use sampler::{Sampler, SamplerOptions};
pub use speculation::{Depth, MtpTokenIterator, SpeculationCounters, SpeculationOptions};
