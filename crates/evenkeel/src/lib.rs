//! Evenkeel as a library: load a language model, know its memory before it starts, and stream its tokens.
//!
//! ```
//! use evenkeel::{LoadOptions, Model, Request};
//!
//! fn main() -> evenkeel::Result<()> {
//!     let mut model = Model::built_in(&LoadOptions::default())?; // or Model::open("folder or file.gguf", ..)
//!     for piece in model.stream("Once upon a time", Request { max_tokens: Some(32), ..Request::default() })? {
//!         print!("{}", piece?);
//!     }
//!     Ok(())
//! }
//! ```
//!
//! | task | where | example |
//! |---|---|---|
//! | stream a text | [`Model::stream`] | `examples/stream.rs` |
//! | answer messages, with tools | [`Model::chat`] | `examples/chat_with_tools.rs` |
//! | embed texts | [`Batch::embed`] | `examples/embeddings.rs` |
//! | run many requests at once | [`Model::into_batch`] | `examples/batch.rs` |
//! | know the memory before it is taken | [`ModelFiles::plan`] | `examples/plan.rs` |
//! | save a prompt's cache, and load it later | [`Model::save`], [`Model::restore`] | `examples/saved_cache.rs` |
//! | compute with arrays, bring a kernel | [`mod@array`], [`DeviceOptions::runtime`] | `examples/custom_kernel.rs` |
//!
//! The device is the first GPU on which the plan fits, else the CPU; [`DeviceOptions`] chooses another. Tokens are
//! drawn as the checkpoint recommends unless the [`Request`] says otherwise. All errors are of one type, [`Error`].
//! Only the items of [`engine::TokenIterator`] have the engine's, which `?` turns into it.
//!
//! The crates below are re-exported as modules: [`mod@array`], [`engine`], [`text`], [`weights`], [`models`],
//! [`cache`], [`cpu`] and [`cuda`].

#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod answer;
mod batch;
mod bytes;
mod constrained;
mod device;
mod driver;
mod error;
mod files;
mod free_memory;
mod loading;
mod model;
mod placement;
mod text_side;
mod tokens;

pub use keel_array as array;
pub use keel_cache as cache;
pub use keel_cpu as cpu;
pub use keel_cuda as cuda;
pub use keel_cuda::Determinism;
pub use keel_engine as engine;
pub use keel_models as models;
pub use keel_text as text;
pub use keel_weights as weights;

pub use answer::{Answer, Chat};
pub use batch::{Batch, BatchEvent, SequenceEvent};
pub use bytes::human_bytes;
pub use constrained::GrammarConstraint;
pub use device::{Device, DeviceOptions, machine};
pub use driver::{DRIVER_ROOM_BYTES, DriverMemory};
pub use error::{Error, OutOfMemory, Result};
/// Converts the text side of a GGUF file from and to its metadata.
pub use files::gguf_text as gguf;
pub use files::{ModelFiles, OpenTower, TowerFile, WeightFiles, is_gguf, is_vision};
pub use free_memory::{FreeMemory, on_device, on_host};
pub use loading::{LoadOptions, check_and_limit, context_for, plan};
pub use model::{Model, Request, Sequence};
pub use placement::{Placement, place, room_on_gpu};
pub use text_side::{ModelText, TextStream, recommended};
pub use tokens::TokenOptions;
