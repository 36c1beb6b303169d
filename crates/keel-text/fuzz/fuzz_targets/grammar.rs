//! Compiles arbitrary schemas, grammars and regular expressions.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../tests/common/answering.rs"]
mod answering;

fuzz_target!(|data: &[u8]| {
    answering::exercise_grammar(data);
});
