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
use evenkeel::{ModelFiles, TowerFile};
use hub_name::HubName;

/// Opens a folder, a file or a hub name; without a name, the built-in model. `mmproj` is the value of `--mmproj`.
///
/// # Errors
/// There is no such model, its config is incomplete, its architecture is unknown, or its vision tower does not fit or
/// is not clear.
pub fn open(model: Option<&str>, mmproj: Option<&Path>) -> Result<ModelFiles> {
    let Some(model) = model else {
        if mmproj.is_some() {
            bail!("--mmproj: the built-in model reads only text; name a GGUF model with --model");
        }
        return Ok(ModelFiles::built_in()?);
    };
    let tower = match mmproj {
        None => TowerFile::NextToModel,
        Some(none) if none.as_os_str() == "none" => TowerFile::None,
        Some(file) => TowerFile::At(file.into()),
    };
    let path = locate(model, &tower)?;
    let model = ModelFiles::open_with(path, &tower)?;
    if let Some(notice) = &model.tower_notice {
        tracing::info!("{notice}");
    }
    Ok(model)
}

/// Resolves the value of `--model` to a path. With [`TowerFile::NextToModel`] the vision tower of a GGUF model is
/// downloaded, too.
///
/// # Errors
/// There is no such model, or it cannot be downloaded.
pub fn locate(model: &str, tower: &TowerFile) -> Result<PathBuf> {
    if Path::new(model).exists() {
        return Ok(model.into());
    }
    if HubName::looks_like(model) {
        return download(model, *tower == TowerFile::NextToModel);
    }
    bail!("--model {model}: there is no such file or folder{}", hub_advice(model))
}

/// The end of advice: another meaning of a name without a folder.
fn hub_advice(model: &str) -> &'static str {
    let is_bare = !model.contains(['/', '\\']);
    if cfg!(feature = "hub") && is_bare { "; a model of the hub is OWNER/NAME" } else { "" }
}

#[cfg(feature = "hub")]
fn download(name: &str, with_tower: bool) -> Result<PathBuf> {
    let towers = if with_tower { hub::Towers::Wanted } else { hub::Towers::Left };
    hub::locate(name, towers).with_context(|| format!("--model {name}: there is no such file or folder here"))
}

#[cfg(not(feature = "hub"))]
fn download(name: &str, _with_tower: bool) -> Result<PathBuf> {
    bail!(
        "--model {name}: there is no such file or folder, and this binary was built without the feature hub: download the \
         model and give its folder"
    )
}
