//! Models from the Hugging Face hub, kept in its usual cache folder.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use hf_hub::Cache;
use hf_hub::api::sync::ApiBuilder;

/// Files of a checkpoint that are used.
fn is_wanted(file: &str) -> bool {
    let in_root = !file.contains('/');
    in_root && [".safetensors", ".json", ".jinja"].iter().any(|extension| file.ends_with(extension))
}

/// Downloads what is not in the cache yet, with progress on standard error, and returns the folder. Where the hub
/// cannot be reached, what is in the cache has to do.
pub fn download(name: &str) -> Result<PathBuf> {
    let failed = || format!("cannot download {name} from the hub");
    let api = ApiBuilder::from_env().with_progress(true).build().with_context(failed)?;
    let repository = api.model(name.to_string());
    let files = match repository.info() {
        Ok(info) => info.siblings,
        Err(error) => {
            let Some(folder) = cached(name) else { return Err(error).with_context(failed) };
            tracing::info!("the hub cannot be reached; using {}", folder.display());
            return Ok(folder);
        }
    };
    let mut folder = None;
    for file in files.iter().map(|file| file.rfilename.as_str()).filter(|file| is_wanted(file)) {
        let path = repository.get(file).with_context(failed)?;
        if file == "config.json" {
            folder = path.parent().map(PathBuf::from);
        }
    }
    let Some(folder) = folder else { bail!("{name} on the hub has no config.json") };
    Ok(folder)
}

/// The folder of a model that was downloaded before.
fn cached(name: &str) -> Option<PathBuf> {
    let config = Cache::from_env().model(name.to_string()).get("config.json")?;
    config.parent().map(PathBuf::from)
}
