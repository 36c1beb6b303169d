//! Parses arbitrary bodies of `/v1/embeddings`.

#![no_main]

use keel_server::requests::Endpoint;
use libfuzzer_sys::fuzz_target;

#[path = "../../tests/common/reading.rs"]
mod reading;

fuzz_target!(|body: &[u8]| {
    reading::exercise(Endpoint::Embeddings, body);
});
