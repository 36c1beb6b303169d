//! The config.json of a model of any family, and its vision tower.
#![no_main]

#[path = "../checks.rs"]
mod checks;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    checks::config(bytes);
    checks::tower(bytes);
});
