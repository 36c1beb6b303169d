//! Encodes text to ids and decodes ids to text.

mod bpe;
mod check;
mod model;
mod read;
mod token_byte_bound;

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use crate::cancel;
use crate::panics::catch_panics;
use crate::special::eos_ids;
use crate::vocabulary::bytes::spelled_bytes;
use crate::{AnswerForm, SpecialTokens, StreamDetokenizer, TextError, TextFiles};

pub(crate) use read::TOKENS_MAX;

/// The tokenizer of a checkpoint. Cloning shares it; it is read-only and may be used from any thread.
#[derive(Clone)]
pub struct Tokenizer {
    shared: Arc<Shared>,
}

struct Shared {
    checked: read::CheckedTokenizer,
    special: SpecialTokens,
    bos_id: Option<u32>,
    eos_ids: Vec<u32>,
    bos_fix: BosFix,
}

/// How [`Tokenizer::encode`] corrects the token at the beginning, where `tokenizer_config.json` and `tokenizer.json`
/// disagree about it. `tokenizer_config.json` takes precedence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BosFix {
    Keep,
    Insert(u32),
    Remove(u32),
}

impl Tokenizer {
    /// Reads the tokenizer of a checkpoint folder.
    ///
    /// # Errors
    /// As [`TextFiles::read`] and [`Tokenizer::new`].
    pub fn open(folder: &Path) -> Result<Self, TextError> {
        Self::new(&TextFiles::read(folder)?)
    }

    /// Reads a tokenizer from the bytes of a `tokenizer.json` alone. It has no named beginning and end tokens.
    ///
    /// # Errors
    /// As [`Tokenizer::new`].
    pub fn from_bytes(tokenizer_json: &[u8]) -> Result<Self, TextError> {
        Self::new(&TextFiles::in_memory(tokenizer_json))
    }

    /// Reads a tokenizer, and the special tokens that the other files name.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`] if `tokenizer.json` is malformed or contradicts itself, [`TextError::Json`] and
    /// [`TextError::Field`] for the other files.
    pub fn new(files: &TextFiles<'_>) -> Result<Self, TextError> {
        let special = SpecialTokens::new(files)?;
        let mut eos_ids = eos_ids(files)?;
        let checked = catch_panics("open the tokenizer", || {
            read::read(&files.tokenizer.bytes)
                .map_err(|reason| TextError::Tokenizer { file: files.tokenizer.name.clone(), reason })
        })?;
        let id_of =
            |token: &Option<String>| token.as_ref().and_then(|token| checked.inner.token_to_id(token));
        let bos_id = id_of(&special.bos);
        eos_ids.extend(id_of(&special.eos));
        eos_ids.sort_unstable();
        eos_ids.dedup();
        let bos_fix = match (special.add_bos, bos_id) {
            (Some(wanted), Some(bos)) => BosFix::new(wanted, bos, &checked)?,
            _ => BosFix::Keep,
        };
        Ok(Tokenizer { shared: Arc::new(Shared { checked, special, bos_id, eos_ids, bos_fix }) })
    }

