//! Extracts the vocabulary of a tokenizer's files, for file formats that store a vocabulary instead.

use std::collections::HashMap;

use serde_json::Value;

use super::{TokenKind, byte_level};
use crate::tokenizer::TOKENS_MAX;
use crate::{TextError, TextFile, TextFiles, Tokenizer};

/// A vocabulary and its settings. The fields are those of [`Vocabulary`](super::Vocabulary).
#[derive(Clone, Debug, Default, PartialEq)]
#[allow(missing_docs, reason = "documented there")]
pub struct ExportedVocabulary {
    pub model: &'static str,
    pub pre: &'static str,
    pub tokens: Vec<(String, TokenKind)>,
    pub scores: Vec<f32>,
    pub merges: Vec<String>,
    pub bos: Option<u32>,
    pub eos: Option<u32>,
    pub eot: Option<u32>,
    pub unk: Option<u32>,
    pub pad: Option<u32>,
    pub add_bos: bool,
    pub add_eos: bool,
    pub add_space_prefix: Option<bool>,
    pub chat_template: Option<String>,
}

impl TextFiles<'_> {
    /// Extracts the vocabulary of these files, with at least `size` tokens. Placeholders fill the ids after the
    /// tokenizer's own.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`] for a tokenizer that is neither byte-level nor SentencePiece pair encoding, that cuts
    /// text in a way without a name, or that has too many tokens.
    pub fn vocabulary(&self, size: usize) -> Result<ExportedVocabulary, TextError> {
        let wrong = |reason: String| TextError::Tokenizer { file: self.tokenizer.name.clone(), reason };
        let tokenizer = Tokenizer::new(self)?;
        let json: Value = serde_json::from_slice(&self.tokenizer.bytes).map_err(|e| wrong(e.to_string()))?;
        let is_byte_level = contains(&json["pre_tokenizer"], &|part| part["type"] == "ByteLevel");
        let is_sentencepiece = contains(&json["normalizer"], &|part| part["content"] == "▁");
        let mut vocabulary = match (is_byte_level, is_sentencepiece) {
            (true, _) => byte_level(&json),
            (false, true) => sentencepiece(&json),
            (false, false) => Err("only byte-level and SentencePiece pair encoding can be written".into()),
        }
        .map_err(wrong)?;
        let count = size.max(tokenizer.vocab_size());
        if count > TOKENS_MAX as usize {
            return Err(wrong(format!("{count} tokens, at most {TOKENS_MAX} are written")));
        }
        vocabulary.tokens = tokens(&json, count, vocabulary.model == "llama");
        vocabulary.bos = tokenizer.bos_id();
        let text = tokenizer.encode("a", true)?;
        vocabulary.add_bos = vocabulary.bos.is_some() && text.first().copied() == vocabulary.bos;
        let special = tokenizer.special_tokens();
        let named = |text: &Option<String>| tokenizer.token_to_id(text.as_deref()?);
        let added = text.last().copied().filter(|id| tokenizer.eos_ids().contains(id));
        vocabulary.add_eos = added.is_some();
        vocabulary.eos =
            added.or_else(|| named(&special.eos)).or_else(|| tokenizer.eos_ids().first().copied());
        vocabulary.eot = tokenizer.eos_ids().iter().copied().find(|id| Some(*id) != vocabulary.eos);
        vocabulary.pad = named(&special.pad);
        vocabulary.unk = named(&special.unk)
            .or_else(|| json["model"]["unk_token"].as_str().and_then(|text| tokenizer.token_to_id(text)));
        vocabulary.chat_template = crate::template::source_text(self)?;
        if vocabulary.model == "llama" {
            vocabulary.scores = scores(&json, &vocabulary.tokens);
        }
        Ok(vocabulary)
    }

    /// The files, with their names in a checkpoint's folder. `config.json` is left out.
    pub fn to_write(&self) -> Vec<(&'static str, &[u8])> {
        let files: [(&str, Option<&TextFile<'_>>); 4] = [
            ("tokenizer.json", Some(&self.tokenizer)),
            ("tokenizer_config.json", self.tokenizer_config.as_ref()),
            ("generation_config.json", self.generation_config.as_ref()),
            ("chat_template.jinja", self.chat_template.as_ref()),
        ];
        files.into_iter().filter_map(|(name, file)| Some((name, &*file?.bytes))).collect()
    }
}

