//! Opens the checkpoint that `--model` names.

pub mod built_in;
pub mod gguf_text;
#[cfg(feature = "hub")]
pub mod hub;
// Without the feature only the form of a name matters.
#[cfg_attr(not(feature = "hub"), allow(dead_code))]
mod hub_name;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use hub_name::HubName;
use keel_models::HybridConfig;
use keel_models::gguf::GgufParameters;
use keel_models::loading::{CheckpointParameters, Parameters};
use keel_text::TextFiles;
use keel_weights::gguf::GgufFile;
use keel_weights::{Checkpoint, TensorSource};
use serde_json::Value;

/// The files of a model. Weights are mapped into memory, not read.
pub enum ModelFiles {
    /// A folder with config.json, safetensors, and further files.
    Checkpoint(Checkpoint),
    /// A GGUF file, which contains everything.
    Gguf(GgufFile),
}

/// A model on disk, or the built-in model.
pub struct Model {
    /// The model's path. For the built-in model it is a name, not a real path.
    pub path: PathBuf,
    /// Whether it is the built-in model.
    pub is_built_in: bool,
    /// The files.
    pub files: ModelFiles,
    /// The config. For a GGUF file it is made from the metadata.
    pub json: Value,
    /// The numbers of the config.
    pub config: HybridConfig,
}

impl Model {
    /// The parameters.
    pub fn parameters(&self) -> Box<dyn Parameters + '_> {
        match &self.files {
            ModelFiles::Checkpoint(checkpoint) => Box::new(CheckpointParameters(checkpoint)),
            ModelFiles::Gguf(file) => Box::new(GgufParameters::new(file, &self.config)),
        }
    }

    /// The tensors in the form of the files.
    pub fn tensors(&self) -> &dyn TensorSource {
        match &self.files {
            ModelFiles::Checkpoint(checkpoint) => checkpoint,
            ModelFiles::Gguf(file) => file,
        }
    }

    /// Whether any linear layer is quantised.
    pub fn is_quantised(&self) -> bool {
        match &self.files {
            ModelFiles::Checkpoint(checkpoint) => checkpoint.quantization().is_some(),
            ModelFiles::Gguf(file) => file
                .header()
                .tensors()
                .values()
                .any(|entry| entry.kind.is_ok_and(|kind| kind.dtype().is_none())),
        }
    }

    /// Whether there is a tokenizer.
    pub fn has_tokenizer(&self) -> bool {
        match &self.files {
            ModelFiles::Checkpoint(_) if self.is_built_in => true,
            ModelFiles::Checkpoint(checkpoint) => checkpoint.folder().join("tokenizer.json").exists(),
            ModelFiles::Gguf(file) => gguf_text::has_vocabulary(file),
        }
    }

    /// The tokenizer and its settings.
    ///
    /// # Errors
    /// The tokenizer is missing, or its kind is not supported.
    pub fn text_files(&self) -> Result<TextFiles<'static>> {
        match &self.files {
            ModelFiles::Checkpoint(_) if self.is_built_in => Ok(built_in::text_files()),
            ModelFiles::Checkpoint(checkpoint) => Ok(TextFiles::read(checkpoint.folder())?),
            ModelFiles::Gguf(file) => gguf_text::text_files(file, self.path.display().to_string()),
        }
    }
}

/// Opens a folder, a file or a hub name; without a name, the built-in model.
///
/// # Errors
/// There is no such model, its config is incomplete, or its architecture is unknown.
pub fn open(model: Option<&str>) -> Result<Model> {
    let Some(model) = model else { return open_built_in() };
    let path = locate(model)?;
    let (path, files, json) = if is_gguf(&path) {
        let file = GgufFile::open(&path)?;
        let json = keel_models::gguf::config(&file);
        (path.clone(), ModelFiles::Gguf(file), json.with_context(|| cannot_use(&path))?)
    } else {
        let checkpoint = Checkpoint::open(&path)?;
        let json = checkpoint.config().clone();
        (checkpoint.folder().to_path_buf(), ModelFiles::Checkpoint(checkpoint), json)
    };
    let config = match &files {
        ModelFiles::Checkpoint(checkpoint) => {
            keel_models::read_config_of(&json, &CheckpointParameters(checkpoint))
        }
        ModelFiles::Gguf(_) => keel_models::read_config(&json),
    };
    let config = config.with_context(|| cannot_use(&path))?;
    Ok(Model { path, is_built_in: false, files, json, config })
}

fn open_built_in() -> Result<Model> {
    let checkpoint = built_in::checkpoint()?;
    let json = checkpoint.config().clone();
    let config = keel_models::read_config(&json)?;
    let path = checkpoint.folder().to_path_buf();
    Ok(Model { path, is_built_in: true, files: ModelFiles::Checkpoint(checkpoint), json, config })
}

fn cannot_use(path: &Path) -> String {
    format!("cannot use {}", path.display())
}

/// Whether a path is a GGUF file.
pub fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf")) && path.is_file()
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