    /// Encodes a text. Special tokens written out in it become their ids.
    ///
    /// `add_special` adds the tokens that the checkpoint puts around a text, for example at its beginning. Pass `false`
    /// for text from a chat template, which already contains them.
    ///
    /// # Errors
    /// [`TextError::Tokenize`] if the tokenizer refuses the text. Example: the text needs a token for unknown
    /// characters that the vocabulary lacks.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError> {
        let mut ids = encode_as_written(&self.shared.checked, text, add_special)?;
        match self.shared.bos_fix {
            BosFix::Insert(bos) if add_special => ids.insert(0, bos),
            BosFix::Remove(bos) if add_special && ids.first() == Some(&bos) => drop(ids.remove(0)),
            _ => {}
        }
        Ok(ids)
    }

    /// The fewest tokens that a text can have, from its number of bytes alone. It serves to refuse a text that is too
    /// long before encoding it. It is 0 if a step of the tokenizer drops text, or makes one token of text of any
    /// length.
    pub fn tokens_at_least(&self, text: &str) -> usize {
        let least = self.shared.checked.longest.map_or(0, |longest| longest.tokens_at_least(text));
        // `encode` removes a token that was added at the beginning.
        least.saturating_sub(usize::from(matches!(self.shared.bos_fix, BosFix::Remove(_))))
    }

    /// The most bytes that a text of this kind can have, if it has at most `tokens` tokens. The kind is whether it is
    /// ASCII. `None` if there is no bound.
    pub fn bytes_at_most(&self, text: &str, tokens: usize) -> Option<usize> {
        let removed = usize::from(matches!(self.shared.bos_fix, BosFix::Remove(_)));
        let longest = self.shared.checked.longest?.bytes_of_token(text);
        Some(tokens.saturating_add(removed).saturating_mul(longest))
    }

    /// Decodes ids. Ids outside the vocabulary decode to nothing, and invalid UTF-8 to U+FFFD.
    ///
    /// # Errors
    /// [`TextError::Tokenize`] if the decoder refuses the tokens.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TextError> {
        // One of the library's decoders fails on an empty list.
        if ids.iter().all(|&id| self.is_hidden(id, skip_special)) {
            return Ok(String::new());
        }
        catch_panics("decode", || {
            self.shared
                .checked
                .inner
                .decode(ids, skip_special)
                .map_err(|err| TextError::Tokenize { op: "decode", reason: err.to_string() })
        })
    }

    /// The bytes of a token alone: those of its text, special or not. A token that is a part of a character has bytes
    /// that are no UTF-8; [`Tokenizer::decode`] gives U+FFFD for them.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn token_bytes(&self, id: u32) -> Result<Vec<u8>, TextError> {
        if let Some(byte) = self.byte_of(id) {
            return Ok(vec![byte]);
        }
        let text = self.decode(&[id], false)?;
        let is_partial = text.contains(char::REPLACEMENT_CHARACTER);
        let spelled =
            if is_partial { self.id_to_token(id).and_then(|token| spelled_bytes(&token)) } else { None };
        if let Some(bytes) = spelled {
            return Ok(bytes);
        }
        // Some decoders drop the space before the first token. So the token is decoded after itself.
        let twice = self.decode(&[id, id], false)?;
        let second = twice.strip_prefix(&text).filter(|second| !second.is_empty());
        Ok(second.map_or_else(|| text.clone().into_bytes(), |second| second.as_bytes().to_vec()))
    }

    /// Starts decoding a stream of ids, one by one.
    pub fn stream(&self, skip_special: bool) -> StreamDetokenizer {
        StreamDetokenizer::new(self.clone(), skip_special, Vec::new())
    }

    /// As [`Tokenizer::stream`] without special tokens, for an [`AnswerParser`](crate::AnswerParser) of the same form.
    /// Tokens that models write around the parts of this form are part of the text, also if they are special.
    pub fn answer_stream(&self, form: &AnswerForm) -> StreamDetokenizer {
        let mut shown: Vec<u32> = form.tokens().filter_map(|token| self.token_to_id(token)).collect();
        shown.sort_unstable();
        StreamDetokenizer::new(self.clone(), true, shown)
    }

    /// The id of a token in the vocabulary's spelling.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.shared.checked.inner.token_to_id(token)
    }

    /// A token in the vocabulary's spelling. It may differ from the token's text: byte-level vocabularies write a space
    /// as `Ġ`.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.shared.checked.inner.id_to_token(id)
    }

    /// The largest id plus 1. A model may have more logits, because of padding.
    pub fn vocab_size(&self) -> usize {
        self.shared.checked.vocab_size
    }

    /// Ids of all special tokens, ascending.
    pub fn special_ids(&self) -> &[u32] {
        &self.shared.checked.special_ids
    }

    /// Whether decoding with `skip_special` leaves this id out.
    pub fn is_special(&self, id: u32) -> bool {
        self.shared.checked.special_ids.binary_search(&id).is_ok()
    }

    /// The id at the beginning of a sequence.
    pub fn bos_id(&self) -> Option<u32> {
        self.shared.bos_id
    }

    /// Ids that end a generation, ascending: all those of `tokenizer_config.json`, `config.json` (also inside
    /// `text_config`) and `generation_config.json`.
    pub fn eos_ids(&self) -> &[u32] {
        &self.shared.eos_ids
    }

    /// The special tokens by name, as text.
    pub fn special_tokens(&self) -> &SpecialTokens {
        &self.shared.special
    }

    /// Whether an id adds nothing to decoded text.
    pub(crate) fn is_hidden(&self, id: u32, skip_special: bool) -> bool {
        (skip_special && self.is_special(id)) || self.id_to_token(id).is_none_or(|token| token.is_empty())
    }

    /// The byte that a token such as `<0xE5>` stands for.
    pub(crate) fn byte_of(&self, id: u32) -> Option<u8> {
        self.shared.checked.byte_of.get(&id).copied()
    }

    /// Whether the vocabulary spells unknown characters with byte tokens.
    pub(crate) fn has_byte_tokens(&self) -> bool {
        !self.shared.checked.byte_of.is_empty()
    }
}

impl BosFix {
    /// Compares the tokens that `tokenizer.json` adds to an empty text with the wish of `tokenizer_config.json`.
    fn new(wanted: bool, bos: u32, checked: &read::CheckedTokenizer) -> Result<Self, TextError> {
        let added = encode_as_written(checked, "", true)?.first() == Some(&bos);
        Ok(match (wanted, added) {
            (true, false) => BosFix::Insert(bos),
            (false, true) => BosFix::Remove(bos),
            _ => BosFix::Keep,
        })
    }
}

/// Encodes as `tokenizer.json` alone specifies.
fn encode_as_written(
    checked: &read::CheckedTokenizer,
    text: &str,
    add_special: bool,
) -> Result<Vec<u32>, TextError> {
    catch_panics("encode", || {
        let encoding = checked.inner.encode_fast(text, add_special);
        // A cancelled encoding is incomplete.
        cancel::check()?;
        let encoding =
            encoding.map_err(|err| TextError::Tokenize { op: "encode", reason: err.to_string() })?;
        Ok(encoding.get_ids().to_vec())
    })
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("bos_id", &self.bos_id())
            .field("eos_ids", &self.eos_ids())
            .finish_non_exhaustive()
    }
}
