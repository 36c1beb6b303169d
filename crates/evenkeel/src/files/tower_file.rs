//! The vision tower of a GGUF model: a file of its own, by custom with `mmproj` in its name.

use std::path::{Path, PathBuf};

use keel_models::gguf::{add_tower, may_see};
use keel_models::{ModelError, vision};
use keel_weights::gguf::GgufFile;
use serde_json::Value;

use crate::{Error, Result};

/// The custom by which towers are found next to their models.
const CUSTOM: &str = "mmproj";

/// Where the vision tower of a GGUF model is. A checkpoint folder contains its own.
///
/// ```no_run
/// use evenkeel::{ModelFiles, TowerFile};
/// let tower = TowerFile::At("mmproj-F16.gguf".into());
/// let files = ModelFiles::open_with("Qwen3.5-4B-Q8_0.gguf", &tower)?;
/// # Ok::<(), evenkeel::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TowerFile {
    /// In the model's folder, in the one file whose name contains `mmproj`. Without such a file the model reads text
    /// alone.
    #[default]
    Beside,
    /// In this file.
    At(PathBuf),
    /// Nowhere: the model reads text alone.
    None,
}

/// An opened vision tower. Its weights are not read.
///
/// ```no_run
/// let files = evenkeel::ModelFiles::open("Qwen3.5-4B-Q8_0.gguf")?;
/// if let Some(tower) = &files.tower {
///     println!("the vision tower is {}", tower.path.display());
/// }
/// # Ok::<(), evenkeel::Error>(())
/// ```
pub struct OpenTower {
    /// The file's path.
    pub path: PathBuf,
    /// The file.
    pub file: GgufFile,
}

/// A tower that was looked for.
#[derive(Default)]
pub(super) struct FoundTower {
    pub tower: Option<OpenTower>,
    /// What was taken, or left, and why. `None` if there was no choice.
    pub notice: Option<String>,
}

/// Opens the tower of the text model at `path`, and adds it to the model's config.
pub(super) fn open(
    path: &Path,
    text: &GgufFile,
    config: &mut Value,
    wanted: &TowerFile,
) -> Result<FoundTower> {
    match wanted {
        TowerFile::None => Ok(FoundTower::default()),
        TowerFile::At(tower) => {
            let (path, file) = (tower.clone(), GgufFile::open(tower)?);
            let fitting = with_tower(config, text, &file);
            *config =
                fitting.map_err(|reason| Error::Unusable { path: path.clone(), reason: Box::new(reason) })?;
            Ok(FoundTower { tower: Some(OpenTower { path, file }), notice: None })
        }
        TowerFile::Beside if !may_see(text) => Ok(FoundTower::default()),
        TowerFile::Beside => {
            let Some(beside) = beside(path)? else { return Ok(FoundTower::default()) };
            let name = beside.file_name().unwrap_or_default().display().to_string();
            let opened = GgufFile::open(&beside).map_err(ModelError::from);
            match opened.and_then(|file| Ok((with_tower(config, text, &file)?, file))) {
                Ok((seeing, file)) => {
                    *config = seeing;
                    let notice = format!("the vision tower is {name}, which lies next to the model");
                    Ok(FoundTower { tower: Some(OpenTower { path: beside, file }), notice: Some(notice) })
                }
                Err(reason) => {
                    let notice = format!(
                        "{name} lies next to the model and is left out, so only text is read: {reason}"
                    );
                    Ok(FoundTower { tower: None, notice: Some(notice) })
                }
            }
        }
    }
}

/// The config with the tower, checked.
fn with_tower(config: &Value, text: &GgufFile, tower: &GgufFile) -> keel_models::Result<Value> {
    let mut config = config.clone();
    add_tower(&mut config, text, tower)?;
    vision::read_vision(&config)?;
    Ok(config)
}

/// The tower's file in the folder of a model.
fn beside(model: &Path) -> Result<Option<PathBuf>> {
    let folder = model.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let unreadable = |error: std::io::Error| Error::Read { path: folder.into(), reason: error.to_string() };
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        let is_custom = path.file_name().is_some_and(|name| {
            name.to_string_lossy().to_ascii_lowercase().contains(CUSTOM)
                && name != model.file_name().unwrap_or_default()
        });
        if is_custom && super::is_gguf(&path) {
            found.push(path);
        }
    }
    found.sort();
    if found.len() > 1 {
        return Err(Error::SeveralTowers { model: model.into(), found });
    }
    Ok(found.pop())
}
