//! Token ids on the command line.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;

use crate::input;

/// Token ids instead of a text.
#[derive(Clone, Debug, Args)]
pub struct IdArgs {
    /// Token ids, separated by commas.
    #[arg(long, value_name = "IDS", value_delimiter = ',', conflicts_with = "ids_file")]
    ids: Option<Vec<u32>>,
    /// A file with one token id per line.
    #[arg(long, value_name = "FILE")]
    ids_file: Option<PathBuf>,
}

impl IdArgs {
    /// The ids, if any are given.
    ///
    /// # Errors
    /// The file cannot be read, has a line that is not an id, or is empty.
    pub fn read(&self) -> Result<Option<Vec<u32>>> {
        let Some(path) = &self.ids_file else { return Ok(self.ids.clone()) };
        let text = input::text_of(path, input::PROMPT_BYTES_MAX)?;
        let mut ids = Vec::new();
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.trim();
            if line.is_empty() {
                continue;
            }
            match line.parse() {
                Ok(id) => ids.push(id),
                Err(_) => {
                    let shown: String = line.chars().take(40).collect();
                    bail!("{}, line {number}: {shown:?} is not a token id", path.display());
                }
            }
        }
        if ids.is_empty() {
            bail!("{} holds no token ids", path.display());
        }
        Ok(Some(ids))
    }
}
