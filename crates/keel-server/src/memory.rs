//! The memory of requests. Bodies, texts and their copies share one budget, the category `requests`.
//!
//! A request's memory is charged before it is allocated, by estimates that a test compares with the heap. So many or
//! large requests are refused with the numbers, and cannot exhaust the machine.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::Value;

use crate::error::{Result, ServerError};

/// A request that holds at most this may use the whole budget. A larger request may use [`LARGE_SHARE`] of it. So large
/// bodies do not keep small requests out.
const SMALL_BYTES: u64 = 256 << 10;
const LARGE_SHARE: (u64, u64) = (7, 8);

/// Interval between checks whether requests have ended.
const ROUND: Duration = Duration::from_secs(1);
/// Below this amount the allocator is not called.
const WORTH_GIVING_BACK_BYTES: u64 = 1 << 20;

/// The budget and its use. Clones share them.
#[derive(Clone, Debug)]
pub struct RequestMemory(Arc<Books>);

#[derive(Debug)]
struct Books {
    limit: u64,
    /// The part of the limit that is kept for connections.
    reserve: u64,
    used: AtomicU64,
    peak: AtomicU64,
    /// Sum of all bytes that were ever charged.
    total: AtomicU64,
}

impl RequestMemory {
    /// A budget of `limit` bytes, of which `reserve` are kept for connections.
    pub fn new(limit: u64, reserve: u64) -> RequestMemory {
        RequestMemory(Arc::new(Books {
            limit,
            reserve,
            used: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            total: AtomicU64::new(0),
        }))
    }

    /// The budget in bytes.
    pub fn limit(&self) -> u64 {
        self.0.limit
    }

    /// Bytes in use now.
    pub fn used(&self) -> u64 {
        self.0.used.load(Ordering::Acquire)
    }

    /// The peak of the bytes in use.
    pub fn peak(&self) -> u64 {
        self.0.peak.load(Ordering::Acquire)
    }

    /// Calls `give_back` after requests have ended. Runs forever. The allocator may keep the memory of ended requests
    /// where others cannot use it.
    pub(crate) async fn give_back_at_rest(self, give_back: fn()) {
        let mut seen = 0;
        loop {
            tokio::time::sleep(ROUND).await;
            let total = self.0.total.load(Ordering::Acquire);
            if total - seen >= WORTH_GIVING_BACK_BYTES && self.used() == 0 {
                seen = total;
                let _ = tokio::task::spawn_blocking(give_back).await;
            }
        }
    }

    pub(crate) fn meter(&self) -> Meter {
        Meter { books: Arc::clone(&self.0), held: AtomicU64::new(0) }
    }
}

/// The charge of one request. Dropping it returns all bytes.
#[derive(Debug)]
pub(crate) struct Meter {
    books: Arc<Books>,
    held: AtomicU64,
}

impl Meter {
    /// Charges bytes.
    ///
    /// # Errors
    /// [`ServerError::RequestTooLarge`] if the request exceeds even an unused budget, [`ServerError::RequestMemory`] if
    /// other requests use too much of it.
    pub fn take(&self, bytes: u64) -> Result<()> {
        if bytes == 0 {
            // Whatever others use, what is charged already stays.
            return Ok(());
        }
        let limit = self.books.limit.saturating_sub(self.books.reserve);
        let large = limit / LARGE_SHARE.1 * LARGE_SHARE.0;
        let wanted = self.held().saturating_add(bytes);
        let share = if wanted <= SMALL_BYTES { limit } else { large };
        if wanted > share {
            return Err(ServerError::RequestTooLarge { needed: wanted, limit: share });
        }
        let more = |used: u64| used.checked_add(bytes).filter(|&used| used <= share);
        match self.books.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, more) {
            Ok(before) => {
                self.books.peak.fetch_max(before + bytes, Ordering::AcqRel);
                self.books.total.fetch_add(bytes, Ordering::AcqRel);
                self.held.fetch_add(bytes, Ordering::AcqRel);
                Ok(())
            }
            Err(used) => Err(ServerError::RequestMemory { needed: bytes, used, limit: share }),
        }
    }

    /// Returns charged bytes.
    pub fn give_back(&self, bytes: u64) {
        self.held.fetch_sub(bytes, Ordering::AcqRel);
        self.books.used.fetch_sub(bytes, Ordering::AcqRel);
    }

    /// Charges bytes until the returned [`Hold`] is dropped.
    pub fn hold(&self, bytes: u64) -> Result<Hold<'_>> {
        self.take(bytes)?;
        Ok(Hold { meter: self, bytes })
    }

    /// Reduces the charge to `bytes`, if it is larger.
    pub fn settle(&self, bytes: u64) {
        self.give_back(self.held().saturating_sub(bytes));
    }

    /// Bytes that are charged to the request now.
    pub fn held(&self) -> u64 {
        self.held.load(Ordering::Acquire)
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.settle(0);
    }
}

/// Bytes of a [`Meter`] that are charged for a while.
#[derive(Debug)]
pub(crate) struct Hold<'a> {
    meter: &'a Meter,
    bytes: u64,
}

impl Hold<'_> {
    /// Keeps `bytes` of it charged to the request, and gives the rest back.
    pub fn keep(mut self, bytes: u64) {
        debug_assert!(bytes <= self.bytes, "what is kept was charged");
        self.bytes = self.bytes.saturating_sub(bytes);
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        self.meter.give_back(self.bytes);
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

/// Heap bytes per byte of a text while it is tokenized. [`PER_WORD`] is the same per word.
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
/// The same per byte of a token's text that is reported with its log probability, because its bytes are listed as
/// numbers; and per token of such a list.
const PER_LISTED_BYTE: u64 = 110;
const PER_LISTED_TOKEN: u64 = 2000;

/// The most heap bytes for a part of an answer that is collected.
pub(crate) fn bytes_of_part(text: &str) -> u64 {
    // Control characters take six bytes as JSON.
    let escaped = text.bytes().filter(|byte| *byte < 32 || matches!(byte, b'"' | b'\\')).count();
    (text.len() + escaped * 2) as u64 * PER_ANSWER_BYTE
}

/// The most heap bytes for tokens that are reported with their log probabilities.
pub(crate) fn bytes_of_listed<'a>(texts: impl Iterator<Item = &'a str>) -> u64 {
    texts.map(|text| text.len() as u64 * PER_LISTED_BYTE + PER_LISTED_TOKEN).sum()
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
        assert!(matches!(second.take(1 << 20), Err(ServerError::RequestMemory { .. })));
        assert!(matches!(second.take(8 << 20), Err(ServerError::RequestTooLarge { .. })), "never");
        second.take(1 << 10).expect("small ones have a share of their own");
        first.take(0).expect("nothing more is no refusal");
        drop(hold);
        first.settle(100);
        assert_eq!((first.held(), memory.used()), (100, 100 + (1 << 10)));
        drop((first, second));
        assert_eq!((memory.used(), memory.peak()), (0, (7 << 20) + (1 << 10)));
    }

    #[test]
    fn commas_in_strings_are_no_values() {
        let bytes = |body: &str| bytes_of_body(body.as_bytes()) - body.len() as u64 * PER_BODY_BYTE;
        assert_eq!(bytes(r#""a,b,\",[{""#), PER_VALUE);
        assert_eq!(bytes(r#"[1,"a"]"#), 3 * PER_VALUE);
    }
}
