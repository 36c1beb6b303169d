//! The vision tower of a GGUF model: a file of its own, by custom with `mmproj` in its name.

use std::path::{Path, PathBuf};

use keel_models::gguf::{add_tower, may_see, processor};
use keel_models::{ModelError, vision};
use keel_weights::gguf::{GgufFile, PartName};
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
/// assert!(files.tower.is_some());
/// # Ok::<(), evenkeel::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TowerFile {
    /// In the model's folder, in the one file whose name contains `mmproj` and that fits the model. Without such a file
    /// the model reads text alone.
    #[default]
    NextToModel,
    /// In this file.
    At(PathBuf),
    /// Nowhere: the model reads text alone.
    None,
}

/// An opened vision tower. Its weights are not read.
///
/// ```no_run
/// let files = evenkeel::ModelFiles::open("Qwen3.5-4B-Q8_0.gguf")?;
/// let tower = files.tower.expect("mmproj-F16.gguf lies next to the model");
/// assert!(tower.path.ends_with("mmproj-F16.gguf"));
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
    /// The file that was taken or left, and why. `None` if there was no choice.
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
        TowerFile::NextToModel if !may_see(text) => Ok(FoundTower::default()),
        TowerFile::NextToModel => {
            let (mut fitting, mut left_out) = (Vec::new(), Vec::new());
            for candidate in candidates(path) {
                let opened = GgufFile::open(&candidate).map_err(ModelError::from);
                match opened.and_then(|file| Ok((with_tower(config, text, &file)?, file))) {
                    Ok((merged, file)) => fitting.push((merged, OpenTower { path: candidate, file })),
                    Err(reason) => left_out.push(format!("{}: {reason}", name_of(&candidate))),
                }
            }
            if fitting.len() > 1 {
                let found = fitting.into_iter().map(|(_, tower)| tower.path).collect();
                return Err(Error::SeveralTowers { model: path.into(), found });
            }
            if let Some((merged, tower)) = fitting.pop() {
                *config = merged;
                let name = name_of(&tower.path);
                let notice = format!("the vision tower is {name}, which lies next to the model");
                return Ok(FoundTower { tower: Some(tower), notice: Some(notice) });
            }
            let notice = (!left_out.is_empty()).then(|| {
                let reasons = left_out.join("; ");
                format!("no vision tower next to the model fits it, so only text is read: {reasons}")
            });
            Ok(FoundTower { tower: None, notice })
        }
    }
}

/// The config with the tower, checked.
fn with_tower(config: &Value, text: &GgufFile, tower: &GgufFile) -> keel_models::Result<Value> {
    let mut config = config.clone();
    add_tower(&mut config, text, tower)?;
    vision::read_vision(&config)?;
    processor(text, tower)?;
    Ok(config)
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().display().to_string()
}

/// The files in the folder of a model that may be its tower. A folder that cannot be listed has none.
fn candidates(model: &Path) -> Vec<PathBuf> {
    let folder = model.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let is_custom = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default();
        let text = name.to_string_lossy();
        text.to_ascii_lowercase().contains(CUSTOM)
            && name != model.file_name().unwrap_or_default()
            && PartName::parse(&text).is_none_or(|part| part.number == 1)
    };
    let mut found: Vec<PathBuf> = entries.filter(is_custom).filter(|path| super::is_gguf(path)).collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tower_in_parts_is_one_candidate() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let model = folder.path().join("m.gguf");
        let names = [
            "m.gguf",
            "mmproj-00001-of-00002.gguf",
            "mmproj-00002-of-00002.gguf",
            "mmproj-F16.gguf",
            "mmproj.txt",
        ];
        for name in names {
            std::fs::write(folder.path().join(name), "").expect("writable");
        }
        let found: Vec<String> = candidates(&model).iter().map(|path| name_of(path)).collect();
        assert_eq!(found, [names[1], names[3]]);
    }
}
