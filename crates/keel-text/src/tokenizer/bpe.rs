//! The byte pair encoding model of a `tokenizer.json`, read and checked.
//!
//! The library's own reader passes the model through two generic JSON trees and trusts the merges: a merge
//! whose result is not in the vocabulary can index outside a buffer, and a wrong continuation prefix can cut a
//! character in two. Reading the model here is faster and checks both.

use std::collections::HashSet;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use tokenizers::models::bpe::{BPE, Vocab};

/// The fields of a model of type `BPE`.
#[derive(Deserialize)]
pub(super) struct BpeJson {
    dropout: Option<f32>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    fuse_unk: Option<bool>,
    byte_fallback: Option<bool>,
    ignore_merges: Option<bool>,
    vocab: Vocab,
    merges: Vec<Merge>,
}

impl BpeJson {
    /// Every token has an id of its own, and every merge stays inside the vocabulary.
    pub(super) fn check(&self) -> Result<(), String> {
        if self.vocab.is_empty() {
            return Err("the vocabulary is empty".to_string());
        }
        if self.dropout.is_some_and(|p| p > 0.0) {
            return Err(
                "dropout is above 0, which would encode the same text differently each time".to_string()
            );
        }
        let mut ids = HashSet::with_capacity(self.vocab.len());
        if let Some((token, id)) = self.vocab.iter().find(|(_, id)| !ids.insert(**id)) {
            return Err(format!("token {token:?} has id {id}, which another token has too"));
        }
        let prefix = self.continuing_subword_prefix.as_deref().unwrap_or("");
        let mut merged = String::new();
        for (rank, Merge(left, right)) in self.merges.iter().enumerate() {
            let Some(right_tail) = right.strip_prefix(prefix) else {
                return Err(format!("merge {rank}: {right:?} does not begin with the prefix {prefix:?}"));
            };
            merged.clear();
            merged.push_str(left);
            merged.push_str(right_tail);
            for token in [left, right, &merged] {
                if !self.vocab.contains_key(token.as_str()) {
                    return Err(format!("merge {rank}: {token:?} is not in the vocabulary"));
                }
            }
        }
        Ok(())
    }

    /// The largest id. Call [`check`](Self::check) first.
    pub(super) fn id_max(&self) -> u32 {
        self.vocab.values().copied().max().unwrap_or(0)
    }

    /// Builds the library's model. Call [`check`](Self::check) first.
    pub(super) fn build(self) -> Result<BPE, String> {
        let merges = self.merges.into_iter().map(|Merge(left, right)| (left, right)).collect();
        let mut builder = BPE::builder()
            .vocab_and_merges(self.vocab, merges)
            .fuse_unk(self.fuse_unk.unwrap_or(false))
            .byte_fallback(self.byte_fallback.unwrap_or(false))
            .ignore_merges(self.ignore_merges.unwrap_or(false));
        if let Some(token) = self.unk_token {
            builder = builder.unk_token(token);
        }
        if let Some(prefix) = self.continuing_subword_prefix {
            builder = builder.continuing_subword_prefix(prefix);
        }
        if let Some(suffix) = self.end_of_word_suffix {
            builder = builder.end_of_word_suffix(suffix);
        }
        builder.build().map_err(|err| err.to_string())
    }
}

/// A merge is written `"left right"` in older files and `["left", "right"]` in newer ones.
struct Merge(String, String);

impl<'de> Deserialize<'de> for Merge {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(MergeVisitor)
    }
}

struct MergeVisitor;

impl<'de> Visitor<'de> for MergeVisitor {
    type Value = Merge;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a merge: two tokens in a list, or in a string with one space between them")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Merge, E> {
        match text.split_once(' ') {
            Some((left, right)) if !right.contains(' ') => Ok(Merge(left.to_string(), right.to_string())),
            _ => Err(E::custom(format!("merge {text:?} is not two tokens with one space between them"))),
        }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut pair: A) -> Result<Merge, A::Error> {
        let wrong_len = |n| A::Error::invalid_length(n, &"a merge of two tokens");
        let left = pair.next_element()?.ok_or_else(|| wrong_len(0))?;
        let right = pair.next_element()?.ok_or_else(|| wrong_len(1))?;
        match pair.next_element::<String>()? {
            None => Ok(Merge(left, right)),
            Some(_) => Err(wrong_len(3)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(model: &str) -> Result<(), String> {
        serde_json::from_str::<BpeJson>(model).map_err(|err| err.to_string())?.check()
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
        // The library would copy two bytes into a buffer of one here.
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
