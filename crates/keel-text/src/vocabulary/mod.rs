//! The text side of a model whose file holds a vocabulary instead of a `tokenizer.json`. GGUF files are such files.
//!
//! The vocabulary is converted, in memory, to the files that a Hugging Face checkpoint would have. So one reader checks
//! both forms.

mod byte_level;
pub(crate) mod bytes;
mod export;
mod sentencepiece;

use std::borrow::Cow;
use std::collections::HashSet;

use serde::{Serialize, Serializer};
use serde_json::{Map, Value, json};

use crate::{TextError, TextFile, TextFiles};

pub use export::ExportedVocabulary;

/// The purpose of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKind {
    /// A piece of text.
    Normal,
    /// Matched in text before anything else, and decoded to text.
    UserDefined,
    /// Matched in text before anything else, and decoded to nothing.
    Control,
    /// Stands for one byte, such as `<0x0A>`.
    Byte,
    /// Anything else.
    Other,
}

/// A vocabulary and its settings. A token's id is its position in `tokens`.
#[derive(Clone, Debug, Default)]
pub struct Vocabulary<'a> {
    /// The file's name in errors.
    pub name: String,
    /// The algorithm: `gpt2` for byte-level pair encoding, `llama` for SentencePiece.
    pub model: &'a str,
    /// How text is cut before pairs are merged. Only for byte-level vocabularies.
    pub pre: &'a str,
    /// Texts and kinds of the tokens.
    pub tokens: Vec<(&'a str, TokenKind)>,
    /// Of two merges, the one with the higher score comes first. Only for SentencePiece.
    pub scores: Vec<f32>,
    /// Pairs with a space between their tokens, in merge order. Only for byte-level vocabularies.
    pub merges: Vec<&'a str>,
    /// The token at the beginning of a sequence.
    pub bos: Option<u32>,
    /// Ends a sequence.
    pub eos: Option<u32>,
    /// Other tokens that end a turn.
    pub eot: Vec<u32>,
    /// Stands for text that the vocabulary cannot express.
    pub unk: Option<u32>,
    /// Pads the sequences of a batch to one length.
    pub pad: Option<u32>,
    /// Whether encoding puts `bos` first. `None` means the default of the algorithm.
    pub add_bos: Option<bool>,
    /// Whether encoding puts `eos` last. `None` means no.
    pub add_eos: Option<bool>,
    /// Whether encoding adds a leading space that decoding removes. `None` means the default of the algorithm.
    pub add_space_prefix: Option<bool>,
    /// The chat template.
    pub chat_template: Option<&'a str>,
    /// Recommended sampling settings, under their names in `generation_config.json`.
    pub sampling: Vec<(&'static str, f64)>,
}

/// Tokens that end a turn in every vocabulary that has them as control or user-defined tokens. Files often name only
/// one end token, while templates write another.
const TURN_ENDS: [&str; 8] = [
    "<|im_end|>",
    "<end_of_turn>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|endoftext|>",
    "<|user|>",
    "<|observation|>",
];

impl TextFiles<'static> {
    /// Converts a vocabulary to the files of a checkpoint.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`] for an algorithm or a way of cutting text that is not known, or ids without a token.
    pub fn from_vocabulary(vocabulary: &Vocabulary<'_>) -> Result<TextFiles<'static>, TextError> {
        let wrong = |reason| TextError::Tokenizer { file: vocabulary.name.clone(), reason };
        let tokenizer = match vocabulary.model {
            "gpt2" => byte_level::tokenizer(vocabulary),
            "llama" => sentencepiece::tokenizer(vocabulary),
            other => Err(format!("tokenizer model {other:?} is not supported; supported are gpt2 and llama")),
        };
        let tokenizer = tokenizer.map_err(wrong)?;
        let config = vocabulary.config().map_err(wrong)?;
        let file =
            |json: String| TextFile { name: vocabulary.name.clone(), bytes: Cow::Owned(json.into_bytes()) };
        Ok(TextFiles {
            tokenizer: file(tokenizer),
            tokenizer_config: Some(file(config.to_string())),
            config: None,
            generation_config: Some(file(vocabulary.generation_config().to_string())),
            chat_template: None,
            processor_template: None,
        })
    }
}

impl<'a> Vocabulary<'a> {
    /// The text of a token.
    fn text(&self, id: u32) -> Result<&str, String> {
        let token = self.tokens.get(id as usize);
        token.map(|token| token.0).ok_or_else(|| {
            format!("token {id} is named, but the vocabulary has {} tokens", self.tokens.len())
        })
    }

    /// Whether encoding puts `bos` first.
    fn adds_bos(&self) -> bool {
        let usual =
            self.model == "llama" || matches!(self.pre, "llama-bpe" | "llama3" | "llama-v3" | "tekken");
        self.add_bos.unwrap_or(usual)
    }

    /// The tokens around a text, if `eos` is one of them. `tokenizer_config.json` can only name the one before it.
    fn post_processor(&self) -> Result<Option<Value>, String> {
        let Some(eos) = self.eos.filter(|_| self.add_eos == Some(true)) else { return Ok(None) };
        let mut tokens = Map::new();
        let mut token = |id: u32| -> Result<Value, String> {
            let text = self.text(id)?;
            tokens.insert(text.into(), json!({"id": text, "ids": [id], "tokens": [text]}));
            Ok(json!({"SpecialToken": {"id": text, "type_id": 0}}))
        };
        let text = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
        let bos = self.bos.filter(|_| self.adds_bos()).map(&mut token).transpose()?;
        let single: Vec<Value> = bos.into_iter().chain([text("A"), token(eos)?]).collect();
        let pair = json!([text("A"), text("B")]);
        let template =
            json!({"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens});
        Ok(Some(template))
    }

    /// Builds `tokenizer_config.json`.
    fn config(&self) -> Result<Value, String> {
        let mut config = Map::new();
        if self.post_processor()?.is_none() {
            config.insert("add_bos_token".into(), self.adds_bos().into());
        }
        let named = [
            ("bos_token", self.bos),
            ("eos_token", self.eos),
            ("unk_token", self.unk),
            ("pad_token", self.pad),
        ];
        for (key, id) in named {
            if let Some(id) = id {
                config.insert(key.into(), self.text(id)?.into());
            }
        }
        if let Some(template) = self.chat_template {
            config.insert("chat_template".into(), template.into());
        }
        Ok(Value::Object(config))
    }

    /// Builds `generation_config.json`.
    fn generation_config(&self) -> Value {
        let ends = self.tokens.iter().zip(0u32..).filter(|((text, kind), _)| {
            matches!(kind, TokenKind::Control | TokenKind::UserDefined) && TURN_ENDS.contains(text)
        });
        let mut ids: Vec<u32> = ends.map(|(_, id)| id).chain(self.eos).chain(self.eot.clone()).collect();
        ids.sort_unstable();
        ids.dedup();
        let mut config = Map::from_iter([("eos_token_id".to_string(), json!(ids))]);
        let value = |key: &str| self.sampling.iter().find(|(name, _)| *name == key).map(|(_, value)| *value);
        let is_named = ["temperature", "top_k", "top_p", "min_p"].iter().any(|key| value(key).is_some());
        if is_named && value("temperature") != Some(0.0) {
            config.insert("do_sample".into(), true.into());
        }
        for &(key, value) in &self.sampling {
            // Whole numbers are written without a fraction.
            let whole = value.fract() == 0.0 && value.abs() < 1e9;
            config.insert(key.into(), if whole { json!(value as i64) } else { json!(value) });
        }
        Value::Object(config)
    }

    /// Texts and their ids. Of equal texts the first counts.
    fn ids(&self) -> Vec<(&'a str, u32)> {
        let mut known = HashSet::with_capacity(self.tokens.len());
        let ids = self.tokens.iter().zip(0..).map(|((text, _), id)| (*text, id));
        ids.filter(|(text, _)| known.insert(*text)).collect()
    }

    /// Tokens that are matched in text before anything else.
    fn added_tokens(&self, ids: &[(&str, u32)]) -> Vec<Value> {
        let tokens = ids.iter().map(|&(text, id)| (text, id, self.tokens[id as usize].1));
        let added = tokens.filter(|(text, _, kind)| {
            matches!(kind, TokenKind::Control | TokenKind::UserDefined) && !text.is_empty()
        });
        added
            .map(|(text, id, kind)| {
                json!({"id": id, "content": text, "special": kind == TokenKind::Control, "normalized": false,
                    "single_word": false, "lstrip": false, "rstrip": false})
            })
            .collect()
    }
}

/// A `tokenizer.json` with byte pair encoding. Its lists are borrowed: a tree of JSON values would copy each text.
#[derive(Serialize)]
struct TokenizerJson<'a, M: Serialize> {
    version: &'static str,
    added_tokens: Vec<Value>,
    normalizer: Value,
    pre_tokenizer: Value,
    post_processor: Value,
    decoder: Value,
    model: BpeJson<'a, M>,
}

/// The model of a `tokenizer.json`. `M` is a merge.
#[derive(Serialize)]
struct BpeJson<'a, M: Serialize> {
    r#type: &'static str,
    unk_token: Option<&'a str>,
    fuse_unk: bool,
    byte_fallback: bool,
    ignore_merges: bool,
    merges: &'a [M],
    #[serde(serialize_with = "as_map")]
    vocab: &'a [(&'a str, u32)],
}

