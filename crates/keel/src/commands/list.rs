//! `keel list`: the downloaded models.

use std::time::UNIX_EPOCH;

use anyhow::Result;
use clap::Args;
use serde_json::{Value, json};

use crate::output;
use crate::source::hub::{Cache, Entry, Settings};
use evenkeel::human_bytes;

/// Print the models that keel or other clients downloaded from the hub.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// Print one JSON list.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &ListArgs) -> Result<()> {
    let cache = Cache::new(Settings::from_env()?.cache);
    let entries = cache.entries()?;
    if args.json {
        return output::json(&entries.iter().map(to_json).collect::<Value>());
    }
    if entries.is_empty() {
        return output::line(&format!(
            "no models in {}; keel pull OWNER/NAME downloads one",
            cache.root().display()
        ));
    }
    let names: Vec<String> = entries.iter().map(name_of).collect();
    let width = names.iter().map(String::len).max().unwrap_or(0);
    for (entry, name) in entries.iter().zip(&names) {
        let form = match (&entry.gguf[..], entry.is_complete) {
            (_, false) => "not a model that keel runs, or incomplete".to_string(),
            ([], _) => "safetensors".to_string(),
            (files, _) => {
                files.iter().chain(&entry.towers).map(String::as_str).collect::<Vec<_>>().join(", ")
            }
        };
        let size = human_bytes(entry.bytes);
        output::line(&format!("{name:<width$}  {size:>9}  {}  {form}", &entry.commit[..8]))?;
    }
    Ok(())
}

/// The name to give to `--model`.
fn name_of(entry: &Entry) -> String {
    let is_main = entry.revisions.iter().any(|revision| revision == "main");
    match entry.revisions.first() {
        Some(_) if is_main => entry.repository.clone(),
        Some(revision) => format!("{}@{revision}", entry.repository),
        None => format!("{}@{}", entry.repository, entry.commit),
    }
}

fn to_json(entry: &Entry) -> Value {
    let changed = entry.changed.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    json!({
        "name": name_of(entry),
        "repository": entry.repository,
        "revision": entry.commit,
        "refs": entry.revisions,
        "gguf": entry.gguf,
        "mmproj": entry.towers,
        "complete": entry.is_complete,
        "bytes": entry.bytes,
        "changed": changed.map(|time| time.as_secs()),
    })
}
