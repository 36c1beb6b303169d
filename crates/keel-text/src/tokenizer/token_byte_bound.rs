//! Bounds the bytes of text that one token can cover. So a text that is too long can be refused by its bytes alone.
//!
//! The bound holds only if every byte of a text ends up in a token. There is no bound if a step deletes text, or makes
//! one token of text of any length.

use serde_json::Value;

use super::model::TextModel;

/// The most bytes of text that one token covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TokenByteBound {
    /// For any text.
    pub bytes: usize,
    /// For ASCII text, which Unicode normalisation leaves unchanged.
    pub ascii_bytes: usize,
}

/// The most bytes that Unicode normalisation turns into one byte. A character of 3 bytes has at most 4 parts, one of 2
/// bytes at most 3, and each part comes from a character of at most 4 bytes: 4 x 4 / 3 < 6 and 3 x 4 / 2 = 6.
const NORMAL_FORM: usize = 6;
/// A character of at most 4 bytes becomes at least one byte.
const CHARACTER: usize = 4;

impl TokenByteBound {
    /// Computes the bound from the steps of a `tokenizer.json` and the longest added token. `None` if there is no
    /// bound.
    pub fn new(
        normalizer: Option<&Value>,
        pre_tokenizer: Option<&Value>,
        post_processor: Option<&Value>,
        model: &TextModel,
        added_bytes: usize,
    ) -> Option<TokenByteBound> {
        let TextModel::Bpe(model) = model else { return None };
        let (any, ascii) = shrinking(normalizer)?;
        if !pre_tokenizer.is_none_or(keeps_all) || !post_processor.is_none_or(keeps_text) {
            return None;
        }
        let in_bytes = pre_tokenizer.is_some_and(|step| super::check::contains_type(step, "ByteLevel"));
        let longest = model.longest_token(in_bytes)?.max(added_bytes);
        Some(TokenByteBound { bytes: longest.checked_mul(any)?, ascii_bytes: longest.checked_mul(ascii)? })
    }

    /// The fewest tokens that a text can have.
    pub fn tokens_at_least(self, text: &str) -> usize {
        text.len().div_ceil(self.bytes_of_token(text))
    }

    /// The most bytes of this text that one token covers.
    pub fn bytes_of_token(self, text: &str) -> usize {
        let longest = if text.is_ascii() { self.ascii_bytes } else { self.bytes };
        longest.max(1)
    }
}

fn kind(step: &Value) -> &str {
    step.get("type").and_then(Value::as_str).unwrap_or_default()
}

/// The most bytes that a normalizer turns into one byte: for any text, and for ASCII.
fn shrinking(step: Option<&Value>) -> Option<(usize, usize)> {
    let Some(step) = step.filter(|step| !step.is_null()) else { return Some((1, 1)) };
    match kind(step) {
        "NFC" | "NFKC" => Some((NORMAL_FORM, 1)),
        "NFD" | "NFKD" => Some((CHARACTER, 1)),
        "Lowercase" => Some((CHARACTER, 1)),
        "Prepend" => Some((1, 1)),
        "Replace" => {
            let pattern = step.pointer("/pattern/String")?.as_str()?.len();
            let content = step.get("content")?.as_str()?.len();
            let bytes = if content == 0 { return None } else { pattern.div_ceil(content).max(1) };
            Some((bytes, bytes))
        }
        "Sequence" => {
            let steps = step.get("normalizers")?.as_array()?;
            let mut product = (1usize, 1usize);
            let mut is_ascii = true;
            for step in steps {
                let (any, ascii) = shrinking(Some(step))?;
                let of_ascii = if is_ascii { ascii } else { any };
                product = (product.0.checked_mul(any)?, product.1.checked_mul(of_ascii)?);
                is_ascii &= !matches!(kind(step), "Prepend" | "Replace" | "Sequence");
            }
            Some(product)
        }
        _ => None,
    }
}

/// Whether a pre-tokenizer keeps all text.
fn keeps_all(step: &Value) -> bool {
    match kind(step) {
        "Sequence" => step
            .get("pretokenizers")
            .and_then(Value::as_array)
            .is_some_and(|steps| steps.iter().all(keeps_all)),
        "Split" | "Punctuation" => step.get("behavior").and_then(Value::as_str) != Some("Removed"),
        "ByteLevel" | "Metaspace" | "Digits" | "UnicodeScripts" | "FixedLength" => true,
        _ => step.is_null(),
    }
}

