//! The safetensors format: 8 bytes of header length, a JSON header, then the tensors' bytes.

mod file;
mod header;
mod layout;
mod shards;
mod writer;

pub use file::SafetensorsFile;
pub use header::{SafetensorsHeader, StoredDType, TensorEntry};
pub use layout::TensorSpec;
pub use shards::ShardedWriter;
pub use writer::SafetensorsWriter;
