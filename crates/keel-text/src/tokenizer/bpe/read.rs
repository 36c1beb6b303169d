//! Reads and checks the byte pair encoding model of a `tokenizer.json`.
//!
//! The library's own reader passes the model through two generic JSON trees and trusts the merges. This reader takes
//! the vocabulary first and then the merges, in any order of the file. Merges become numbers directly, without a list
//! of strings.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::texts::{Texts, TextsBuilder};
use super::{Bpe, Merges};

/// The fields of a model of type `BPE`.
#[derive(Deserialize)]
struct BpeJson<'a> {
    dropout: Option<f32>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    fuse_unk: Option<bool>,
    byte_fallback: Option<bool>,
    ignore_merges: Option<bool>,
    vocab: VocabJson,
    #[serde(borrow)]
    merges: &'a RawValue,
}

/// Reads a model.
///
/// Each token must have its own id and its own text, and each merge must stay inside the vocabulary.
pub(in super::super) fn read(json: &str) -> Result<Bpe, String> {
    let invalid = |err: serde_json::Error| format!("not valid: {err}");
    let json: BpeJson<'_> = serde_json::from_str(json).map_err(invalid)?;
    if json.dropout.is_some_and(|p| p > 0.0) {
        return Err("dropout is above 0, which would encode the same text differently each time".to_string());
    }
    let texts = json.vocab.0.build()?;
    let prefix = json.continuing_subword_prefix.unwrap_or_default();
    let mut pairs = PairReader { texts: &texts, prefix: &prefix, pairs: Vec::new(), problem: None };
    let read = pairs.deserialize_in(json.merges);
    let (pairs, problem) = (pairs.pairs, pairs.problem);
    if let Some(problem) = problem {
        return Err(problem);
    }
    read.map_err(invalid)?;
    let byte = |byte: usize| texts.place(&format!("<0x{byte:02X}>"));
    let byte_tokens = json.byte_fallback.unwrap_or(false).then(|| Box::new(std::array::from_fn(byte)));
    Ok(Bpe {
        merges: Merges::new(&pairs, texts.len()),
        prefix,
        suffix: json.end_of_word_suffix.unwrap_or_default(),
        unknown: json.unk_token,
        fuse_unknown: json.fuse_unk.unwrap_or(false),
        byte_tokens,
        ignore_merges: json.ignore_merges.unwrap_or(false),
        texts,
    })
}

/// Texts and ids, `{"text": id}`.
struct VocabJson(TextsBuilder);

impl<'de> Deserialize<'de> for VocabJson {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(VocabVisitor)
    }
}

struct VocabVisitor;

impl<'de> Visitor<'de> for VocabVisitor {
    type Value = VocabJson;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a vocabulary: texts and their ids")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<VocabJson, A::Error> {
        let mut texts = TextsBuilder::default();
        while let Some((Text(text), id)) = map.next_entry::<Text<'_>, u32>()? {
            texts.push(&text, id).map_err(A::Error::custom)?;
        }
        Ok(VocabJson(texts))
    }
}

/// A string that is copied only if it has escapes.
#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

/// Reads merges into pairs of places. An invalid merge is described in `problem`.
struct PairReader<'a> {
    texts: &'a Texts,
    prefix: &'a str,
    pairs: Vec<(u32, u32)>,
    problem: Option<String>,
}

impl PairReader<'_> {
    fn deserialize_in(&mut self, json: &RawValue) -> Result<(), serde_json::Error> {
        serde_json::Deserializer::from_str(json.get()).deserialize_seq(self)
    }

    fn push(&mut self, left: &str, right: &str) -> Result<(), String> {
        let rank = self.pairs.len();
        let place = |text: &str| {
            let place = self.texts.place(text);
            place.ok_or_else(|| format!("merge {rank}: {text:?} is not in the vocabulary"))
        };
        let Some(right_tail) = right.strip_prefix(self.prefix) else {
            return Err(format!("merge {rank}: {right:?} does not begin with the prefix {:?}", self.prefix));
        };
        let pair = (place(left)?, place(right)?);
        place(&[left, right_tail].concat())?;
        self.pairs.push(pair);
        Ok(())
    }
}

