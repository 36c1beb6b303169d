//! Ids to text, one id at a time.
//!
//! The text of a token depends on its neighbours: a character may be spread over several tokens, and some decoders drop
//! the space before the first word. So each id is decoded together with a few ids before it. The text that those ids
//! already gave is cut off:
//!
//! ```text
//! ids      ... | context | pending |          window = context + pending
//! text     ... | emitted      | new |held     new = decode(window)[emitted..], less held, which may still change
//! ```
//!
//! The window has a few ids, so an id costs the same at any point of the text.
//!
//! Two kinds of vocabulary spread characters over tokens:
//!
//! - A byte-level vocabulary decodes all bytes at once. An unfinished character at the end shows as exactly one U+FFFD,
//!   and only that U+FFFD is held back.
//! - A vocabulary with byte tokens (`<0xE5>`) decodes a run of them all or nothing, so an invalid byte would undo the
//!   characters before it. This module decodes runs incrementally: complete characters stay.

use crate::{TextError, Tokenizer};

const REPLACEMENT: char = '\u{FFFD}';

/// An unfinished character has at most 3 bytes, at worst each in its own token. One more token proves that it is
/// unfinished. A window cut to this many pending ids still begins before the character.
const PENDING_IDS_MAX: usize = 4;

/// Decodes ids one by one. Made by [`Tokenizer::stream`].
///
/// The concatenated pieces equal [`Tokenizer::decode`] of all ids, with one exception. Where byte tokens spell valid
/// characters and then an invalid one, `decode` replaces the whole run by U+FFFD. The stream has already emitted the
/// valid characters, so it replaces only the invalid bytes.
///
/// Each piece consists of whole characters. A character that could still be completed is never shown as U+FFFD.
#[derive(Clone, Debug)]
pub struct StreamDetokenizer {
    tokenizer: Tokenizer,
    skip_special: bool,
    /// Special ids that are decoded to text nevertheless, ascending.
    shown: Vec<u32>,
    /// Ids whose text was emitted, followed by the pending ids.
    window: Vec<u32>,
    /// Number of context ids at the beginning of the window.
    context_len: usize,
    /// Number of bytes of the window's text that were emitted.
    emitted: usize,
    /// Byte tokens of an incomplete character.
    run: ByteRun,
    /// The last piece.
    piece: String,
}

#[derive(Clone, Debug, Default)]
struct ByteRun {
    ids: Vec<u32>,
    bytes: Vec<u8>,
}

impl StreamDetokenizer {
    pub(crate) fn new(tokenizer: Tokenizer, skip_special: bool, shown: Vec<u32>) -> Self {
        StreamDetokenizer {
            tokenizer,
            skip_special,
            shown,
            window: Vec::new(),
            context_len: 0,
            emitted: 0,
            run: ByteRun::default(),
            piece: String::new(),
        }
    }

    /// Takes the next id. Returns the text that it completes, which may be empty.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn push(&mut self, id: u32) -> Result<&str, TextError> {
        self.piece.clear();
        let is_shown = self.shown.binary_search(&id).is_ok();
        if is_shown || !self.tokenizer.is_hidden(id, self.skip_special) {
            match self.tokenizer.byte_of(id) {
                Some(byte) => self.push_byte(id, byte)?,
                None => self.push_token(id)?,
            }
        }
        Ok(&self.piece)
    }

    /// Ends the text. Returns the text that was held back, with U+FFFD for a character that was never completed. The
    /// next `push` begins a new text.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn finish(&mut self) -> Result<&str, TextError> {
        self.piece.clear();
        let text = self.decode(&self.window)?;
        self.piece.push_str(text.get(self.emitted..).unwrap_or_default());
        self.abandon_run();
        self.window.clear();
        self.context_len = 0;
        self.emitted = 0;
        Ok(&self.piece)
    }

    /// Decodes ids that passed the check of `push`: none of them is hidden.
    fn decode(&self, ids: &[u32]) -> Result<String, TextError> {
        self.tokenizer.decode(ids, self.skip_special && self.shown.is_empty())
    }

    fn push_token(&mut self, id: u32) -> Result<(), TextError> {
        self.abandon_run();
        self.window.push(id);
        let text = self.decode(&self.window)?;
        let settled = self.settled(&text);
        self.piece.push_str(settled.get(self.emitted..).unwrap_or_default());
        if settled.len() == text.len() {
            self.window.drain(..self.context_len);
            return self.all_is_out();
        }
        self.emitted = self.emitted.max(settled.len());
        if self.window.len() - self.context_len > PENDING_IDS_MAX {
            // The text has been unfinished for longer than a character can be. So the front is settled, whatever it
            // looks like. The bytes of the last unfinished character decode the same with and without the front.
            self.window.drain(..self.window.len() - PENDING_IDS_MAX);
            self.context_len = 0;
            let text = self.decode(&self.window)?;
            self.emitted = self.settled(&text).len();
        }
        Ok(())
    }

    /// Adds a byte to the run and moves completed characters to the piece.
    fn push_byte(&mut self, id: u32, byte: u8) -> Result<(), TextError> {
        self.run.ids.push(id);
        self.run.bytes.push(byte);
        match std::str::from_utf8(&self.run.bytes) {
            Ok(_) if self.window.is_empty() => {
                // The text begins here, and a decoder may strip its beginning.
                self.piece.push_str(&self.decode(&self.run.ids)?);
            }
            Ok(text) => self.piece.push_str(text),
            Err(err) if err.error_len().is_none() => return Ok(()),
            Err(_) => {
                // The bytes before this one cannot be completed any more. This byte may begin a character.
                self.run.ids.pop();
                self.run.bytes.pop();
                let broke_a_character = !self.run.bytes.is_empty();
                self.abandon_run();
                if broke_a_character {
                    return self.push_byte(id, byte);
                }
                self.piece.push(REPLACEMENT);
                self.run.ids.push(id);
            }
        }
        self.window = std::mem::take(&mut self.run.ids);
        self.run.bytes.clear();
        self.all_is_out()
    }

    /// Gives up the incomplete character of the run. As in the decoder, each of its bytes becomes one U+FFFD.
    fn abandon_run(&mut self) {
        if self.run.bytes.is_empty() {
            return;
        }
        self.piece.extend(self.run.bytes.drain(..).map(|_| REPLACEMENT));
        self.window = std::mem::take(&mut self.run.ids);
        self.context_len = self.window.len();
        // The decoder makes one replacement character of each byte.
        self.emitted = self.window.len() * REPLACEMENT.len_utf8();
    }

    /// Marks the text of the whole window as emitted.
    fn all_is_out(&mut self) -> Result<(), TextError> {
        self.context_len = self.window.len();
        self.emitted = self.decode(&self.window)?.len();
        Ok(())
    }

    /// The part of the text that later ids cannot change: everything except one U+FFFD at the end. With byte tokens it
    /// is the whole text, because the unfinished character is in the run and not in the window.
    fn settled<'a>(&self, text: &'a str) -> &'a str {
        match text.strip_suffix(REPLACEMENT) {
            Some(before) if !self.tokenizer.has_byte_tokens() => before,
            _ => text,
        }
    }
}
