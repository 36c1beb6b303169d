//! `keel completions` and `keel man`: shell completions and manual pages, generated from the parser.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Args, Command};
use clap_complete::Shell;

use crate::output;

/// Print a script that completes keel's commands and options in a shell.
///
/// For example: keel completions bash > ~/.local/share/bash-completion/completions/keel
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell.
    shell: Shell,
}

/// Runs `keel completions`.
pub fn run(args: &CompletionsArgs, mut command: Command) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "keel", &mut script);
    output::text(&String::from_utf8(script)?)
}

/// Write the manual's pages, one for each command.
#[derive(Debug, Args)]
pub struct ManArgs {
    /// The folder to write keel.1, keel-generate.1 and so on to.
    folder: PathBuf,
}

/// Runs `keel man`.
pub fn run_man(args: &ManArgs, command: Command) -> Result<()> {
    let cannot_write = || format!("cannot write to {}", args.folder.display());
    std::fs::create_dir_all(&args.folder).with_context(cannot_write)?;
    clap_mangen::generate_to(command, &args.folder).with_context(cannot_write)
}
