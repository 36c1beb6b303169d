//! The small checkpoints under `tests/assets`, made by `make_tokenizers.py` there.

use std::path::{Path, PathBuf};

/// The folder of a checkpoint.
pub fn asset(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/assets").join(name)
}

/// The files of a checkpoint, as bytes. A file that the checkpoint lacks is empty.
#[allow(dead_code)] // each test binary uses its own part
pub struct Files {
    pub tokenizer: Vec<u8>,
    pub tokenizer_config: Vec<u8>,
    pub config: Vec<u8>,
    pub generation_config: Vec<u8>,
}

/// Reads the files of a checkpoint.
#[allow(dead_code)]
pub fn files_of(name: &str) -> Files {
    let read = |file| std::fs::read(asset(name).join(file)).unwrap_or_default();
    Files {
        tokenizer: read("tokenizer.json"),
        tokenizer_config: read("tokenizer_config.json"),
        config: read("config.json"),
        generation_config: read("generation_config.json"),
    }
}
