//! Engine, samplers, token iterators and the memory planner.
//!
//! The life of a sequence: [`Engine::open`], [`Engine::prefill`] with the prompt, [`Engine::decode`] token by token,
//! [`Engine::release`]. [`Engine::load`] allocates all memory; [`plan`] gives the same numbers without a weight.
//!
//! Tokens are made by two calls: [`Engine::submit`] puts a step on the device before the step before it is taken, and
//! [`Engine::round`] waits for its step, in which sequences may draft ([`EngineOptions::drafts`]). A [`TokenIterator`]
//! makes them for one sequence, a [`batch::Batcher`] for many.

#![forbid(unsafe_code)]

pub mod batch;
mod device_thread;
mod engine;
mod error;
mod generate;
mod options;
pub mod plan;
mod sampler;
pub mod speculation;
pub mod split;
mod step;
mod sync;
mod vision;

pub use engine::{Chunk, Engine, LateWork, LogitSink, Ticket, Work, WorkRows};
pub use error::{EngineError, Result};
pub use generate::{FinishReason, GenerateOptions, TokenIterator};
pub use keel_cache::Features;
pub use options::{DRAFTS_MAX, EngineOptions, PREFILL_GRID};
pub use sampler::{Sampler, SamplerOptions};
pub use speculation::{Depth, SpeculationCounters, SpeculationOptions};
pub use vision::{PatchGrid, VisionOptions};
