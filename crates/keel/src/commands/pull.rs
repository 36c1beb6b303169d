//! `keel pull`: downloads a model.

use anyhow::Result;
use clap::Args;
use serde_json::json;

use crate::output;
use crate::signals::Signals;
use crate::source::hub::{self, HubName, Settings, Towers};
use evenkeel::human_bytes;

/// Download a model from the hub, or its new files. An interrupted download continues where it stopped. The size of
/// every file is checked, and the SHA-256 of large files.
///
/// HF_TOKEN holds a token for models that require one. HF_ENDPOINT names another hub. HF_HOME or HF_HUB_CACHE names
/// another folder.
#[derive(Debug, Args)]
pub struct PullArgs {
    /// owner/name, owner/name@revision (a branch, a tag or a commit), or owner/name:CODING for one of several GGUF
    /// files, such as owner/name:Q4_K_M.
    #[arg(value_name = "NAME")]
    name: String,
    /// Leave out the vision tower of a GGUF model, a file with mmproj in its name. By default the fitting one comes
    /// with the model.
    #[arg(long)]
    no_mmproj: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &PullArgs) -> Result<()> {
    // A signal ends the download. The bytes that have come are kept.
    let _signals = Signals::watch()?;
    let name = HubName::parse(&args.name)?;
    let towers = if args.no_mmproj { Towers::Left } else { Towers::Wanted };
    let pulled = hub::pull(&name, &Settings::from_env()?, towers)?;
    if args.json {
        return output::json(&json!({
            "name": name.to_string(),
            "path": pulled.path,
            "revision": pulled.commit,
            "downloaded_bytes": pulled.new_bytes,
        }));
    }
    let new = match pulled.new_bytes {
        0 => "nothing new".to_string(),
        bytes => format!("{} downloaded", human_bytes(bytes)),
    };
    output::line(&format!("{name}: {new}; {}", pulled.path.display()))?;
    output::line(&format!("run it with: keel generate --model {name} \"Once upon a time\""))
}