/// Whether `is` holds for a step or for a step nested in it.
fn contains(step: &Value, is: &dyn Fn(&Value) -> bool) -> bool {
    let inner = ["pretokenizers", "normalizers", "decoders"].iter().filter_map(|key| step[*key].as_array());
    is(step) || inner.flatten().any(|step| contains(step, is))
}

/// The steps of a normalizer or pre-tokenizer, nested sequences flattened.
fn steps<'a>(step: &'a Value, inner: &str) -> Vec<&'a Value> {
    match step[inner].as_array() {
        Some(list) => list.iter().flat_map(|step| steps(step, inner)).collect(),
        None if step.is_null() => Vec::new(),
        None => vec![step],
    }
}

fn byte_level(json: &Value) -> Result<ExportedVocabulary, String> {
    let unnamed = |of: &str| format!("text is cut in a way that files have no name for ({of})");
    let cuts = steps(&json["pre_tokenizer"], "pretokenizers");
    let single_digits =
        cuts.first().is_some_and(|step| step["type"] == "Digits" && step["individual_digits"] == true);
    let patterns = match &cuts[usize::from(single_digits)..] {
        [bytes] if is_byte_level(bytes, true) => vec![],
        [split, bytes] if is_split(split) && is_byte_level(bytes, false) => {
            split["pattern"]["Regex"].as_str().into_iter().collect()
        }
        _ => return Err(unnamed(&json["pre_tokenizer"].to_string())),
    };
    let pre = byte_level::name_of(&patterns, single_digits, json["model"]["ignore_merges"] == true)
        .ok_or_else(|| unnamed(&format!("pattern {patterns:?}, single digits {single_digits}")))?;
    match &steps(&json["normalizer"], "normalizers")[..] {
        // Names that stand for composed text are also given to tokenizers that do not compose it. Almost all text is
        // composed.
        [] => {}
        [step] if step["type"] == "NFC" && byte_level::composes(pre) => {}
        _ => return Err(not_written("normalizer", &json["normalizer"])),
    }
    for key in ["continuing_subword_prefix", "end_of_word_suffix"] {
        if json["model"][key].as_str().is_some_and(|part| !part.is_empty()) {
            return Err(not_written(key, &json["model"][key]));
        }
    }
    let merge = |merge: &Value| match merge {
        Value::String(text) => Some(text.clone()),
        pair => Some(format!("{} {}", pair[0].as_str()?, pair[1].as_str()?)),
    };
    let merges = json["model"]["merges"].as_array().into_iter().flatten().filter_map(merge).collect();
    Ok(ExportedVocabulary { model: "gpt2", pre, merges, ..ExportedVocabulary::default() })
}

fn not_written(key: &str, value: &Value) -> String {
    format!("a vocabulary cannot say that the tokenizer's {key} is {value}")
}

/// Whether a step turns bytes to characters and does nothing else, except for cutting by GPT-2's pattern if `cuts`.
fn is_byte_level(step: &Value, cuts: bool) -> bool {
    let uses_pattern = step["use_regex"].as_bool().unwrap_or(true);
    step["type"] == "ByteLevel" && step["add_prefix_space"] == false && uses_pattern == cuts
}

/// Whether a step makes a piece of each match of a regular expression. The named patterns match every character, so
/// text without a match may as well be removed.
fn is_split(step: &Value) -> bool {
    let keeps_matches =
        step["behavior"] == "Isolated" || step["behavior"] == "Removed" && step["invert"] == true;
    step["type"] == "Split" && step["pattern"]["Regex"].is_string() && keeps_matches
}

