//! Memory of requests: bodies, texts and their copies have one budget, the category `requests`.
//!
//! What a request takes is charged before it is taken, by estimates that a test holds against the heap. So many requests at once,
//! or large ones, are refused with the numbers instead of filling the machine.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Result, ServerError};

/// A request that has taken no more than this may use all of the budget, a larger one [`LARGE_SHARE`] of it: so large bodies on
/// their way do not keep small requests out.
const SMALL_BYTES: u64 = 256 << 10;
const LARGE_SHARE: (u64, u64) = (7, 8);

/// The budget, and what of it is used. Cloning gives another handle.
#[derive(Clone, Debug)]
pub struct RequestMemory(Arc<Books>);

#[derive(Debug)]
struct Books {
    limit: u64,
    used: AtomicU64,
    peak: AtomicU64,
}

impl RequestMemory {
    /// A budget of so many bytes.
    pub fn new(limit: u64) -> RequestMemory {
        RequestMemory(Arc::new(Books { limit, used: AtomicU64::new(0), peak: AtomicU64::new(0) }))
    }

    /// Bytes that all requests may take together.
    pub fn limit(&self) -> u64 {
        self.0.limit
    }

    /// Bytes that they take now.
    pub fn used(&self) -> u64 {
        self.0.used.load(Ordering::Acquire)
    }

    /// The most that they took.
    pub fn peak(&self) -> u64 {
        self.0.peak.load(Ordering::Acquire)
    }

    pub(crate) fn meter(&self) -> Meter {
        Meter { books: Arc::clone(&self.0), held: AtomicU64::new(0) }
    }
}

/// What one request takes. Dropping it gives all back.
#[derive(Debug)]
pub(crate) struct Meter {
    books: Arc<Books>,
    held: AtomicU64,
}

impl Meter {
    /// Takes bytes.
    ///
    /// # Errors
    /// [`ServerError::RequestTooLarge`] if the budget would not do if it were free, [`ServerError::RequestMemory`] if it is not.
    pub fn take(&self, bytes: u64) -> Result<()> {
        let limit = self.books.limit;
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
                self.held.fetch_add(bytes, Ordering::AcqRel);
                Ok(())
            }
            Err(used) => Err(ServerError::RequestMemory { needed: bytes, used, limit: share }),
        }
    }

    /// Gives bytes back that were taken.
    pub fn give_back(&self, bytes: u64) {
        self.held.fetch_sub(bytes, Ordering::AcqRel);
        self.books.used.fetch_sub(bytes, Ordering::AcqRel);
    }

    /// Bytes taken, given back when the answer is dropped.
    pub fn hold(&self, bytes: u64) -> Result<Hold<'_>> {
        self.take(bytes)?;
        Ok(Hold { meter: self, bytes })
    }

    /// Gives back all but so many bytes, or what there is.
    pub fn settle(&self, bytes: u64) {
        self.give_back(self.held().saturating_sub(bytes));
    }

    /// Bytes that the request takes now.
    pub fn held(&self) -> u64 {
        self.held.load(Ordering::Acquire)
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.settle(0);
    }
}

/// Bytes of a [`Meter`] for a while.
#[derive(Debug)]
pub(crate) struct Hold<'a> {
    meter: &'a Meter,
    bytes: u64,
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        self.meter.give_back(self.bytes);
    }
}

/// Bytes of heap for each byte of a body, and for each value in it, while it is parsed, translated and made a prompt of.
const PER_BODY_BYTE: u64 = 5;
const PER_VALUE: u64 = 640;

/// Bytes of heap that a body becomes at most, on its way to a prompt.
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

/// Bytes of heap for each byte of a text, and for each word in it, while it is tokenized.
const PER_TEXT_BYTE: u64 = 120;
const PER_WORD: u64 = 320;

/// Bytes of heap that encoding a text takes at most. Words begin wherever the kind of character changes, and at every digit and
/// every mark, which is where tokenizers cut.
pub(crate) fn bytes_of_encoding(text: &str) -> u64 {
    let (mut words, mut before) = (1u64, 0u8);
    for &byte in text.as_bytes() {
        let kind = match byte {
            b'a'..=b'z' | b'A'..=b'Z' | 128..192 => 1,
            b' ' => 2,
            _ => 3,
        };
        // Beyond ASCII each character may be a word.
        words += u64::from((kind != before && kind != 2 && byte < 128) || kind == 3);
        before = kind;
    }
    text.len() as u64 * PER_TEXT_BYTE + words * PER_WORD
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_comes_back() {
        let memory = RequestMemory::new(8 << 20);
        let (first, second) = (memory.meter(), memory.meter());
        first.take(6 << 20).expect("there is room");
        let hold = first.hold(1 << 20).expect("there is room for this, too");
        assert_eq!(memory.used(), 7 << 20);
        assert!(matches!(second.take(1 << 20), Err(ServerError::RequestMemory { .. })));
        assert!(matches!(second.take(8 << 20), Err(ServerError::RequestTooLarge { .. })), "never");
        second.take(1 << 10).expect("small ones have a share of their own");
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
