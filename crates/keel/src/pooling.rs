//! The pooling of embeddings, as the files of sentence-transformers name it.
//!
//! `modules.json` lists the modules in their order: the model, the pooling (whose folder has a `config.json`), the
//! norm.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use evenkeel::{ModelFiles, WeightFiles};
use keel_weights::read_regular;
use serde_json::Value;

use crate::args::Pooling;

const MODULES: &str = "modules.json";
/// Where the pooling is, if no list of modules says so.
const POOLING_FOLDER: &str = "1_Pooling";
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The pooling that a model's files name; `None` if there are no such files.
///
/// # Errors
/// A file is broken, or asks for an unsupported module or pooling.
pub fn of_model(model: &ModelFiles) -> Result<Option<Pooling>> {
    match &model.weights {
        WeightFiles::Checkpoint(checkpoint) => of_folder(checkpoint.folder()),
        WeightFiles::Gguf(_) => Ok(None),
    }
}

fn of_folder(folder: &Path) -> Result<Option<Pooling>> {
    let Some(modules) = json(&folder.join(MODULES))? else {
        return pooling_of(&folder.join(POOLING_FOLDER));
    };
    let modules = modules.as_array().with_context(|| format!("{MODULES} is no list"))?;
    let mut pooling = None;
    for module in modules {
        let (kind, path) = (module["type"].as_str().unwrap_or_default(), module["path"].as_str());
        match kind.rsplit('.').next().unwrap_or_default() {
            "Transformer" | "Normalize" => {}
            "Pooling" => {
                let path = Path::new(path.unwrap_or(POOLING_FOLDER));
                if !is_inside(path) {
                    bail!("{MODULES} names a pooling outside the folder: {}", path.display());
                }
                let of_module = pooling_of(&folder.join(path))?;
                let missing = || format!("{MODULES} names {}, whose config.json is missing", path.display());
                pooling = Some(of_module.with_context(missing)?);
            }
            _ => bail!("{MODULES} has a module {kind:?}; Transformer, Pooling and Normalize are supported"),
        }
    }
    Ok(pooling)
}

/// Whether a path leads to a place below the folder that it is relative to.
fn is_inside(path: &Path) -> bool {
    path.components().all(|part| matches!(part, std::path::Component::Normal(_)))
}

/// Copies the files that say how embeddings are pooled. They are in folders of their own below the model's. A list of
/// modules that cannot be read names none.
///
/// # Errors
/// A file cannot be read or written.
pub fn copy(source: &Path, target: &Path) -> Result<()> {
    let modules = json(&source.join(MODULES)).ok().flatten().unwrap_or_default();
    let is_pooling = |module: &&Value| module["type"].as_str().is_some_and(|kind| kind.ends_with("Pooling"));
    let named = modules.as_array().into_iter().flatten().filter(is_pooling);
    let named = named.filter_map(|module| module["path"].as_str()).map(PathBuf::from);
    let named = named.filter(|path| !path.as_os_str().is_empty() && is_inside(path));
    for folder in named.chain([POOLING_FOLDER.into()]) {
        let config = source.join(&folder).join("config.json");
        if !config.is_file() {
            continue;
        }
        let bytes = read_regular(&config, FILE_BYTES_MAX)
            .with_context(|| format!("cannot read {}", config.display()))?;
        let folder = target.join(folder);
        let copy = folder.join("config.json");
        let written = std::fs::create_dir_all(&folder).and_then(|()| std::fs::write(&copy, bytes));
        written.with_context(|| format!("cannot write {}", copy.display()))?;
    }
    Ok(())
}

fn pooling_of(folder: &Path) -> Result<Option<Pooling>> {
    let path = folder.join("config.json");
    let Some(config) = json(&path)? else { return Ok(None) };
    let shown = path.display();
    let mode = match config["pooling_mode"].as_str() {
        Some(mode) => mode.to_string(),
        None => {
            let fields = config.as_object().with_context(|| format!("{shown} is no object"))?;
            let chosen = fields
                .iter()
                .filter(|(key, value)| key.starts_with("pooling_mode_") && value.as_bool() == Some(true));
            let chosen: Vec<&str> = chosen.map(|(key, _)| &key["pooling_mode_".len()..]).collect();
            chosen.join(" and ")
        }
    };
    match &mode[..] {
        "lasttoken" => Ok(Some(Pooling::Last)),
        "mean_tokens" | "mean" => Ok(Some(Pooling::Mean)),
        "" => bail!("{shown} names no pooling"),
        other => bail!("{shown} asks for the pooling {other}; the last token and the mean are supported"),
    }
}

/// A file's JSON; `None` if there is no such file.
fn json(path: &Path) -> Result<Option<Value>> {
    if !path.try_exists().unwrap_or(false) {
        return Ok(None);
    }
    let bytes =
        read_regular(path, FILE_BYTES_MAX).with_context(|| format!("cannot read {}", path.display()))?;
    let json = serde_json::from_slice(&bytes);
    Ok(Some(json.with_context(|| format!("{} is no JSON", path.display()))?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(modules: Option<&str>, config: Option<&str>) -> Result<Option<Pooling>> {
        let folder = tempfile::tempdir().expect("a folder");
        if let Some(modules) = modules {
            std::fs::write(folder.path().join(MODULES), modules).expect("written");
        }
        if let Some(config) = config {
            std::fs::create_dir(folder.path().join(POOLING_FOLDER)).expect("made");
            std::fs::write(folder.path().join(POOLING_FOLDER).join("config.json"), config).expect("written");
        }
        of_folder(folder.path())
    }

    const MODULES_JSON: &str = r#"[{"path": "", "type": "sentence_transformers.models.Transformer"},
        {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}]"#;

    #[test]
    fn the_pooling_is_found() {
        let last =
            r#"{"pooling_mode_mean_tokens": false, "pooling_mode_lasttoken": true, "include_prompt": true}"#;
        let mean = r#"{"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": false}"#;
        assert_eq!(read(Some(MODULES_JSON), Some(last)).expect("sound"), Some(Pooling::Last));
        assert_eq!(read(Some(MODULES_JSON), Some(mean)).expect("sound"), Some(Pooling::Mean));
        assert_eq!(read(None, Some(r#"{"pooling_mode": "mean"}"#)).expect("sound"), Some(Pooling::Mean));
        assert_eq!(read(None, None).expect("sound"), None);
    }

    #[test]
    fn what_is_not_supported_is_named() {
        let dense = MODULES_JSON.replace("models.Normalize", "models.Dense");
        let outside = MODULES_JSON.replace("\"1_Pooling\"", "\"../other\"");
        for (modules, config, part) in [
            (None, Some(r#"{"pooling_mode_cls_token": true}"#), "cls_token"),
            (
                None,
                Some(r#"{"pooling_mode_mean_tokens": true, "pooling_mode_lasttoken": true}"#),
                "mean_tokens and lasttoken",
            ),
            (None, Some("{}"), "no pooling"),
            (None, Some("[]"), "no object"),
            (None, Some("{"), "no JSON"),
            (Some(&dense[..]), Some(r#"{"pooling_mode": "mean"}"#), "Dense"),
            (Some(&outside[..]), None, "outside the folder"),
            (Some("{}"), None, "no list"),
            (Some(MODULES_JSON), None, "names 1_Pooling, whose config.json is missing"),
        ] {
            let message = format!("{:#}", read(modules, config).expect_err("refused"));
            assert!(message.contains(part), "{message}");
        }
    }
}