fn sentencepiece(json: &Value) -> Result<ExportedVocabulary, String> {
    if json["model"]["type"].as_str().is_some_and(|kind| kind != "BPE") {
        return Err(format!(
            "SentencePiece with a model of type {} cannot be written",
            json["model"]["type"]
        ));
    }
    let normalizers = steps(&json["normalizer"], "normalizers");
    let prefix = normalizers.first().is_some_and(|step| step["type"] == "Prepend" && step["prepend"] == "▁");
    let marks_spaces = |step: &Value| {
        step["type"] == "Replace" && step["pattern"]["String"] == " " && step["content"] == "▁"
    };
    if !matches!(&normalizers[usize::from(prefix)..], [step] if marks_spaces(step)) {
        return Err(not_written("normalizer", &json["normalizer"]));
    }
    // A split at spaces does nothing: the normalizer has replaced them.
    let is_idle = |step: &&Value| step["type"] == "Split" && step["pattern"]["String"] == " ";
    if !steps(&json["pre_tokenizer"], "pretokenizers").iter().all(is_idle) {
        return Err(not_written("pre_tokenizer", &json["pre_tokenizer"]));
    }
    Ok(ExportedVocabulary {
        model: "llama",
        pre: "default",
        add_space_prefix: Some(prefix),
        ..ExportedVocabulary::default()
    })
}

/// Texts and kinds of all ids below `count`.
fn tokens(json: &Value, count: usize, has_bytes: bool) -> Vec<(String, TokenKind)> {
    let mut tokens: Vec<(String, TokenKind)> =
        (0..count).map(|id| (format!("[PAD{id}]"), TokenKind::Other)).collect();
    let mut set = |id: &Value, text: &str, kind: TokenKind| {
        let slot = id.as_u64().and_then(|id| tokens.get_mut(usize::try_from(id).ok()?));
        if let Some(slot) = slot {
            *slot = (text.into(), kind);
        }
    };
    let is_byte = |text: &str| {
        let digits = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
        has_bytes && digits.is_some_and(|digits| digits.len() == 2 && u8::from_str_radix(digits, 16).is_ok())
    };
    for (text, id) in json["model"]["vocab"].as_object().into_iter().flatten() {
        set(id, text, if is_byte(text) { TokenKind::Byte } else { TokenKind::Normal });
    }
    for token in json["added_tokens"].as_array().into_iter().flatten() {
        let kind = if token["special"] == true { TokenKind::Control } else { TokenKind::UserDefined };
        set(&token["id"], token["content"].as_str().unwrap_or_default(), kind);
    }
    tokens
}

