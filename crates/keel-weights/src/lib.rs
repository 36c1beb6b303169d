//! Checkpoint formats and quantisation codecs, memory-mapped.
//!
//! Only this crate knows how weights are stored. Other crates see three things:
//!
//! * a [`TensorSource`] lists the tensors, from headers only, and lends their bytes;
//! * a [`TensorView`] is one borrowed tensor: name, dtype, shape and little-endian bytes;
//! * a [`LinearTensor`] is the weight of a linear layer in the checkpoint's form.
//!
//! A [`Checkpoint`] is a folder (or file) on disk that is a `TensorSource`:
//!
//! ```no_run
//! use keel_weights::{Checkpoint, TensorSource};
//!
//! let checkpoint = Checkpoint::open("models/demo".as_ref())?;
//! let norm = checkpoint.tensor("model.language_model.norm.weight")?.expect_shape(&[384])?.to_f32()?;
//! let query = checkpoint.linear("model.language_model.layers.3.self_attn.q_proj")?;
//! let mut row = vec![0.0; query.info().cols];
//! query.rows_f32(0..1, &mut row)?;
//! # Ok::<(), keel_weights::WeightsError>(())
//! ```
//!
//! A [`gguf::GgufFile`] is another one. [`quantize`] writes quantised checkpoints. [`SafetensorsWriter`] and
//! [`ShardedWriter`] write all others.
//!
//! Files are untrusted. Every size in a header is checked before use, no allocation is proportional to a number that a
//! header merely claims, and bad input is an error, never a panic.
#![deny(unsafe_code)]

pub mod affine;
mod awq;
mod checkpoint;
mod columns;
mod error;
#[cfg(unix)]
mod fault;
pub mod float;
mod fp4;
mod fp8;
pub mod gguf;
mod json;
mod linear;
mod mapped;
mod mtp;
mod partial;
pub mod quantize;
mod regular;
mod safetensors;
mod source;
mod stream;
mod unsupported;
mod view;

pub use affine::{AffineFormat, AffineTensor, ModuleQuantization, Quantization};
pub use awq::{AwqTensor, RotationValues};
pub use checkpoint::Checkpoint;
pub use columns::ColumnsTensor;
pub use error::{HeaderProblem, WeightsError};
pub use fp4::{Fp4Mode, Fp4Tensor};
pub use fp8::Fp8Tensor;
pub use linear::{LinearFormat, LinearInfo, LinearTensor};
pub use mtp::{MTP_ROOTS, part_of_mtp_head};
pub use partial::{remove_unfinished, write_whole};
pub use regular::{open_regular, read_regular};
pub use safetensors::{
    SafetensorsFile, SafetensorsHeader, SafetensorsWriter, ShardedWriter, StoredDType, TensorEntry,
    TensorSpec,
};
pub use source::{RawTensor, TensorInfo, TensorSource};
pub use view::{TensorView, cols, rows};

/// The result of this crate's operations.
pub type Result<T, E = WeightsError> = std::result::Result<T, E>;
