//! The index of a folder with remembered prefixes.
#![no_main]

#[path = "../checks.rs"]
mod checks;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    checks::Bench::of_this_thread(|bench| bench.prefix_index(bytes));
});
