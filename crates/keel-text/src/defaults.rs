//! The sampling settings that a checkpoint recommends.

use std::path::Path;

use crate::json::Object;
use crate::{TextError, TextFiles};

/// The values of `generation_config.json`; `None` where the file has none.
///
/// These are defaults for a request that names no value of its own.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// `false` means greedy decoding: the other sampling fields then do not apply.
    pub do_sample: Option<bool>,
    /// Divides the logits; at least 0, and 0 means greedy.
    pub temperature: Option<f32>,
    /// Number of most likely tokens to draw from; 0 means all.
    pub top_k: Option<u32>,
    /// Share of the probability mass to draw from, in (0, 1].
    pub top_p: Option<f32>,
    /// Smallest probability to draw from, relative to the most likely token's, in [0, 1].
    pub min_p: Option<f32>,
    /// Divides positive logits, and multiplies negative logits, of tokens already seen. Above 0; 1 is neutral.
    pub repetition_penalty: Option<f32>,
    /// Largest number of tokens to generate.
    pub max_new_tokens: Option<u32>,
    /// Ids that end a generation, from this file alone. [`Tokenizer::eos_ids`](crate::Tokenizer::eos_ids) collects the
    /// ids of all files.
    pub eos_ids: Vec<u32>,
}

/// Settings that hold where a request names none. See [`GenerationDefaults`] for each value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Recommended {
    /// 0 without sampling.
    pub temperature: f32,
    /// 0 for all tokens.
    pub top_k: usize,
    /// 1 for all tokens.
    pub top_p: f32,
    /// 0 for all tokens.
    pub min_p: f32,
    /// 1 for no penalty.
    pub repetition_penalty: f32,
}

impl GenerationDefaults {
    /// The settings, with neutral values where the checkpoint names none. A checkpoint that does not ask for sampling
    /// is decoded greedily; its penalty holds all the same.
    pub fn recommended(&self) -> Recommended {
        let samples = self.do_sample == Some(true);
        let own = |value: Option<f32>, neutral: f32| value.filter(|_| samples).unwrap_or(neutral);
        Recommended {
            temperature: own(self.temperature, if samples { 1.0 } else { 0.0 }),
            top_k: self.top_k.filter(|_| samples).map_or(0, |k| k as usize),
            top_p: own(self.top_p, 1.0),
            min_p: own(self.min_p, 0.0),
            repetition_penalty: self.repetition_penalty.unwrap_or(1.0),
        }
    }

    /// Reads the settings from a checkpoint folder.
    ///
    /// # Errors
    /// As [`TextFiles::read`] and [`GenerationDefaults::new`].
    pub fn open(folder: &Path) -> Result<Self, TextError> {
        Self::new(&TextFiles::read(folder)?)
    }

    /// Reads the settings. All are absent without a `generation_config.json`.
    ///
    /// # Errors
    /// [`TextError::Json`] if the file is no JSON object, [`TextError::Field`] for a value out of its range.
    pub fn new(files: &TextFiles<'_>) -> Result<Self, TextError> {
        let Some(file) = &files.generation_config else { return Ok(GenerationDefaults::default()) };
        let config = Object::parse(file)?;
        Ok(GenerationDefaults {
            do_sample: config.bool("do_sample")?,
            temperature: config.f32("temperature", "a number of at least 0", |x| x >= 0.0)?,
            top_k: config.u32("top_k")?,
            top_p: config.f32("top_p", "a number above 0 and at most 1", |x| x > 0.0 && x <= 1.0)?,
            min_p: config.f32("min_p", "a number from 0 to 1", |x| (0.0..=1.0).contains(&x))?,
            repetition_penalty: config.f32("repetition_penalty", "a number above 0", |x| x > 0.0)?,
            max_new_tokens: config.u32("max_new_tokens")?,
            eos_ids: config.ids("eos_token_id")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<GenerationDefaults, TextError> {
        GenerationDefaults::new(&TextFiles::in_memory(b"").with_generation_config(json.as_bytes()))
    }

    #[test]
    fn every_field_is_read() {
        let found = parse(
            r#"{"bos_token_id": 151643, "do_sample": true, "eos_token_id": [151645, 151643], "temperature": 0.6,
                "top_k": 20, "top_p": 0.95, "min_p": 0, "repetition_penalty": 1.05, "max_new_tokens": 512,
                "transformers_version": "5.17.0"}"#,
        )
        .unwrap();
        let expected = GenerationDefaults {
            do_sample: Some(true),
            temperature: Some(0.6),
            top_k: Some(20),
            top_p: Some(0.95),
            min_p: Some(0.0),
            repetition_penalty: Some(1.05),
            max_new_tokens: Some(512),
            eos_ids: vec![151645, 151643],
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn absent_null_and_missing_file_are_all_nothing() {
        assert_eq!(parse(r#"{"temperature": null}"#).unwrap(), GenerationDefaults::default());
        let none = GenerationDefaults::new(&TextFiles::in_memory(b"")).unwrap();
        assert_eq!(none, GenerationDefaults::default());
    }

    #[test]
    fn values_out_of_range_are_refused_by_name() {
        for (json, field) in [
            (r#"{"temperature": -0.1}"#, "temperature is -0.1"),
            (r#"{"temperature": 1e300}"#, "temperature is 1e+300"),
            (r#"{"top_p": 0}"#, "top_p is 0"),
            (r#"{"top_p": 1.5}"#, "top_p is 1.5"),
            (r#"{"min_p": 2}"#, "min_p is 2"),
            (r#"{"repetition_penalty": 0}"#, "repetition_penalty is 0"),
            (r#"{"top_k": -1}"#, "top_k is -1"),
            (r#"{"max_new_tokens": 4294967296}"#, "max_new_tokens is 4294967296"),
            (r#"{"do_sample": 1}"#, "do_sample is 1"),
        ] {
            let err = parse(json).unwrap_err().to_string();
            assert!(err.starts_with(&format!("generation_config.json: {field}, expected ")), "{err}");
        }
    }

    #[test]
    fn broken_json_says_where() {
        let err = parse("{\"top_k\": 20").unwrap_err().to_string();
        assert!(err.contains("generation_config.json: not valid: EOF"), "{err}");
        assert!(parse("[]").is_err());
    }
}
