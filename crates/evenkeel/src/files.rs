//! The files of a model: a checkpoint folder, a GGUF file, or the built-in model.

mod built_in;
pub mod gguf_text;
mod tower_file;

use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use keel_array::{Compute, MemoryReport};
use keel_models::gguf::GgufParameters;
use keel_models::loading::{CheckpointParameters, Parameters};
use keel_models::{HybridConfig, ModelError};
use keel_text::TextFiles;
use keel_weights::gguf::GgufFile;
use keel_weights::{Checkpoint, TensorSource};
use serde_json::Value;

use crate::loading::PlacedLoad;
use crate::{Error, LoadOptions, Result};

pub use tower_file::{OpenTower, TowerFile};

/// The files that hold the weights. They are mapped into memory, not read.
///
/// ```
/// use evenkeel::{ModelFiles, WeightFiles};
/// assert!(matches!(ModelFiles::built_in()?.weights, WeightFiles::Checkpoint(_)));
/// # Ok::<(), evenkeel::Error>(())
/// ```
pub enum WeightFiles {
    /// A folder with config.json, safetensors, and further files.
    Checkpoint(Checkpoint),
    /// A GGUF file or its parts, which contain everything but the vision tower.
    Gguf(GgufFile),
}

/// An opened model: its config is read, its weights are not.
///
/// ```
/// let files = evenkeel::ModelFiles::built_in()?;
/// println!("{} has {} layers", files.path.display(), files.config.layers.len());
/// assert!(files.is_built_in && files.tower.is_none());
/// # Ok::<(), evenkeel::Error>(())
/// ```
pub struct ModelFiles {
    /// The model's path, as it was opened. For the built-in model it is a name, not a real path.
    pub path: PathBuf,
    /// Whether it is the built-in model.
    pub is_built_in: bool,
    /// The files of the weights.
    pub weights: WeightFiles,
    /// The config. For a GGUF file it is made from the metadata.
    pub json: Value,
    /// The numbers of the config.
    pub config: HybridConfig,
    /// The vision tower of a GGUF model.
    pub tower: Option<OpenTower>,
    /// Which file was taken or left as the vision tower, if it was looked for and one was there.
    pub tower_notice: Option<String>,
}

impl ModelFiles {
    /// Opens a checkpoint folder, a weights file or a GGUF file. The vision tower of a GGUF file may lie next to it:
    /// see [`TowerFile::NextToModel`].
    ///
    /// # Errors
    /// There is no such model, its config is incomplete, or its architecture is unknown; several files next to a GGUF
    /// file may be its vision tower.
    ///
    /// ```
    /// let files = evenkeel::ModelFiles::open("../../models/demo")?; // or "file.gguf"
    /// assert_eq!(files.config.vocab, evenkeel::ModelFiles::built_in()?.config.vocab);
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn open(path: impl AsRef<Path>) -> Result<ModelFiles> {
        ModelFiles::open_with(path, &TowerFile::NextToModel)
    }

