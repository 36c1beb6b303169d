//! Parses arbitrary bodies of `/tokenize` and `/detokenize`.

#![no_main]

use keel_server::requests::Endpoint;
use libfuzzer_sys::fuzz_target;

#[path = "../../tests/common/reading.rs"]
mod reading;

fuzz_target!(|body: &[u8]| {
    reading::exercise(Endpoint::Tokenize, body);
    reading::exercise(Endpoint::Detokenize, body);
});
