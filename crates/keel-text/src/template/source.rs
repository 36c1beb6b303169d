//! Finds the chat templates of a checkpoint.

use serde_json::Value;

use crate::files::TextFile;
use crate::json::Object;
use crate::{TextError, TextFiles};

/// Name of the template for plain conversations.
pub(super) const DEFAULT: &str = "default";
/// Name of the template for conversations with tools, where a checkpoint has one.
pub(super) const TOOL_USE: &str = "tool_use";

/// The templates that this crate uses, as text.
pub(super) struct Sources {
    pub(super) default: Option<String>,
    pub(super) tool_use: Option<String>,
}

impl Sources {
    pub(super) fn one(default: String) -> Self {
        Sources { default: Some(default), tool_use: None }
    }

    /// The existing templates, by name.
    pub(super) fn named(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let all = [(DEFAULT, self.default.as_deref()), (TOOL_USE, self.tool_use.as_deref())];
        all.into_iter().filter_map(|(name, text)| Some((name, text?)))
    }
}

/// Finds the templates: in `chat_template.jinja`, else in `tokenizer_config.json`, else in `chat_template.json`.
pub(super) fn find(files: &TextFiles<'_>) -> Result<Option<Sources>, TextError> {
    if let Some(file) = &files.chat_template {
        let text = std::str::from_utf8(&file.bytes).map_err(|err| TextError::Template {
            name: DEFAULT.to_string(),
            reason: format!("{} is not UTF-8: {err}", file.name),
        })?;
        return Ok(Some(Sources::one(text.to_string())));
    }
    for file in [&files.tokenizer_config, &files.processor_template].into_iter().flatten() {
        let found = in_settings(file)?;
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

/// The templates in a JSON file, under `chat_template`.
fn in_settings(file: &TextFile<'_>) -> Result<Option<Sources>, TextError> {
    let config = Object::parse(file)?;
    match config.get("chat_template") {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(Sources::one(text.clone()))),
        Some(value) => named(value).map(Some).ok_or_else(|| {
            config.wrong(
                "chat_template",
                value,
                "a string, or a list of objects with name and template, one named default",
            )
        }),
    }
}

/// Reads a list of `{"name": ..., "template": ...}`. It must contain a default.
fn named(list: &Value) -> Option<Sources> {
    let mut sources = Sources { default: None, tool_use: None };
    for entry in list.as_array()? {
        let text = entry.get("template")?.as_str()?.to_string();
        match entry.get("name")?.as_str()? {
            DEFAULT => sources.default = Some(text),
            TOOL_USE => sources.tool_use = Some(text),
            _ => {}
        }
    }
    sources.default.is_some().then_some(sources)
}

/// Makes every line end a line feed, also inside string literals, as the reference implementation does.
pub(super) fn with_unix_lines(text: &str) -> String {
    text.replace("\r\n", "\n").replace('\r', "\n")
}

/// Replaces `{% generation %}` and `{% endgeneration %}` by blocks that are always rendered.
///
/// Training tools mark the assistant's text with them. They have no effect on a prompt, and the engine does not know
/// them. White space control (`-`, `+`) is kept.
pub(super) fn without_generation_blocks(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let Some(inner_bytes) = tag[2..].find("%}") else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(2 + inner_bytes + 2);
        let words = tag[2..2 + inner_bytes].trim_matches(['-', '+']).trim();
        match words {
            "generation" => out.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn default_of(files: &TextFiles<'_>) -> Option<String> {
        find(files).unwrap().and_then(|sources| sources.default)
    }

    #[test]
    fn the_file_wins_over_the_config() {
        let config = br#"{"chat_template": "from the config"}"#;
        let files = TextFiles::in_memory(b"").with_tokenizer_config(config);
        assert_eq!(default_of(&files).as_deref(), Some("from the config"));
        let files = files.with_chat_template(b"from the file");
        assert_eq!(default_of(&files).as_deref(), Some("from the file"));
        let processor = br#"{"chat_template": "from the processor"}"#;
        let files = files.with_processor_template(processor);
        assert_eq!(default_of(&files).as_deref(), Some("from the file"));
        let files = TextFiles::in_memory(b"").with_processor_template(processor);
        assert_eq!(default_of(&files).as_deref(), Some("from the processor"));
        let files = files.with_tokenizer_config(b"{}");
        assert_eq!(default_of(&files).as_deref(), Some("from the processor"));
        assert_eq!(default_of(&files.with_tokenizer_config(config)).as_deref(), Some("from the config"));
        assert_eq!(default_of(&TextFiles::in_memory(b"")), None);
        assert_eq!(default_of(&TextFiles::in_memory(b"").with_tokenizer_config(b"{}")), None);
    }

    #[test]
    fn a_list_of_templates_must_have_a_default() {
        let config = br#"{"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"},
                          {"name": "rag", "template": "R"}]}"#;
        let sources = find(&TextFiles::in_memory(b"").with_tokenizer_config(config)).unwrap().unwrap();
        assert_eq!((sources.default.as_deref(), sources.tool_use.as_deref()), (Some("D"), Some("T")));
        for config in [
            r#"{"chat_template": [{"name": "tool_use", "template": "T"}]}"#,
            r#"{"chat_template": [{"name": "default"}]}"#,
            r#"{"chat_template": 3}"#,
        ] {
            let err =
                find(&TextFiles::in_memory(b"").with_tokenizer_config(config.as_bytes())).err().unwrap();
            assert!(err.to_string().starts_with("tokenizer_config.json: chat_template is "), "{err}");
        }
    }

    #[test]
    fn generation_blocks_become_plain_ones() {
        let text = "a{%- generation -%}b{% endgeneration %}{% set generation = 1 %}{{ generation }}{% ";
        let plain = "a{%- if true -%}b{% endif %}{% set generation = 1 %}{{ generation }}{% ";
        assert_eq!(without_generation_blocks(text), plain);
        for odd in ["{%}", "{%%}", "{%-%}", "%}{%", ""] {
            assert_eq!(without_generation_blocks(odd), odd);
        }
    }
}
