//! Reads turns: with an editor on a terminal, else as lines of standard input.

use std::io::{BufRead, IsTerminal, Read, stdin, stdout};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use rustyline::completion::{Completer, Pair};
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Config, Context, Editor, Helper};

use super::input::{COMMANDS, is_open};
use crate::input::PROMPT_BYTES_MAX;

/// Largest number of turns in the history.
const HISTORY_MAX: usize = 1000;
const PROMPT: &str = "> ";

/// A source of turns.
pub enum Lines {
    /// A terminal, with editing, completion and a persistent history.
    Terminal { editor: Box<Editor<Commands, FileHistory>>, history: Option<PathBuf> },
    /// A file or a pipe.
    Plain,
}

/// The result of reading.
pub enum Line {
    Text(String),
    /// Ctrl-C was pressed: the line is dropped.
    Dropped,
    End,
}

impl Lines {
    /// Opens the editor if standard input and output are both terminals.
    ///
    /// # Errors
    /// The terminal cannot be set up.
    pub fn open() -> Result<Lines> {
        if !stdin().is_terminal() || !stdout().is_terminal() {
            return Ok(Lines::Plain);
        }
        let config =
            Config::builder().max_history_size(HISTORY_MAX)?.auto_add_history(true).bracketed_paste(true);
        let mut editor = Editor::with_config(config.build())?;
        editor.set_helper(Some(Commands));
        let history = history_file();
        // Before the first conversation there is no history file.
        if let Some(path) = history.as_ref().filter(|path| is_history(path)) {
            let _ = editor.load_history(path);
        }
        Ok(Lines::Terminal { editor: Box::new(editor), history })
    }

    /// Whether turns are typed on a terminal.
    pub fn is_terminal(&self) -> bool {
        matches!(self, Lines::Terminal { .. })
    }

    /// Reads the next turn or command.
    ///
    /// # Errors
    /// The terminal or the input fails.
    pub fn next(&mut self) -> Result<Line> {
        let Lines::Terminal { editor, history } = self else { return next_plain() };
        let line = match editor.readline(PROMPT) {
            Ok(text) => Line::Text(text),
            Err(ReadlineError::Interrupted) => Line::Dropped,
            Err(ReadlineError::Eof) => Line::End,
            Err(error) => return Err(error).context("cannot read from the terminal"),
        };
        if let (Line::Text(_), Some(path)) = (&line, history) {
            // The conversation goes on if the history cannot be saved.
            let _ = editor.append_history(path);
        }
        Ok(line)
    }
}

/// Reads a line, or all lines of a turn of several lines.
fn next_plain() -> Result<Line> {
    let mut text = String::new();
    loop {
        let left = (PROMPT_BYTES_MAX + 1).saturating_sub(text.len() as u64);
        if stdin().lock().take(left).read_line(&mut text).context("cannot read standard input")? == 0 {
            return Ok(if text.is_empty() { Line::End } else { Line::Text(text) });
        }
        if text.len() as u64 > PROMPT_BYTES_MAX {
            bail!("a turn on standard input has more than {PROMPT_BYTES_MAX} bytes");
        }
        if !is_open(&text) {
            return Ok(Line::Text(text));
        }
    }
}

/// The path of `chat_history` in the state folder. Creates the folder if necessary.
fn history_file() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let state = variable("XDG_STATE_HOME").or_else(|| Some(variable("HOME")?.join(".local/state")))?;
    let folder = state.join("keel");
    std::fs::create_dir_all(&folder).ok()?;
    Some(folder.join("chat_history"))
}

/// Whether the editor can read this file to its end.
fn is_history(path: &Path) -> bool {
    path.metadata().is_ok_and(|facts| facts.is_file() && facts.len() <= PROMPT_BYTES_MAX)
}

/// Completes commands, and detects the end of a turn of several lines.
pub struct Commands;

impl Completer for Commands {
    type Candidate = Pair;

    fn complete(&self, line: &str, at: usize, _: &Context<'_>) -> rustyline::Result<(usize, Vec<Pair>)> {
        let typed = line.get(..at).unwrap_or(line);
        let completes = |(name, what, _): &&(&str, &str, &str)| {
            name.starts_with('/') && name.starts_with(typed) && (what.is_empty() || *name != typed)
        };
        let pair = |(name, what, _): &(&str, &str, &str)| Pair {
            display: name.to_string(),
            replacement: if what.is_empty() { name.to_string() } else { format!("{name} ") },
        };
        let found = if typed.starts_with('/') {
            COMMANDS.iter().filter(completes).map(pair).collect()
        } else {
            Vec::new()
        };
        Ok((0, found))
    }
}

impl Validator for Commands {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        Ok(if is_open(context.input()) {
            ValidationResult::Incomplete
        } else {
            ValidationResult::Valid(None)
        })
    }
}

impl Hinter for Commands {
    type Hint = String;
}

impl Highlighter for Commands {}

impl Helper for Commands {}