    /// As [`ModelFiles::open`], with the vision tower of a GGUF file from this file.
    ///
    /// # Errors
    /// As [`ModelFiles::open`]; a tower that does not fit the model, or is given for a model that is no GGUF file.
    ///
    /// ```no_run
    /// use evenkeel::{ModelFiles, TowerFile};
    /// let files = ModelFiles::open_with("Qwen3.5-4B-Q8_0.gguf", &TowerFile::None)?;
    /// assert!(files.tower.is_none(), "it reads text alone");
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn open_with(path: impl AsRef<Path>, tower: &TowerFile) -> Result<ModelFiles> {
        let path = path.as_ref();
        if !path.exists() {
            return Err(Error::NoSuchModel { path: path.into() });
        }
        let unusable = |reason: ModelError| Error::Unusable { path: path.into(), reason: Box::new(reason) };
        if is_gguf(path) {
            let file = GgufFile::open(path)?;
            let mut json = keel_models::gguf::config(&file).map_err(unusable)?;
            let found = tower_file::open(path, &file, &mut json, tower)?;
            let config = keel_models::read_config(&json).map_err(unusable)?;
            return Ok(ModelFiles {
                path: path.into(),
                is_built_in: false,
                weights: WeightFiles::Gguf(file),
                json,
                config,
                tower: found.tower,
                tower_notice: found.notice,
            });
        }
        if let TowerFile::At(_) = tower {
            return Err(Error::NoTowerFile { path: path.into() });
        }
        let checkpoint = Checkpoint::open(path)?;
        let json = checkpoint.config().clone();
        let config = keel_models::read_config_of(&json, &CheckpointParameters(&checkpoint));
        let config = config.map_err(unusable)?;
        Ok(ModelFiles {
            path: path.into(),
            is_built_in: false,
            weights: WeightFiles::Checkpoint(checkpoint),
            json,
            config,
            tower: None,
            tower_notice: None,
        })
    }

    /// The built-in model: a small model that tells stories. It is part of the program, so it is always there.
    ///
    /// # Errors
    /// Only if the program was built from a broken model.
    ///
    /// ```
    /// assert!(evenkeel::ModelFiles::built_in()?.has_tokenizer());
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn built_in() -> Result<ModelFiles> {
        let checkpoint = built_in::checkpoint()?;
        let json = checkpoint.config().clone();
        let config = keel_models::read_config(&json)?;
        let path = checkpoint.folder().to_path_buf();
        Ok(ModelFiles {
            path,
            is_built_in: true,
            weights: WeightFiles::Checkpoint(checkpoint),
            json,
            config,
            tower: None,
            tower_notice: None,
        })
    }

