//! Parses arbitrary answers into their parts.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../tests/common/answering.rs"]
mod answering;

fuzz_target!(|data: &[u8]| {
    answering::exercise_answer(data);
});