/// Scores: the negative rank of the first merge that makes a token. A token that no merge makes gets a lower score than
/// all of them.
fn scores(json: &Value, tokens: &[(String, TokenKind)]) -> Vec<f32> {
    let merges: &[Value] = json["model"]["merges"].as_array().map_or(&[], Vec::as_slice);
    let mut ranks = HashMap::with_capacity(merges.len());
    for (rank, merge) in merges.iter().enumerate() {
        let made = match merge {
            Value::String(text) => text.replacen(' ', "", 1),
            pair => [&pair[0], &pair[1]].map(|part| part.as_str().unwrap_or_default()).concat(),
        };
        ranks.entry(made).or_insert(rank);
    }
    let score = |(text, kind): &(String, TokenKind)| match kind {
        TokenKind::Normal => -(ranks.get(text).copied().unwrap_or(merges.len()) as f32),
        _ => 0.0,
    };
    tokens.iter().map(score).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::Vocabulary;
    use super::*;

    /// Writes a vocabulary as files and reads it back from them.
    fn round_trip(vocabulary: &Vocabulary<'_>, size: usize) -> ExportedVocabulary {
        TextFiles::from_vocabulary(vocabulary).expect("known").vocabulary(size).expect("has a name")
    }

    #[test]
    fn byte_level_vocabularies_come_back() {
        let kinds = [("a", TokenKind::Normal), ("b", TokenKind::Normal), ("ab", TokenKind::Normal)];
        let special =
            [("<think>", TokenKind::UserDefined), ("<s>", TokenKind::Control), ("</s>", TokenKind::Control)];
        for pre in byte_level::NAMES {
            let back = round_trip(
                &Vocabulary {
                    model: "gpt2",
                    pre,
                    tokens: kinds.into_iter().chain(special).collect(),
                    merges: vec!["a b"],
                    bos: Some(4),
                    eos: Some(5),
                    add_bos: Some(true),
                    chat_template: Some("{{ 1 }}"),
                    ..Vocabulary::default()
                },
                8,
            );
            assert_eq!((back.model, back.pre), ("gpt2", pre));
            let owned = |(text, kind): (&str, TokenKind)| (text.to_string(), kind);
            let tokens: Vec<_> = kinds.into_iter().chain(special).map(owned).collect();
            assert_eq!(back.tokens[..6], tokens);
            assert_eq!(back.tokens[6..], [6, 7].map(|i| (format!("[PAD{i}]"), TokenKind::Other)));
            assert_eq!((back.bos, back.eos, back.add_bos), (Some(4), Some(5), true));
            assert_eq!(
                (back.merges, back.chat_template.as_deref()),
                (vec!["a b".to_string()], Some("{{ 1 }}"))
            );
        }
    }

    #[test]
    fn sentencepiece_keeps_the_order_of_merges() {
        let mut tokens = vec![("<unk>", TokenKind::Control), ("<0x41>", TokenKind::Byte)];
        tokens.extend(["▁", "a", "b", "ab", "▁a", "▁ab"].map(|text| (text, TokenKind::Normal)));
        let scores = vec![0.0, 0.0, -9.0, -9.0, -9.0, -1.0, -3.0, -2.0];
        let vocabulary = Vocabulary {
            model: "llama",
            tokens: tokens.clone(),
            scores,
            unk: Some(0),
            ..Vocabulary::default()
        };
        let back = round_trip(&vocabulary, 8);
        assert_eq!((back.model, back.add_space_prefix, back.unk), ("llama", Some(true), Some(0)));
        assert_eq!(back.tokens[1].1, TokenKind::Byte);
        let score = |text: &str| back.scores[tokens.iter().position(|token| token.0 == text).expect("there")];
        assert!(score("ab") > score("▁ab") && score("▁ab") > score("▁a") && score("▁a") > score("a"));
    }

    #[test]
    fn what_has_no_name_is_refused() {
        let tokenizer = |pre: &str| {
            format!(
                r#"{{"version": "1.0", "added_tokens": [], "normalizer": null, "post_processor": null, "decoder": null,
                "pre_tokenizer": {pre}, "model": {{"type": "BPE", "vocab": {{"a": 0}}, "merges": []}}}}"#
            )
        };
        let refused = |pre: &str| {
            let json = tokenizer(pre);
            TextFiles::in_memory(json.as_bytes()).vocabulary(1).expect_err("has no name").to_string()
        };
        let byte_level =
            r#"{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false}"#;
        let split =
            r#"{"type": "Split", "pattern": {"Regex": "\\p{L}"}, "behavior": "Isolated", "invert": false}"#;
        let both = format!(r#"{{"type": "Sequence", "pretokenizers": [{split}, {byte_level}]}}"#);
        assert!(refused(&both).contains("no name for"), "{}", refused(&both));
        assert!(refused("null").contains("only byte-level and SentencePiece"));
    }

    /// The export of a small tokenizer with these parts.
    fn export(normalizer: Value, pre_tokenizer: Value) -> Result<ExportedVocabulary, String> {
        let model = json!({"type": "BPE", "vocab": {"a": 0, "▁": 1}, "merges": []});
        let json =
            json!({"version": "1.0", "added_tokens": [], "normalizer": normalizer, "post_processor": null,
            "decoder": null, "pre_tokenizer": pre_tokenizer, "model": model})
            .to_string();
        TextFiles::in_memory(json.as_bytes()).vocabulary(1).map_err(|error| error.to_string())
    }

    #[test]
    fn a_byte_level_tokenizer_is_written_only_under_a_name_that_says_all_of_it() {
        let pattern = byte_level::QWEN2;
        let bytes = |space, regex| json!({"type": "ByteLevel", "add_prefix_space": space, "trim_offsets": true, "use_regex": regex});
        let split = |pattern: Value, behavior: &str, invert| json!({"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert});
        let regex = || json!({"Regex": pattern});
        let both =
            |first: Value, second: Value| json!({"type": "Sequence", "pretokenizers": [first, second]});
        let digits = json!({"type": "Digits", "individual_digits": true});
        let nfc = json!({"type": "NFC"});
        let one = json!({"type": "Sequence", "normalizers": [nfc]});
        let plain = || both(split(regex(), "Isolated", false), bytes(false, false));
        for (normalizer, pre_tokenizer, pre) in [
            (nfc.clone(), plain(), "qwen2"),
            (one, plain(), "qwen2"),
            (Value::Null, plain(), "qwen2"),
            (nfc.clone(), both(split(regex(), "Removed", true), bytes(false, false)), "qwen2"),
            (Value::Null, bytes(false, true), "gpt-2"),
            (Value::Null, both(digits.clone(), bytes(false, true)), "smollm"),
        ] {
            let written = export(normalizer.clone(), pre_tokenizer.clone());
            assert_eq!(written.map(|of| of.pre), Ok(pre), "{normalizer} {pre_tokenizer}");
        }
        for (normalizer, pre_tokenizer) in [
            (nfc.clone(), bytes(false, true)),
            (json!({"type": "NFKC"}), plain()),
            (json!({"type": "Sequence", "normalizers": [nfc, {"type": "Lowercase"}]}), plain()),
            (Value::Null, bytes(true, true)),
            (Value::Null, bytes(false, false)),
            (Value::Null, both(split(regex(), "Isolated", false), bytes(true, false))),
            (Value::Null, both(split(regex(), "Isolated", false), bytes(false, true))),
            (Value::Null, both(split(regex(), "Removed", false), bytes(false, false))),
            (Value::Null, both(split(regex(), "MergedWithPrevious", false), bytes(false, false))),
            (Value::Null, both(split(json!({"String": " "}), "Isolated", false), bytes(false, true))),
            (Value::Null, both(bytes(false, true), digits)),
            (Value::Null, both(json!({"type": "Punctuation", "behavior": "Isolated"}), bytes(false, true))),
        ] {
            let reason = export(normalizer.clone(), pre_tokenizer.clone()).expect_err("has no name");
            let is_named = reason.contains("no name for") || reason.contains("normalizer is");
            assert!(is_named, "{normalizer} {pre_tokenizer}: {reason}");
        }
    }

    #[test]
    fn a_sentencepiece_tokenizer_with_more_steps_is_refused() {
        let mark = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
        let prepend = json!({"type": "Prepend", "prepend": "▁"});
        let all = |list: Value| json!({"type": "Sequence", "normalizers": list});
        let split = json!({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false});
        let prefix_of = |normalizer, pre| export(normalizer, pre).map(|of| of.add_space_prefix);
        assert_eq!(prefix_of(mark.clone(), split), Ok(Some(false)));
        assert_eq!(prefix_of(all(json!([prepend, mark])), Value::Null), Ok(Some(true)));
        for normalizer in [
            json!([{"type": "NFKC"}, mark]),
            json!([mark, {"type": "Lowercase"}]),
            json!([prepend, prepend, mark]),
        ] {
            let reason = prefix_of(all(normalizer), Value::Null).expect_err("not all of it can be written");
            assert!(reason.contains("normalizer is"), "{reason}");
        }
        let digits = json!({"type": "Digits", "individual_digits": true});
        let reason = prefix_of(mark, digits).expect_err("not all of it can be written");
        assert!(reason.contains("pre_tokenizer is"), "{reason}");
    }
}
