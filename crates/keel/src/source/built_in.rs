//! The model that is part of the program: `models/demo`, a small one that tells stories.

use std::path::Path;

use anyhow::Result;
use keel_text::TextFiles;
use keel_weights::Checkpoint;

/// How messages and reports call the model. There is no such folder.
pub const NAME: &str = "built-in/demo";

/// Aligned as a mapped file's data would be, so that tensors are lent, not copied.
#[repr(C, align(64))]
struct Aligned<B: ?Sized>(B);

static WEIGHTS: &Aligned<[u8]> = &Aligned(*include_bytes!("../../../../models/demo/model.safetensors"));
const CONFIG: &[u8] = include_bytes!("../../../../models/demo/config.json");
const GENERATION_CONFIG: &[u8] = include_bytes!("../../../../models/demo/generation_config.json");
const TOKENIZER: &[u8] = include_bytes!("../../../../models/demo/tokenizer.json");
const TOKENIZER_CONFIG: &[u8] = include_bytes!("../../../../models/demo/tokenizer_config.json");

/// The checkpoint, whose weights lie in the program's own file and are read as they are used.
///
/// # Errors
/// None, unless the program was built from a broken model.
pub fn checkpoint() -> Result<Checkpoint> {
    Ok(Checkpoint::in_memory(Path::new(NAME), CONFIG, &WEIGHTS.0)?)
}

/// The tokenizer and what belongs to it.
pub fn text_files() -> TextFiles<'static> {
    TextFiles::in_memory(TOKENIZER)
        .with_tokenizer_config(TOKENIZER_CONFIG)
        .with_config(CONFIG)
        .with_generation_config(GENERATION_CONFIG)
}

/// Tells this model from that of another build.
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
        let (_, _, bytes) = checkpoint.raw(name).expect("present");
        assert!(WEIGHTS.0.as_ptr_range().contains(&bytes.as_ptr()));
        assert_eq!(WEIGHTS.0.as_ptr() as usize % 64, 0);
    }
}
