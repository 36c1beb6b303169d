//! Engine, samplers, token iterators and the memory planner.
//!
//! The life of a sequence: [`Engine::open`], [`Engine::prefill`] with the prompt, [`Engine::decode`] token by token,
//! [`Engine::release`]. A [`TokenIterator`] does all of this. [`Engine::load`] allocates all memory; [`plan`] gives the
//! same numbers without a weight. A [`batch::Batcher`] runs many sequences at once. With [`EngineOptions::drafts`],
//! [`Engine::round`] and [`MtpTokenIterator`] give several tokens per step.

#![forbid(unsafe_code)]

mod ahead;
pub mod batch;
mod crew;
mod engine;
mod error;
mod eyes;
mod generate;
mod hidden;
mod options;
mod overlap;
pub mod plan;
mod sampler;
pub mod speculation;
pub mod split;
mod step;
mod sync;
mod together;
mod under_way;

pub use ahead::{Ticket, Work, WorkRows};
pub use engine::{Chunk, Engine, LateWork, LogitSink};
pub use error::{EngineError, Result};
pub use eyes::{PatchGrid, VisionOptions};
pub use generate::{FinishReason, GenerateOptions, TokenIterator};
pub use keel_cache::Features;
pub use options::{DRAFTS_MAX, EngineOptions, PREFILL_GRID};
pub use sampler::{Sampler, SamplerOptions};
pub use speculation::{Depth, MtpTokenIterator, SpeculationCounters, SpeculationOptions};