/// Whether a post-processor keeps the text. A template may leave it out.
fn keeps_text(step: &Value) -> bool {
    match kind(step) {
        "Sequence" => {
            step.get("processors").and_then(Value::as_array).is_some_and(|steps| steps.iter().all(keeps_text))
        }
        "TemplateProcessing" => {
            let single = step.get("single").and_then(Value::as_array);
            single.is_some_and(|pieces| pieces.iter().any(|piece| piece.get("Sequence").is_some()))
        }
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use crate::Tokenizer;

    /// A byte-level tokenizer with a few merges.
    fn tokenizer(normalizer: Value, pre_tokenizer: Value, added: Value) -> Tokenizer {
        let mut vocab: std::collections::BTreeMap<String, u32> = std::collections::BTreeMap::new();
        let mut alphabet: Vec<char> =
            tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet().into_iter().collect();
        alphabet.sort_unstable();
        for c in alphabet {
            let id = vocab.len() as u32;
            vocab.insert(c.to_string(), id);
        }
        for word in ["aa", "aaaa", "aaaaaaaa", "\u{120}\u{120}"] {
            let id = vocab.len() as u32;
            vocab.insert(word.to_string(), id);
        }
        let merges = json!([["a", "a"], ["aa", "aa"], ["aaaa", "aaaa"], ["\u{120}", "\u{120}"]]);
        let file = json!({"version": "1.0", "added_tokens": added, "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer, "post_processor": null, "decoder": null,
            "model": {"type": "BPE", "vocab": vocab, "merges": merges}});
        Tokenizer::from_bytes(file.to_string().as_bytes()).expect("a sound tokenizer")
    }

    use serde_json::Value;

    fn byte_level() -> Value {
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false})
    }

    #[test]
    fn the_bound_is_reached() {
        let tokenizer = tokenizer(Value::Null, byte_level(), json!([]));
        let text = "a".repeat(80);
        assert_eq!(tokenizer.encode(&text, false).expect("it encodes").len(), 10);
        assert_eq!(tokenizer.tokens_at_least(&text), 10);
        let composed =
            super::super::token_byte_bound::tests::tokenizer(json!({"type": "NFC"}), byte_level(), json!([]));
        assert_eq!(composed.tokens_at_least(&text), 10, "ASCII is its own normal form");
        assert_eq!(composed.tokens_at_least("\u{e9}".repeat(48).as_str()), 2);
    }

    #[test]
    fn steps_that_drop_text_have_no_bound() {
        let strip = json!({"type": "Strip", "strip_left": true, "strip_right": true});
        assert_eq!(tokenizer(strip, byte_level(), json!([])).tokens_at_least("aaa"), 0);
        let removed = json!({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": false}, byte_level()]});
        assert_eq!(tokenizer(Value::Null, removed, json!([])).tokens_at_least("aaa"), 0);
        assert_eq!(
            tokenizer(Value::Null, json!({"type": "Whitespace"}), json!([])).tokens_at_least("aaa"),
            0
        );
        let greedy = json!([{"id": 260, "content": "<x>", "lstrip": true, "special": true}]);
        assert_eq!(tokenizer(Value::Null, byte_level(), greedy).tokens_at_least("aaa"), 0);
    }

    proptest! {
        #[test]
        fn no_text_has_fewer_tokens(
            text in "[a a\u{300}\u{301}\u{308}\u{345}\u{212a}\u{1fbe}\u{1f82}\u{1100}\u{1161}\u{11a8}eK<x>]{0,60}",
            form in prop_oneof![Just("NFC"), Just("NFD"), Just("NFKC"), Just("NFKD"), Just("Lowercase")],
        ) {
            let added = json!([{"id": 260, "content": "<x>", "special": true}]);
            let tokenizer = tokenizer(json!({"type": form}), byte_level(), added);
            let tokens = tokenizer.encode(&text, false).expect("it encodes").len();
            prop_assert!(tokenizer.tokens_at_least(&text) <= tokens, "{} of {tokens}", tokenizer.tokens_at_least(&text));
        }
    }
}