impl<'de> Visitor<'de> for &mut PairReader<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of merges")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut merges: A) -> Result<(), A::Error> {
        while merges.next_element_seed(MergeSeed(&mut *self))?.is_some() {}
        Ok(())
    }
}

/// Reads one merge: `"left right"` in older files, `["left", "right"]` in newer ones.
struct MergeSeed<'r, 'a>(&'r mut PairReader<'a>);

impl MergeSeed<'_, '_> {
    fn push<E: Error>(self, left: &str, right: &str) -> Result<(), E> {
        self.0.push(left, right).map_err(|problem| {
            self.0.problem = Some(problem.clone());
            E::custom(problem)
        })
    }
}

impl<'de> DeserializeSeed<'de> for MergeSeed<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for MergeSeed<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a merge: two tokens in a list, or in a string with one space between them")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<(), E> {
        match text.split_once(' ') {
            Some((left, right)) if !right.contains(' ') => self.push(left, right),
            _ => Err(E::custom(format!("merge {text:?} is not two tokens with one space between them"))),
        }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut pair: A) -> Result<(), A::Error> {
        let wrong_len = |n| A::Error::invalid_length(n, &"a merge of two tokens");
        let Text(left) = pair.next_element()?.ok_or_else(|| wrong_len(0))?;
        let Text(right) = pair.next_element()?.ok_or_else(|| wrong_len(1))?;
        match pair.next_element::<serde::de::IgnoredAny>()? {
            None => self.push(&left, &right),
            Some(_) => Err(wrong_len(3)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(model: &str) -> Result<(), String> {
        read(model).map(|_| ())
    }

    #[test]
    fn both_spellings_of_a_merge_are_read() {
        assert_eq!(check(r#"{"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}"#), Ok(()));
        assert_eq!(check(r#"{"vocab": {"a": 0, " ": 1, "a ": 2}, "merges": [["a", " "]]}"#), Ok(()));
        for merge in [r#""ab""#, r#""a b a""#, r#"["a"]"#, r#"["a", "b", "a"]"#, "3"] {
            let model = format!(r#"{{"vocab": {{"a": 0, "b": 1, "ab": 2}}, "merges": [{merge}]}}"#);
            assert!(check(&model).is_err(), "{merge}");
        }
    }

    #[test]
    fn a_merge_must_stay_inside_the_vocabulary() {
        // Here the library would copy two bytes into a buffer of one byte.
        let err = check(r#"{"vocab": {"a": 0, "b": 1}, "merges": ["a b"]}"#).unwrap_err();
        assert_eq!(err, r#"merge 0: "ab" is not in the vocabulary"#);
        let err = check(r#"{"vocab": {"b": 1, "ab": 2}, "merges": ["a b"]}"#).unwrap_err();
        assert_eq!(err, r#"merge 0: "a" is not in the vocabulary"#);
    }

    #[test]
    fn a_prefix_that_would_cut_a_character_is_refused() {
        let model = r###"{"vocab": {"a": 0, "é": 1, "aé": 2}, "merges": [["a", "é"]], "continuing_subword_prefix": "#"}"###;
        assert_eq!(check(model).unwrap_err(), r##"merge 0: "é" does not begin with the prefix "#""##);
    }

    #[test]
    fn ids_are_unique_and_encoding_is_deterministic() {
        let err = check(r#"{"vocab": {"a": 5, "b": 5}, "merges": []}"#).unwrap_err();
        assert!(err.ends_with("has id 5, which another token has too"), "{err}");
        let err = check(r#"{"vocab": {"a": 0}, "merges": [], "dropout": 0.1}"#).unwrap_err();
        assert!(err.starts_with("dropout"), "{err}");
        assert_eq!(check(r#"{"vocab": {}, "merges": []}"#).unwrap_err(), "the vocabulary is empty");
    }
}
