//! The memory of requests. Bodies, texts and their copies share one budget, the category `requests`.
//!
//! A request's memory is charged before it is allocated, by estimates that a test compares with the heap. So a
//! flood of requests, or a large one, is refused with the numbers and cannot exhaust the machine.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;

use crate::error::{Result, ServerError, setting};
pub(crate) use crate::memory::charge::Meter;
use crate::memory::charge::{Budget, Refused};

/// The least memory of requests. With less there is no room for a request next to the connections.
pub const REQUEST_MEMORY_MIN: u64 = 1 << 20;

/// Interval between checks whether requests have ended.
const ROUND: Duration = Duration::from_secs(1);
/// Below this amount the allocator is not called.
const WORTH_GIVING_BACK_BYTES: u64 = 1 << 20;

/// Refuses a budget that has no room for a request.
pub(crate) fn check_limit(limit: u64) -> Result<()> {
    if limit >= REQUEST_MEMORY_MIN {
        return Ok(());
    }
    let problem = format!("{limit} bytes are too few for any request: give at least {REQUEST_MEMORY_MIN}");
    Err(setting("--request-memory", problem))
}

/// The budget and its use. Clones share them.
#[derive(Clone, Debug)]
pub struct RequestMemory(Arc<Budget>);

impl RequestMemory {
    /// A budget of `limit` bytes, of which `reserve` are kept for connections.
    pub fn new(limit: u64, reserve: u64) -> RequestMemory {
        RequestMemory(Arc::new(Budget::new(limit, reserve)))
    }

    /// The budget in bytes.
    pub fn limit(&self) -> u64 {
        self.0.limit()
    }

    /// Bytes in use now.
    pub fn used(&self) -> u64 {
        self.0.used()
    }

    /// The peak of the bytes in use.
    pub fn peak(&self) -> u64 {
        self.0.peak()
    }

    /// Calls `give_back` after requests have ended. Runs forever. The allocator may keep the memory of ended requests
    /// where others cannot use it.
    pub(crate) async fn give_back_at_rest(self, give_back: fn()) {
        let mut seen = 0;
        loop {
            tokio::time::sleep(ROUND).await;
            let total = self.0.total();
            if total - seen >= WORTH_GIVING_BACK_BYTES && self.used() == 0 {
                seen = total;
                let _ = tokio::task::spawn_blocking(give_back).await;
            }
        }
    }

    /// The meter of a new request.
    pub(crate) fn meter(&self) -> Meter {
        Meter::new(&self.0)
    }
}

impl From<Refused> for ServerError {
    fn from(refused: Refused) -> ServerError {
        match refused {
            Refused::Always { needed, limit } => ServerError::RequestTooLarge { needed, limit },
            Refused::Now { needed, used, limit } => ServerError::RequestMemory { needed, used, limit },
        }
    }
}

/// Heap bytes per byte of a body while it is parsed, translated and turned into a prompt. [`PER_VALUE`] is the same per
/// JSON value.
const PER_BODY_BYTE: u64 = 5;
const PER_VALUE: u64 = 640;

/// The most heap bytes that a body takes until it is a prompt.
pub(crate) fn bytes_of_body(body: &[u8]) -> u64 {
    let (mut values, mut in_string, mut escaped) = (1u64, false, false);
    for &byte in body {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b',' | b':' | b'[' | b'{' if !in_string => values += 1,
            _ => {}
        }
    }
    body.len() as u64 * PER_BODY_BYTE + values * PER_VALUE
}

/// Heap bytes per byte of a text while it is tokenized. [`PER_WORD`] is the same per word. English prose is charged
/// about 180 bytes per byte. So the default budget has room for a text of about 2.4 MB, which is less than the limit on
/// bodies.
const PER_TEXT_BYTE: u64 = 120;
const PER_WORD: u64 = 320;

/// The most heap bytes for encoding a text. A word begins where the kind of character changes, and at every digit and
/// every mark, because tokenizers cut there.
pub(crate) fn bytes_of_encoding(text: &str) -> u64 {
    let (mut words, mut before) = (1u64, 0u8);
    for &byte in text.as_bytes() {
        let kind = match byte {
            b'a'..=b'z' | b'A'..=b'Z' | 128..192 => 1,
            b' ' => 2,
            _ => 3,
        };
        // Outside ASCII each character may be a word.
        words += u64::from((kind != before && kind != 2 && byte < 128) || kind == 3);
        before = kind;
    }
    text.len() as u64 * PER_TEXT_BYTE + words * PER_WORD
}

/// Heap bytes per byte of an answer's text until it is sent: the text, its copy as JSON, and the serialized answer, in
/// buffers that grow by doubling.
const PER_ANSWER_BYTE: u64 = 10;

