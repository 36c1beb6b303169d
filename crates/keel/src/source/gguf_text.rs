//! The text side of a GGUF file, from its metadata.

use anyhow::Result;
use keel_text::{TextFiles, TokenKind, Vocabulary};
use keel_weights::gguf::{GgufFile, GgufValue};

/// Whether a file has a vocabulary.
pub fn has_vocabulary(file: &GgufFile) -> bool {
    file.metadata().contains_key("tokenizer.ggml.tokens")
}

/// The text files that the metadata amounts to.
///
/// # Errors
/// A vocabulary of a kind that is not read, or that contradicts itself.
pub fn text_files(file: &GgufFile, name: String) -> Result<TextFiles<'static>> {
    let keys = Keys(file);
    let kinds = keys.list("token_type");
    let kind = |i: usize| match kinds.get(i).and_then(GgufValue::as_u64) {
        Some(1) | None => TokenKind::Normal,
        Some(3) => TokenKind::Control,
        Some(4) => TokenKind::UserDefined,
        Some(6) => TokenKind::Byte,
        Some(_) => TokenKind::Other,
    };
    let texts = keys.list("tokens").iter().map(|token| token.as_str().unwrap_or_default());
    let sampling = [
        ("temperature", "temp"),
        ("top_k", "top_k"),
        ("top_p", "top_p"),
        ("min_p", "min_p"),
        ("repetition_penalty", "penalty_repeat"),
    ];
    let sampling = sampling.into_iter().filter_map(|(ours, theirs)| {
        Some((ours, file.metadata().get(&format!("general.sampling.{theirs}"))?.as_f64()?))
    });
    let vocabulary = Vocabulary {
        name,
        model: keys.text("model").unwrap_or_default(),
        pre: keys.text("pre").unwrap_or_default(),
        tokens: texts.enumerate().map(|(i, text)| (text, kind(i))).collect(),
        scores: keys.list("scores").iter().map(|score| score.as_f64().unwrap_or(0.0) as f32).collect(),
        merges: keys.list("merges").iter().filter_map(GgufValue::as_str).collect(),
        bos: keys.id("bos_token_id"),
        eos: keys.id("eos_token_id"),
        eot: ["eot_token_id", "eom_token_id"].into_iter().filter_map(|key| keys.id(key)).collect(),
        unk: keys.id("unknown_token_id"),
        pad: keys.id("padding_token_id"),
        add_bos: keys.flag("add_bos_token"),
        add_space_prefix: keys.flag("add_space_prefix"),
        chat_template: file.metadata().get("tokenizer.chat_template").and_then(GgufValue::as_str),
        sampling: sampling.collect(),
    };
    Ok(TextFiles::from_vocabulary(&vocabulary)?)
}

/// The metadata of the tokenizer.
struct Keys<'a>(&'a GgufFile);

impl<'a> Keys<'a> {
    fn get(&self, key: &str) -> Option<&'a GgufValue> {
        self.0.metadata().get(&format!("tokenizer.ggml.{key}"))
    }

    fn text(&self, key: &str) -> Option<&'a str> {
        self.get(key)?.as_str()
    }

    fn flag(&self, key: &str) -> Option<bool> {
        self.get(key)?.as_bool()
    }

    fn id(&self, key: &str) -> Option<u32> {
        self.get(key)?.as_u64()?.try_into().ok()
    }

    fn list(&self, key: &str) -> &'a [GgufValue] {
        self.get(key).and_then(GgufValue::as_array).unwrap_or_default()
    }
}
