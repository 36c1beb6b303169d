//! The header of a file with a saved sequence.
#![no_main]

#[path = "../checks.rs"]
mod checks;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    checks::Bench::of_this_thread(|bench| (bench.sequence(bytes), bench.continuation(bytes)));
});
