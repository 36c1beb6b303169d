//! Engine, samplers, token iterators and the memory planner.
//!
//! The life of a sequence: [`Engine::open`], [`Engine::prefill`] with the prompt, [`Engine::decode`] token by token,
//! [`Engine::release`]. [`Engine::load`] allocates all memory; [`plan`] gives the same numbers without a weight.
//!
//! Tokens are made in one of two ways. [`Engine::submit`] puts a step on the device while the previous step runs, and
//! [`Engine::take`] waits for its tokens. [`Engine::round`] runs one step and waits; sequences may draft in it
//! ([`EngineOptions::drafts`]). A [`TokenIterator`] does this for one sequence, a [`batch::Batcher`] for many.
//!
//! ```
//! use keel_array::{Runtime, RuntimeOptions};
//! use keel_cpu::{CpuBackend, CpuOptions};
//! use keel_engine::{Engine, EngineOptions, GenerateOptions, TokenIterator};
//! use keel_models::loading::CheckpointParameters;
//! use keel_weights::Checkpoint;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let backend = CpuBackend::new(CpuOptions::default());
//! let runtime = Runtime::new(std::sync::Arc::new(backend), RuntimeOptions::default());
//! let checkpoint = Checkpoint::open("../../models/demo".as_ref())?;
//! let parameters = CheckpointParameters(&checkpoint);
//! let options = EngineOptions { context: 256, ..EngineOptions::default() };
//! let mut engine = Engine::load(&runtime, &parameters, checkpoint.config(), options, &|_| ())?;
//! let sequence = engine.open()?;
//! let options = GenerateOptions { max_tokens: 3, ..GenerateOptions::default() };
//! let tokens = TokenIterator::new(&mut engine, sequence, &[509, 496], options, &mut |_| ())?;
//! assert_eq!(tokens.count(), 3);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

pub mod batch;
mod device_thread;
mod engine;
mod error;
mod generate;
mod logits_row;
mod options;
pub mod plan;
mod sampler;
pub mod speculation;
pub mod split;
mod step;
mod sync;
mod vision;

pub use engine::{
    Chunk, EarlySteps, Engine, HostReads, LateWork, LoadProgress, LogitSink, Ticket, Work, WorkRows,
};
pub use error::{EngineError, Result};
pub use generate::{FinishReason, GenerateOptions, TokenIterator};
pub use keel_array::PREFILL_GRID;
pub use keel_cache::Features;
pub use logits_row::LogitsRow;
pub use options::{DRAFTS_MAX, EngineOptions};
pub use sampler::{Sampler, SamplerOptions};
pub use speculation::{Depth, SpeculationCounters, SpeculationOptions};
pub use vision::{PatchGrid, VisionOptions};
