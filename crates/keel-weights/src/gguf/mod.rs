//! The GGUF format: typed metadata, tensor descriptions and aligned tensor data in one file. Many tensors have
//! block-quantised types.
//!
//! Names and shapes are those of the file, except that dimensions are listed slowest first, as everywhere else here.

mod cursor;
mod encode;
mod file;
mod header;
mod metadata;
mod tensor;
mod types;
mod writer;

pub use encode::{can_encode, encode};
pub use file::GgufFile;
pub use header::{GgufEntry, GgufHeader};
pub use metadata::GgufValue;
pub use tensor::BlockTensor;
pub use types::GgmlType;
pub use writer::{GgufMetadata, GgufTensorSpec, GgufWriter};
