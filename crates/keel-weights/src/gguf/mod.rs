//! The GGUF format: typed metadata, tensor descriptions and aligned tensor data in one file, or in several parts. Many
//! tensors have block-quantised types.
//!
//! Names and shapes are those of the file, except that dimensions are listed slowest first, as everywhere else here.

mod cursor;
mod encode;
mod file;
mod header;
mod metadata;
mod part_name;
mod tensor;
mod types;
mod writer;

pub use encode::{can_encode, encode};
pub use file::GgufFile;
pub(crate) use file::PART_KEYS;
pub use header::{GgufEntry, GgufHeader};
pub use metadata::GgufValue;
pub use part_name::PartName;
pub use tensor::BlockTensor;
pub use types::GgmlType;
pub use writer::{GgufMetadata, GgufTensorSpec, GgufWriter};
