//! The special tokens that a checkpoint names, and the ids that end a generation.

use serde_json::Value;

use crate::json::Object;
use crate::{TextError, TextFiles};

/// The named special tokens of `tokenizer_config.json`, as text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// Stands at the beginning of a sequence.
    pub bos: Option<String>,
    /// Ends a sequence.
    pub eos: Option<String>,
    /// Pads the sequences of a batch to one length.
    pub pad: Option<String>,
    /// Stands for text that the vocabulary cannot express.
    pub unk: Option<String>,
    /// Whether encoding puts `bos` first. `None` leaves that to `tokenizer.json`.
    pub add_bos: Option<bool>,
}

impl SpecialTokens {
    /// Reads the tokens. All are absent without a `tokenizer_config.json`.
    ///
    /// # Errors
    /// [`TextError::Json`] and [`TextError::Field`] for a malformed file.
    pub fn new(files: &TextFiles<'_>) -> Result<Self, TextError> {
        let Some(file) = &files.tokenizer_config else { return Ok(SpecialTokens::default()) };
        let config = Object::parse(file)?;
        Ok(SpecialTokens {
            bos: token(&config, "bos_token")?,
            eos: token(&config, "eos_token")?,
            pad: token(&config, "pad_token")?,
            unk: token(&config, "unk_token")?,
            add_bos: config.bool("add_bos_token")?,
        })
    }
}

/// Reads a token, written as its text or as an object with the text under `content`.
fn token(config: &Object<'_>, key: &str) -> Result<Option<String>, TextError> {
    match config.get(key) {
        None => Ok(None),
        Some(value) => value
            .as_str()
            .or_else(|| value.get("content").and_then(Value::as_str))
            .map(|text| Some(text.to_string()))
            .ok_or_else(|| config.wrong(key, value, "a string, or an object with a string under content")),
    }
}

/// The `eos_token_id` of `config.json`, of its `text_config`, and of `generation_config.json`.
///
/// The files often disagree. For example, a chat model ends its turn with one token, and its base model ended documents
/// with another. Each of these ids ends a generation.
pub(crate) fn eos_ids(files: &TextFiles<'_>) -> Result<Vec<u32>, TextError> {
    let mut ids = Vec::new();
    if let Some(file) = &files.config {
        let config = Object::parse(file)?;
        ids.extend(config.ids("eos_token_id")?);
        if let Some(text_config) = config.child("text_config", "text_config.")? {
            ids.extend(text_config.ids("eos_token_id")?);
        }
    }
    if let Some(file) = &files.generation_config {
        ids.extend(Object::parse(file)?.ids("eos_token_id")?);
    }
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn special(config: &str) -> Result<SpecialTokens, TextError> {
        SpecialTokens::new(&TextFiles::in_memory(b"").with_tokenizer_config(config.as_bytes()))
    }

    #[test]
    fn tokens_are_strings_objects_or_null() {
        let found = special(
            r#"{"bos_token": null, "eos_token": "<|im_end|>", "add_bos_token": false,
                "pad_token": {"__type": "AddedToken", "content": "<|endoftext|>", "special": true}}"#,
        )
        .unwrap();
        let expected = SpecialTokens {
            bos: None,
            eos: Some("<|im_end|>".into()),
            pad: Some("<|endoftext|>".into()),
            unk: None,
            add_bos: Some(false),
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn a_wrong_type_names_file_field_and_value() {
        let err = special(r#"{"eos_token": 5}"#).unwrap_err().to_string();
        assert_eq!(
            err,
            "tokenizer_config.json: eos_token is 5, expected a string, or an object with a string under content"
        );
        let err = special(r#"{"add_bos_token": "yes"}"#).unwrap_err().to_string();
        assert_eq!(err, "tokenizer_config.json: add_bos_token is \"yes\", expected true or false");
    }

    #[test]
    fn end_ids_come_from_every_file_and_level() {
        let files = TextFiles::in_memory(b"")
            .with_config(br#"{"eos_token_id": 7, "text_config": {"eos_token_id": [11, 13]}}"#)
            .with_generation_config(br#"{"eos_token_id": [7, 17]}"#);
        assert_eq!(eos_ids(&files).unwrap(), [7, 11, 13, 7, 17]);
    }

    #[test]
    fn a_negative_end_id_is_refused_with_its_path() {
        let files = TextFiles::in_memory(b"").with_config(br#"{"text_config": {"eos_token_id": [1, -1]}}"#);
        let err = eos_ids(&files).unwrap_err().to_string();
        assert_eq!(
            err,
            "config.json: text_config.eos_token_id is [1,-1], expected a token id or a list of token ids"
        );
    }
}