/// The form in which tokens are listed with their log probabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Listing {
    /// An object per token, with its bytes as a list of numbers (chats).
    Objects,
    /// An entry in a map per token (completions).
    Entries,
}

impl Listing {
    /// Heap bytes per listed token, and per byte of it.
    fn bytes_per_token_and_byte(self) -> (u64, u64) {
        match self {
            Listing::Objects => (2000, 110),
            Listing::Entries => (340, 20),
        }
    }

    /// The most heap bytes for tokens with these bytes.
    pub fn bytes<'a>(self, tokens: impl Iterator<Item = &'a [u8]>) -> u64 {
        let (per_token, per_byte) = self.bytes_per_token_and_byte();
        tokens.map(|token| per_token + token.len() as u64 * per_byte).sum()
    }
}

/// The most heap bytes for a part of an answer that is collected.
pub(crate) fn bytes_of_part(text: &str) -> u64 {
    // Control characters take six bytes as JSON.
    let escaped = text.bytes().filter(|byte| *byte < 32 || matches!(byte, b'"' | b'\\')).count();
    (text.len() + escaped * 2) as u64 * PER_ANSWER_BYTE
}

/// The heap bytes of a JSON value.
pub(crate) fn bytes_of_value(value: &Value) -> u64 {
    const PER_ENTRY: u64 = 160;
    let within = match value {
        Value::String(text) => text.len() as u64,
        Value::Array(values) => values.iter().map(bytes_of_value).sum(),
        Value::Object(fields) => {
            fields.iter().map(|(name, value)| name.len() as u64 + PER_ENTRY + bytes_of_value(value)).sum()
        }
        _ => 0,
    };
    within + size_of::<Value>() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_comes_back() {
        let memory = RequestMemory::new(9 << 20, 1 << 20);
        let (first, second) = (memory.meter(), memory.meter());
        first.take(6 << 20).expect("there is room");
        let hold = first.hold(1 << 20).expect("there is room for this, too");
        assert_eq!(memory.used(), 7 << 20);
        assert!(matches!(second.take(1 << 20), Err(Refused::Now { .. })));
        assert!(matches!(second.take(8 << 20), Err(Refused::Always { .. })), "never");
        second.take(1 << 10).expect("small ones have a share of their own");
        first.take(0).expect("nothing more is no refusal");
        drop(hold);
        first.settle(100);
        assert_eq!((first.held(), memory.used()), (100, 100 + (1 << 10)));
        drop((first, second));
        assert_eq!((memory.used(), memory.peak()), (0, (7 << 20) + (1 << 10)));
    }

    #[test]
    fn parts_of_a_request_that_never_fit_together_are_too_large() {
        let memory = RequestMemory::new(8 << 20, 0);
        let request = memory.meter();
        let part = request.part();
        part.take(6 << 20).expect("there is room");
        assert!(matches!(request.take(2 << 20), Err(Refused::Always { .. })), "other requests hold nothing");
        assert_eq!((request.held(), part.held(), memory.used()), (0, 6 << 20, 6 << 20));
        drop(part);
        request.set(2 << 20).expect("there is room");
        request.set(1 << 20).expect("it is less");
        assert_eq!(memory.used(), 1 << 20);
    }

    /// Few bytes wait for the client of a large request. They fit where a small request would fit.
    #[test]
    fn a_small_part_of_a_large_request_uses_the_room_of_small_ones() {
        let memory = RequestMemory::new(8 << 20, 0);
        let (large, others) = (memory.meter(), memory.meter());
        large.take(1 << 20).expect("there is room");
        others.take(6 << 20).expect("there is room");
        assert_eq!(memory.used(), 7 << 20);
        let waiting = large.part();
        waiting.take(100).expect("an eighth is free for small ones");
        assert!(matches!(large.take(1 << 20), Err(Refused::Now { .. })), "but not for large ones");
        assert!(matches!(large.take(1000), Err(Refused::Now { .. })), "nor for parts of these");
        large.grow(1000).expect("a running answer grows into it");
        assert!(matches!(large.grow(1 << 20), Err(Refused::Now { .. })), "up to the budget");
    }

    #[test]
    fn a_budget_without_room_for_a_request_is_refused() {
        let error = check_limit(REQUEST_MEMORY_MIN - 1).expect_err("too little").to_string();
        assert!(error.contains("--request-memory") && error.contains("1048576"), "{error}");
        check_limit(REQUEST_MEMORY_MIN).expect("enough");
    }

    #[test]
    fn commas_in_strings_are_no_values() {
        let bytes = |body: &str| bytes_of_body(body.as_bytes()) - body.len() as u64 * PER_BODY_BYTE;
        assert_eq!(bytes(r#""a,b,\",[{""#), PER_VALUE);
        assert_eq!(bytes(r#"[1,"a"]"#), 3 * PER_VALUE);
    }
}
