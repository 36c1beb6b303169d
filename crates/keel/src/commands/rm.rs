//! `keel rm`: removes downloaded models.

use anyhow::Result;
use clap::Args;

use crate::output;
use crate::source::hub::{Cache, HubName, Settings};
use evenkeel::human_bytes;

/// Remove a downloaded model. Files that another revision uses stay.
#[derive(Debug, Args)]
pub struct RmArgs {
    /// owner/name for all revisions, owner/name@revision for one revision, owner/name:CODING for one GGUF file.
    #[arg(value_name = "NAME", required = true)]
    names: Vec<String>,
}

/// Runs the command.
pub fn run(args: &RmArgs) -> Result<()> {
    let cache = Cache::new(Settings::from_env()?.cache);
    let names = args.names.iter().map(|name| HubName::parse(name)).collect::<Result<Vec<_>>>()?;
    for name in names {
        let freed = cache.remove(&name)?;
        output::line(&format!("{name} is removed; {} are free again", human_bytes(freed)))?;
    }
    Ok(())
}