    /// The parameters.
    ///
    /// ```
    /// assert!(evenkeel::ModelFiles::built_in()?.parameters().contains("mtp.fc.weight"));
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn parameters(&self) -> Box<dyn Parameters + '_> {
        match &self.weights {
            WeightFiles::Checkpoint(checkpoint) => Box::new(CheckpointParameters(checkpoint)),
            WeightFiles::Gguf(file) => {
                let parameters = GgufParameters::new(file, &self.config);
                Box::new(match &self.tower {
                    Some(tower) => parameters.with_tower(&tower.file),
                    None => parameters,
                })
            }
        }
    }

    /// The tensors in the form of the files.
    ///
    /// ```
    /// assert!(evenkeel::ModelFiles::built_in()?.tensors().names().count() > 10);
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn tensors(&self) -> &dyn TensorSource {
        match &self.weights {
            WeightFiles::Checkpoint(checkpoint) => checkpoint,
            WeightFiles::Gguf(file) => file,
        }
    }

    /// Whether any linear layer is quantised.
    ///
    /// ```
    /// assert!(evenkeel::ModelFiles::built_in()?.is_quantized());
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn is_quantized(&self) -> bool {
        match &self.weights {
            WeightFiles::Checkpoint(checkpoint) => checkpoint.quantization().is_some(),
            WeightFiles::Gguf(file) => {
                file.entries().any(|(_, entry)| entry.kind.is_ok_and(|kind| kind.dtype().is_none()))
            }
        }
    }

    /// Whether there is a tokenizer.
    ///
    /// ```
    /// assert!(evenkeel::ModelFiles::built_in()?.has_tokenizer());
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn has_tokenizer(&self) -> bool {
        match &self.weights {
            WeightFiles::Checkpoint(_) if self.is_built_in => true,
            WeightFiles::Checkpoint(checkpoint) => checkpoint.folder().join("tokenizer.json").exists(),
            WeightFiles::Gguf(file) => gguf_text::has_vocabulary(file),
        }
    }

    /// The tokenizer and its settings.
    ///
    /// # Errors
    /// The tokenizer is missing, or its kind is not supported.
    ///
    /// ```
    /// use evenkeel::{ModelFiles, text::Tokenizer};
    /// let tokenizer = Tokenizer::new(&ModelFiles::built_in()?.text_files()?)?;
    /// assert!(!tokenizer.encode("Once upon a time", false)?.is_empty());
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn text_files(&self) -> Result<TextFiles<'static>> {
        match &self.weights {
            WeightFiles::Checkpoint(_) if self.is_built_in => Ok(built_in::text_files()),
            WeightFiles::Checkpoint(checkpoint) => Ok(TextFiles::read(checkpoint.folder())?),
            WeightFiles::Gguf(file) => gguf_text::text_files(file, self.path.display().to_string()),
        }
    }

    /// Plans the bytes of every category for these options, on the device that [`crate::Model::load`] takes. No weight
    /// is read.
    ///
    /// # Errors
    /// Options out of range; a context longer than the model's.
    ///
    /// ```
    /// use evenkeel::{LoadOptions, ModelFiles, array::Category};
    /// let planned = ModelFiles::built_in()?.plan(&LoadOptions::default())?;
    /// assert!(planned.get(Category::Weights) > 0);
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn plan(&self, options: &LoadOptions) -> Result<MemoryReport> {
        Ok(PlacedLoad::new(self, options)?.planned)
    }

    /// Identifies the contents of caches of this model: by its config, its opened files with their sizes and times, and
    /// the arithmetic. Other files of the folder have no influence.
    ///
    /// # Errors
    /// A file cannot be read.
    ///
    /// ```
    /// use evenkeel::{ModelFiles, array::Compute};
    /// let files = ModelFiles::built_in()?;
    /// assert_ne!(files.identity(Compute::Auto)?, files.identity(Compute::F32)?);
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn identity(&self, compute: Compute) -> Result<String> {
        if self.is_built_in {
            return Ok(format!("{} {compute:?}", built_in::identity()));
        }
        let describe =
            |path: PathBuf| describe(&path).map_err(|error| Error::Read { path, reason: error.to_string() });
        let files = self.opened().into_iter().map(describe).collect::<Result<Vec<_>>>()?;
        Ok(format!("{} {compute:?} {}", self.json, files.join(" ")))
    }

    /// The files of the weights, and the index of their shards. The config is not among them, because the identity has
    /// its text.
    fn opened(&self) -> Vec<PathBuf> {
        let index = self.path.join("model.safetensors.index.json");
        let named = if self.path.is_dir() {
            Some(index).filter(|index| index.exists())
        } else {
            Some(self.path.clone())
        };
        let mut paths: Vec<PathBuf> = named.into_iter().collect();
        match &self.weights {
            WeightFiles::Checkpoint(checkpoint) => {
                paths.extend(checkpoint.files().iter().map(|file| file.path().to_path_buf()));
            }
            WeightFiles::Gguf(file) => paths.extend(file.paths().map(Path::to_path_buf)),
        }
        let tower = self.tower.iter().flat_map(|tower| tower.file.paths());
        paths.extend(tower.map(Path::to_path_buf));
        paths.sort();
        paths.dedup();
        paths
    }
}

/// A file's name, size and time.
fn describe(path: &Path) -> std::io::Result<String> {
    let facts = std::fs::metadata(path)?;
    let changed = facts.modified()?.duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    Ok(format!("{}:{}:{changed}", path.file_name().unwrap_or_default().display(), facts.len()))
}

/// Whether a path is a GGUF file.
///
/// ```
/// assert!(!evenkeel::is_gguf("no/such/file.gguf".as_ref()));
/// ```
pub fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf")) && path.is_file()
}

/// Whether a tensor belongs to the vision part of a checkpoint.
///
/// ```
/// assert!(evenkeel::is_vision("model.visual.blocks.0.norm1.weight"));
/// ```
pub fn is_vision(name: &str) -> bool {
    name.split('.').any(|part| part == "visual" || part.starts_with("vision"))
}
