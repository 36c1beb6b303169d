//! Finds the checkpoint that `--model` names.

#[cfg(feature = "hub")]
pub mod hub;
// Without the feature only the form of a name matters.
#[cfg_attr(not(feature = "hub"), allow(dead_code))]
mod hub_name;

use std::path::{Path, PathBuf};

#[cfg(feature = "hub")]
use anyhow::Context;
use anyhow::{Result, bail};
use evenkeel::ModelFiles;
use hub_name::HubName;

/// Opens a folder, a file or a hub name; without a name, the built-in model.
///
/// # Errors
/// There is no such model, its config is incomplete, or its architecture is unknown.
pub fn open(model: Option<&str>) -> Result<ModelFiles> {
    Ok(match model {
        Some(model) => ModelFiles::open(locate(model)?)?,
        None => ModelFiles::built_in()?,
    })
}

/// Resolves the value of `--model` to a path.
///
/// # Errors
/// There is no such model, or it cannot be downloaded.
pub fn locate(model: &str) -> Result<PathBuf> {
    if Path::new(model).exists() {
        return Ok(model.into());
    }
    if HubName::looks_like(model) {
        return download(model);
    }
    bail!("--model {model}: there is no such file or folder")
}

#[cfg(feature = "hub")]
fn download(name: &str) -> Result<PathBuf> {
    hub::locate(name).with_context(|| format!("--model {name}: there is no such file or folder here"))
}

#[cfg(not(feature = "hub"))]
fn download(name: &str) -> Result<PathBuf> {
    bail!(
        "--model {name}: there is no such file or folder, and this binary was built without the feature hub: download the \
         model and give its folder"
    )
}
