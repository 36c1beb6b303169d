//! Options for the prompt.

use std::io::{IsTerminal, stdin};
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;

use super::IdArgs;
use crate::failure::usage;
use crate::input;

/// The prompt.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Prompt")]
pub struct PromptArgs {
    /// The text. - reads standard input. Without a text, standard input is read if it is a file or a pipe.
    #[arg(conflicts_with_all = ["prompt", "prompt_file", "ids", "ids_file"], help_heading = None)]
    text: Option<String>,
    /// The text, as an option.
    #[arg(long, short = 'p', value_name = "TEXT", conflicts_with_all = ["prompt_file", "ids", "ids_file"], allow_hyphen_values = true)]
    prompt: Option<String>,
    /// Read the text from a file. - is standard input.
    #[arg(long, short = 'f', alias = "file", value_name = "FILE", conflicts_with_all = ["ids", "ids_file"])]
    prompt_file: Option<PathBuf>,
    #[command(flatten)]
    ids: IdArgs,
    /// Wrap the text as a user's turn in the checkpoint's chat template. Models with a template do this by default.
    /// Only the built-in model, which was made for stories, continues the text unless --chat is given.
    #[arg(long, conflicts_with_all = ["ids", "ids_file"])]
    chat: bool,
    /// Continue the text as it is, even if the checkpoint has a chat template.
    #[arg(long, conflicts_with = "chat")]
    raw: bool,
    /// System text, which comes before the user's turn.
    #[arg(long, short = 's', alias = "system-prompt", value_name = "TEXT", conflicts_with_all = ["raw", "ids", "ids_file"], allow_hyphen_values = true)]
    pub system: Option<String>,
}

/// How a text is given to the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptMode {
    /// In the chat template. It is an error if there is none.
    Template,
    /// In the chat template, if there is one.
    TemplateIfAny,
    /// Unchanged.
    Raw,
}

impl PromptArgs {
    /// The token ids, if they are given instead of a text.
    ///
    /// # Errors
    /// As [`IdArgs::read`].
    pub fn read_ids(&self) -> Result<Option<Vec<u32>>> {
        self.ids.read()
    }

    /// How the text is given to the model.
    pub fn asking(&self, is_built_in: bool) -> PromptMode {
        if self.raw {
            PromptMode::Raw
        } else if self.chat || self.system.is_some() {
            PromptMode::Template
        } else if is_built_in {
            PromptMode::Raw
        } else {
            PromptMode::TemplateIfAny
        }
    }

    /// The text.
    ///
    /// # Errors
    /// There is no text, or it cannot be read.
    pub fn read_text(&self) -> Result<String> {
        let is_stdin = |text: &str| text == "-";
        match (self.text.as_ref().or(self.prompt.as_ref()), &self.prompt_file) {
            (Some(text), _) if !is_stdin(text) => Ok(text.clone()),
            (None, Some(path)) if path.to_str().is_none_or(|path| !is_stdin(path)) => {
                input::text_of(path, input::PROMPT_BYTES_MAX)
            }
            (None, None) if stdin().is_terminal() => Err(usage(NOTHING)),
            (given, file) => match read_stdin()? {
                text if text.is_empty() && given.is_none() && file.is_none() => {
                    Err(usage(format!("{NOTHING}; standard input is empty")))
                }
                text => Ok(text),
            },
        }
    }
}

const NOTHING: &str =
    "nothing to continue: give a text, --prompt-file, --ids or --ids-file, or write to standard input";

/// Reads standard input and removes the last line break, as shells do with the output of a command.
fn read_stdin() -> Result<String> {
    let mut text = input::stdin_text(input::PROMPT_BYTES_MAX)?;
    let end = text.trim_end_matches('\n').len().max(text.len().saturating_sub(1));
    text.truncate(end);
    if text.ends_with('\r') {
        text.pop();
    }
    Ok(text)
}
