//! The memory of sequences: KV pages, recurrent slots and checkpoints.
//!
//! All storage is allocated once, when a [`ModelCache`] is made, from a [`CacheSpec`] (the needs of the model's layers)
//! and a [`CacheSize`] (numbers of sequences and tokens). Later no sequence allocates: it holds page numbers and a slot
//! number, and gives them back when it is dropped.
//!
//! ```
//! use keel_array::{DType, KvFormat};
//! use keel_cache::{CacheFormat, CacheSpec, LayerSpec};
//!
//! let layer = LayerSpec::Attention { kv_heads: 2, head_dim: 64 };
//! let format = CacheFormat { kv: KvFormat::F16, state: DType::F32 };
//! let spec = CacheSpec { layers: vec![layer; 3], format };
//! assert_eq!(spec.token_bytes(), 3 * (2 * 2 * 64) * 2); // keys and values of three layers
//! ```
//!
//! Ownership of a sequence's tokens, with pages of 256:
//!
//! ```text
//! token     0 ........ 255 | 256 ....... 511 | 512 ... len
//! page      table[0]       | table[1]        | table[2] (partly filled)
//! slot      one state that has seen all of 0..len
//! log       the last rows, where they may be taken back: the next step commits those that were accepted
//! checkpoints               copies of the slot at multiples of 64
//! ```
//!
//! A sequence can be parked in host memory ([`ModelCache::park`]) while others need its pages.
//!
//! A [`PrefixTree`] keeps pages and states of ended sequences, for later sequences with the same beginning.

#![forbid(unsafe_code)]

mod contents;
mod error;
mod failed_step;
mod file;
mod ids;
mod model_cache;
mod pages;
mod pools;
mod prefix;
mod prefix_folder;
mod sequence;
mod shared;
mod spec;
mod storage;
mod swap;
mod vision_inputs;

pub use error::{CacheError, Result};
pub use failed_step::{CommitProgress, FailedStepState};
pub use file::SequenceFile;
pub(crate) use ids::HostBlockId;
pub use ids::{CheckpointId, PageId, SlotId};
pub use model_cache::ModelCache;
pub(crate) use pages::PageAllocator;
pub use pools::CheckpointLease;
pub use prefix::{PREFIX_BLOCK, PrefixHit, PrefixTree, RememberedText};
pub use prefix_folder::{IndexEntries, PictureHash, PrefixFolder, SavedPrefix, Unwritten};
pub use sequence::{SavedState, SequenceCache};
pub use spec::{CacheFormat, CacheSize, CacheSpec, LayerSpec};
pub use storage::{DeviceLayers, LayerStorage};
pub use swap::SwapSize;
pub use vision_inputs::{Features, SeenPicture, VisionInputs};