impl<M: Serialize> TokenizerJson<'_, M> {
    fn write(&self) -> Result<String, String> {
        serde_json::to_string(self).map_err(|err| err.to_string())
    }
}

fn as_map<S: Serializer>(ids: &[(&str, u32)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(ids.iter().copied())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GenerationDefaults, Tokenizer};

    #[test]
    fn what_is_not_known_is_refused() {
        let refused = |vocabulary: Vocabulary<'_>| {
            TextFiles::from_vocabulary(&vocabulary).expect_err("not known").to_string()
        };
        let of = |model, pre| Vocabulary { name: "f.gguf".into(), model, pre, ..Vocabulary::default() };
        assert!(
            refused(of("t5", "")).contains("f.gguf: tokenizer model \"t5\""),
            "{}",
            refused(of("t5", ""))
        );
        assert!(refused(of("gpt2", "klingon")).contains("\"klingon\""));
        let lost = Vocabulary { eos: Some(7), tokens: vec![("a", TokenKind::Normal)], ..of("gpt2", "qwen2") };
        assert!(refused(lost).contains("token 7 is named"));
    }

    #[test]
    fn ends_of_turns_and_sampling_come_along() {
        let tokens = ["a", "<|im_end|>", "<end_of_turn>", "<eos>"];
        let kinds = [TokenKind::Normal, TokenKind::Control, TokenKind::Normal, TokenKind::Control];
        let vocabulary = Vocabulary {
            model: "gpt2",
            pre: "gpt-2",
            tokens: tokens.into_iter().zip(kinds).collect(),
            eos: Some(3),
            sampling: vec![("temperature", 0.5), ("top_k", 40.0)],
            ..Vocabulary::default()
        };
        let files = TextFiles::from_vocabulary(&vocabulary).expect("known");
        assert_eq!(Tokenizer::new(&files).expect("sound").eos_ids(), [1, 3]);
        let defaults = GenerationDefaults::new(&files).expect("sound");
        let recommended = defaults.recommended();
        assert_eq!((recommended.temperature, recommended.top_k, recommended.top_p), (0.5, 40, 1.0));
        for (sampling, temperature) in [
            (vec![("top_p", 0.9)], 1.0),
            (vec![("temperature", 0.0), ("top_k", 40.0)], 0.0),
            (vec![("repetition_penalty", 1.1)], 0.0),
        ] {
            let files = TextFiles::from_vocabulary(&Vocabulary { sampling, ..vocabulary.clone() });
            let defaults = GenerationDefaults::new(&files.expect("known")).expect("sound");
            assert_eq!(defaults.recommended().temperature, temperature, "{defaults:?}");
        }
    }

    #[test]
    fn an_end_token_comes_after_a_text_that_asks_for_it() {
        let vocabulary = Vocabulary {
            model: "gpt2",
            pre: "qwen2",
            tokens: vec![("a", TokenKind::Normal), ("<s>", TokenKind::Control), ("</s>", TokenKind::Control)],
            bos: Some(1),
            eos: Some(2),
            add_eos: Some(true),
            ..Vocabulary::default()
        };
        let encode = |vocabulary: Vocabulary<'_>, special| {
            let files = TextFiles::from_vocabulary(&vocabulary).expect("known");
            let written = files.vocabulary(3).expect("it has a name");
            assert_eq!(written.add_eos, vocabulary.add_eos == Some(true));
            Tokenizer::new(&files).expect("sound").encode("a", special).expect("it is known")
        };
        assert_eq!(encode(vocabulary.clone(), true), [0, 2]);
        assert_eq!(encode(vocabulary.clone(), false), [0]);
        assert_eq!(encode(Vocabulary { add_bos: Some(true), ..vocabulary.clone() }, true), [1, 0, 2]);
        assert_eq!(encode(Vocabulary { bos: Some(2), ..vocabulary.clone() }, true), [0, 2]);
        assert_eq!(encode(Vocabulary { add_eos: None, ..vocabulary }, true), [0]);
    }
}
