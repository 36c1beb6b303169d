//! The built-in model: `models/demo`, a small model that tells stories.

use std::path::Path;

use keel_text::TextFiles;
use keel_weights::Checkpoint;

use crate::Result;

/// The model's name in messages and reports. There is no such folder.
pub const NAME: &str = "built-in/demo";

/// Aligned like the data of a mapped file, so that tensors are borrowed and not copied.
#[repr(C, align(64))]
struct Aligned<B: ?Sized>(B);

static WEIGHTS: &Aligned<[u8]> = &Aligned(*include_bytes!("../../../../models/demo/model.safetensors"));
const CONFIG: &[u8] = include_bytes!("../../../../models/demo/config.json");
const GENERATION_CONFIG: &[u8] = include_bytes!("../../../../models/demo/generation_config.json");
const TOKENIZER: &[u8] = include_bytes!("../../../../models/demo/tokenizer.json");
const TOKENIZER_CONFIG: &[u8] = include_bytes!("../../../../models/demo/tokenizer_config.json");

/// The checkpoint. Its weights are part of the program's file, and pages are read when used.
///
/// # Errors
/// Only if the program was built from a broken model.
pub fn checkpoint() -> Result<Checkpoint> {
    Ok(Checkpoint::in_memory(Path::new(NAME), CONFIG, &WEIGHTS.0)?)
}

/// The tokenizer and its settings.
pub fn text_files() -> TextFiles<'static> {
    TextFiles::in_memory(TOKENIZER)
        .with_tokenizer_config(TOKENIZER_CONFIG)
        .with_config(CONFIG)
        .with_generation_config(GENERATION_CONFIG)
}

/// A hash that distinguishes this model from those of other builds.
pub fn identity() -> String {
    use std::hash::{DefaultHasher, Hasher};
    let mut hasher = DefaultHasher::new();
    hasher.write(&WEIGHTS.0);
    hasher.write(TOKENIZER);
    format!("{NAME} {:016x}", hasher.finish())
}

#[cfg(test)]
mod tests {
    use keel_weights::TensorSource;

    use super::*;

    #[test]
    fn the_weights_are_lent_from_the_program() {
        let checkpoint = checkpoint().expect("built from a sound model");
        let name = checkpoint.names().next().expect("it has tensors");
        let bytes = checkpoint.raw(name).expect("present").bytes;
        assert!(WEIGHTS.0.as_ptr_range().contains(&bytes.as_ptr()));
        assert_eq!(WEIGHTS.0.as_ptr() as usize % 64, 0);
    }
}
