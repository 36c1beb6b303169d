//! Processes a picture from the file's bytes to the tower's input.
#![no_main]

#[path = "../checks.rs"]
mod checks;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    checks::picture(bytes);
});
