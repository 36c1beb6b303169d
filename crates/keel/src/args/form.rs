//! The form that an answer must have.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use keel_text::GrammarSource;

use crate::input;

/// A schema or a grammar that the text follows.
#[derive(Clone, Debug, Default, Args)]
pub struct FormArgs {
    /// File with a JSON schema. The text is JSON that follows it. The schema is not added to the prompt, so the prompt
    /// must ask for the contents.
    #[arg(long, alias = "json-schema", value_name = "FILE", conflicts_with = "grammar")]
    schema: Option<PathBuf>,
    /// File with a grammar in llguidance's variant of Lark. The text follows it.
    #[arg(long, alias = "grammar-file", value_name = "FILE")]
    grammar: Option<PathBuf>,
}

impl FormArgs {
    /// The schema or grammar, if one is given.
    ///
    /// # Errors
    /// The file cannot be read, or a schema is not JSON.
    pub fn read(&self) -> Result<Option<GrammarSource>> {
        let text = |flag: &'static str, path: &PathBuf| {
            input::text_of(path, input::SETTINGS_BYTES_MAX).context(flag)
        };
        if let Some(path) = &self.schema {
            let schema = serde_json::from_str(&text("--schema", path)?);
            let schema = schema.with_context(|| format!("--schema {} is no JSON", path.display()))?;
            return Ok(Some(GrammarSource::JsonSchema(schema)));
        }
        let grammar = self.grammar.as_ref().map(|path| text("--grammar", path)).transpose()?;
        Ok(grammar.map(GrammarSource::Lark))
    }
}
