//! The safetensors format: 8 bytes of header length, a JSON header, then the tensors' bytes.

mod file;
mod header;

pub use file::SafetensorsFile;
pub use header::{SafetensorsHeader, StoredDType, TensorEntry};
