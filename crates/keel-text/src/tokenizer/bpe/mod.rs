//! Byte pair encoding that needs little memory.
//!
//! The library's model stores every text twice in separate strings, and the pairs in a map. That takes 30 MB for
//! 150,000 tokens and 80 MB for 262,000 tokens, more than half the size of small models. Here a token is a number, and
//! all texts share one string. The tests below compare the result with the library's.

mod merges;
mod read;
mod texts;
mod word;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::BpeTrainer;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{Model, Token};

use crate::cancel;
use merges::Merges;
pub(super) use read::read;
use texts::Texts;
use word::{PairMerge, Symbol, Word};

/// Bytes of a word between two checks for cancellation.
const CHECKED_EACH: usize = 1024;

/// A vocabulary and its merges.
pub(super) struct Bpe {
    texts: Texts,
    merges: Merges,
    /// Put before each character that does not begin a word. It is left out where tokens are joined.
    prefix: String,
    /// Put after the last character of a word.
    suffix: String,
    /// The token for characters that the vocabulary lacks. With `None` they are dropped. The vocabulary may lack this
    /// token, too.
    unknown: Option<String>,
    /// Whether neighbouring unknown characters become one token.
    fuse_unknown: bool,
    /// Places of the tokens `<0x00>` to `<0xFF>`, if unknown characters are spelled with them.
    byte_tokens: Option<Box<[Option<u32>; 256]>>,
    /// Whether a word that is a token is taken whole, however its pairs would merge.
    ignore_merges: bool,
}

impl Bpe {
    /// The largest id.
    pub(super) fn id_max(&self) -> u32 {
        self.texts.id(self.texts.len() - 1)
    }

    /// The most bytes of text that one token covers. `None` if some character may get no token. `in_bytes` says that
    /// each character of a word stands for one byte.
    pub(super) fn longest_token(&self, in_bytes: bool) -> Option<usize> {
        let texts = || (0..self.texts.len()).map(|place| self.texts.text(place));
        if in_bytes {
            let knows = |c: char| self.texts.place(c.encode_utf8(&mut [0; 4])).is_some();
            let is_plain = self.prefix.is_empty() && self.suffix.is_empty();
            return (is_plain && ByteLevel::alphabet().into_iter().all(knows))
                .then(|| texts().map(|text| text.chars().count()).max().unwrap_or(1));
        }
        let spells_all = self.byte_tokens.as_ref().is_some_and(|tokens| tokens.iter().all(Option::is_some));
        spells_all.then(|| texts().map(str::len).max().unwrap_or(1))
    }

    fn word(&self, text: &str) -> tokenizers::Result<Word> {
        let mut word = Word::default();
        // Bytes of the unknown characters just before.
        let mut unknown_bytes = 0;
        let mut spelled = String::new();
        for (at, c) in text.char_indices() {
            if at % CHECKED_EACH == 0 && cancel::is_cancelled() {
                return Ok(Word::default());
            }
            let (end, bytes) = (at + c.len_utf8(), c.len_utf8() as u32);
            let written = self.decorate(&text[at..end], at == 0, end == text.len(), &mut spelled);
            let known = self.texts.place(written);
            let fallback = if known.is_none() { self.in_bytes(written) } else { None };
            if known.is_none() && fallback.is_none() {
                if !self.fuse_unknown {
                    self.push_unknown(&mut word, &mut unknown_bytes)?;
                }
                unknown_bytes += bytes;
                continue;
            }
            self.push_unknown(&mut word, &mut unknown_bytes)?;
            known.into_iter().for_each(|place| word.push(place, bytes));
            fallback.into_iter().flatten().for_each(|place| word.push(place, 1));
        }
        self.push_unknown(&mut word, &mut unknown_bytes)?;
        let mut joined = String::new();
        word.merge_all(|left, right| {
            let rank = self.merges.rank(left, right)?;
            joined.clear();
            joined.extend([self.texts.text(left), &self.texts.text(right)[self.prefix.len()..]]);
            let result = self.texts.place(&joined).expect("looked up when the merges were read");
            Some(PairMerge { rank, result })
        });
        Ok(word)
    }

    /// Adds the prefix and suffix that the vocabulary puts around a character at this place of a word.
    fn decorate<'t>(&self, c: &'t str, first: bool, last: bool, spelled: &'t mut String) -> &'t str {
        let prefix = if first { "" } else { &self.prefix };
        let suffix = if last { &self.suffix } else { "" };
        if prefix.is_empty() && suffix.is_empty() {
            return c;
        }
        spelled.clear();
        spelled.extend([prefix, c, suffix]);
        spelled
    }

    /// Spells a character in byte tokens, if all of them exist.
    fn in_bytes(&self, written: &str) -> Option<Vec<u32>> {
        let tokens = self.byte_tokens.as_ref()?;
        written.bytes().map(|byte| tokens[usize::from(byte)]).collect()
    }

    /// Adds the token for the unknown characters collected so far.
    fn push_unknown(&self, word: &mut Word, bytes: &mut u32) -> tokenizers::Result<()> {
        let bytes = std::mem::take(bytes);
        if let Some(unknown) = self.unknown.as_ref().filter(|_| bytes > 0) {
            let place = self.texts.place(unknown);
            word.push(
                place.ok_or_else(|| {
                    format!("the vocabulary has no token {unknown:?} for unknown characters")
                })?,
                bytes,
            );
        }
        Ok(())
    }

    fn token(&self, place: u32, start: usize, bytes: usize) -> Token {
        // No caller reads a token's text.
        Token::new(self.texts.id(place), String::new(), (start, start + bytes))
    }
}

impl Model for Bpe {
    type Trainer = TrainerWrapper;

