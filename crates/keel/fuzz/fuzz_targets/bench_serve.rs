//! Parses the input of `keel bench serve`: a file of requests, and a server's events. The first byte selects how events
//! are cut.

#![no_main]
#![allow(dead_code)] // the rest of these modules is for the command

use libfuzzer_sys::fuzz_target;

#[path = "../../src/commands/bench/serve/events.rs"]
mod events;
#[path = "../../src/commands/bench/serve/load.rs"]
mod load;

fuzz_target!(|data: &[u8]| {
    let Some((&cut, body)) = data.split_first() else { return };
    let mut events = events::Events::default();
    for piece in body.chunks(1 + usize::from(cut)) {
        if events.push(piece).is_err() {
            break;
        }
    }
    if let Ok(text) = std::str::from_utf8(body) {
        let _ = load::Load::parse(text, 5.0, 1);
    }
});
