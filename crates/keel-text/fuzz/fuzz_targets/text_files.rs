//! Opens and uses the text files of a checkpoint, with arbitrary contents.
//!
//! The input's first byte selects the file that the rest replaces. The other files are those of a small valid
//! checkpoint.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../tests/common/exercise.rs"]
mod exercise;

use exercise::{Input, exercise};

const TOKENIZER: &[u8] = include_bytes!("../../tests/assets/byte_level/tokenizer.json");

fuzz_target!(|data: &[u8]| {
    let Some((&which, bytes)) = data.split_first() else { return };
    let mut input = Input::default();
    match which % 5 {
        0 => input.tokenizer = bytes.to_vec(),
        1 => input.template = bytes.to_vec(),
        other => {
            input.tokenizer = TOKENIZER.to_vec();
            match other {
                2 => input.tokenizer_config = bytes.to_vec(),
                3 => input.config = bytes.to_vec(),
                _ => input.generation_config = bytes.to_vec(),
            }
        }
    }
    exercise(&input);
});