    fn tokenize(&self, text: &str) -> tokenizers::Result<Vec<Token>> {
        if text.is_empty() || cancel::is_cancelled() {
            return Ok(Vec::new());
        }
        if let Some(place) = self.texts.place(text).filter(|_| self.ignore_merges) {
            return Ok(vec![self.token(place, 0, text.len())]);
        }
        let mut at = 0;
        let token = |symbol: &Symbol| {
            let (start, bytes) = (at, symbol.bytes as usize);
            at += bytes;
            self.token(symbol.token, start, bytes)
        };
        Ok(self.word(text)?.tokens().map(token).collect())
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.texts.place(token).map(|place| self.texts.id(place))
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.texts.place_of_id(id).map(|place| self.texts.text(place).to_string())
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        (0..self.texts.len())
            .map(|place| (self.texts.text(place).to_string(), self.texts.id(place)))
            .collect()
    }

    fn get_vocab_size(&self) -> usize {
        self.texts.len() as usize
    }

    fn save(&self, _: &Path, _: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        Err("this model is read-only".into())
    }

    fn get_trainer(&self) -> TrainerWrapper {
        BpeTrainer::default().into()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use serde_json::json;
    use tokenizers::models::bpe::BPE;

    use super::*;

    /// The `model` section of a tokenizer.json.
    #[derive(Clone, Debug)]
    struct Case {
        vocab: BTreeMap<String, u32>,
        merges: Vec<(String, String)>,
        prefix: &'static str,
        suffix: &'static str,
        unknown: Option<&'static str>,
        fuse: bool,
        bytes: bool,
        whole: bool,
    }

    impl Case {
        fn json(&self) -> String {
            let text = |text: &str| if text.is_empty() { json!(null) } else { json!(text) };
            json!({
                "type": "BPE",
                "vocab": self.vocab,
                "merges": self.merges,
                "continuing_subword_prefix": text(self.prefix),
                "end_of_word_suffix": text(self.suffix),
                "unk_token": self.unknown,
                "fuse_unk": self.fuse,
                "byte_fallback": self.bytes,
                "ignore_merges": self.whole,
            })
            .to_string()
        }

        fn library(&self) -> BPE {
            let vocab = self.vocab.iter().map(|(text, id)| (text.clone(), *id)).collect();
            let mut builder = BPE::builder()
                .vocab_and_merges::<tokenizers::models::bpe::Vocab>(vocab, self.merges.clone())
                .fuse_unk(self.fuse)
                .byte_fallback(self.bytes)
                .ignore_merges(self.whole);
            if let Some(unknown) = self.unknown {
                builder = builder.unk_token(unknown.to_string());
            }
            if !self.prefix.is_empty() {
                builder = builder.continuing_subword_prefix(self.prefix.to_string());
            }
            if !self.suffix.is_empty() {
                builder = builder.end_of_word_suffix(self.suffix.to_string());
            }
            builder.build().expect("a sound model")
        }
    }

    /// Vocabularies grown by merging existing tokens, some of them twice. Ids have gaps or not.
    fn case() -> impl Strategy<Value = Case> {
        let pairs =
            prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 0..24);
        let flags = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
        let marks = (prop_oneof![Just(""), Just("##")], prop_oneof![Just(""), Just("</w>")]);
        let unknown = prop_oneof![Just(None), Just(Some("<unk>")), Just(Some("<missing>"))];
        (pairs, flags, marks, unknown).prop_map(|(pairs, (fuse, bytes, whole, gaps), marks, unknown)| {
            let (prefix, suffix) = marks;
            let mut texts = vec!["<unk>".to_string()];
            for c in ["a", "b", "é"] {
                for prefix in ["", prefix] {
                    texts.extend([format!("{prefix}{c}"), format!("{prefix}{c}{suffix}")]);
                }
            }
            if bytes {
                texts.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
            }
            texts.dedup();
            let mut merges = Vec::new();
            for (left, right) in pairs {
                let letters: Vec<&String> = texts.iter().filter(|text| !text.contains('x')).collect();
                let (left, right) = (left.get(&letters).to_string(), right.get(&letters).to_string());
                if let Some(tail) = right.strip_prefix(prefix) {
                    texts.push(format!("{left}{tail}"));
                    merges.push((left, right));
                }
            }
            let mut vocab = BTreeMap::new();
            for text in texts {
                let id = vocab.len() as u32 * if gaps { 3 } else { 1 };
                vocab.entry(text).or_insert(id);
            }
            Case { vocab, merges, prefix, suffix, unknown, fuse, bytes, whole }
        })
    }

    proptest! {
        #[test]
        fn words_become_the_tokens_that_the_library_makes(case in case(), words in prop::collection::vec("[abéx]{0,12}", 8)) {
            let (ours, theirs) = (read(&case.json()).expect("a sound model"), case.library());
            prop_assert_eq!(Model::get_vocab(&ours), theirs.get_vocab());
            for (text, id) in &case.vocab {
                prop_assert_eq!(ours.token_to_id(text), Some(*id));
                prop_assert_eq!(ours.id_to_token(*id), Some(text.clone()));
            }
            for word in words {
                let plain = |tokens: Vec<Token>| tokens.into_iter().map(|t| (t.id, t.offsets)).collect::<Vec<_>>();
                match (ours.tokenize(&word), theirs.tokenize(&word)) {
                    (Ok(ours), Ok(theirs)) => prop_assert_eq!(plain(ours), plain(theirs), "{:?}", word),
                    (ours, theirs) => prop_assert_eq!(ours.is_err(), theirs.is_err(), "{:?}", word),
                }
            }
        }
    }
}
