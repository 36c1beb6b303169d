//! Options for the subject of a plan or benchmark: a model on disk, or a shape with random weights.

use anyhow::Result;
use clap::Args;
use keel_models::HybridConfig;
use keel_models::loading::Parameters;
use serde_json::Value;

use super::{DeviceArgs, Pooling, ShapeArgs, TowerArgs};
use crate::failure::usage;
use crate::placed_model::PlacedModel;
use crate::source;
use evenkeel::ModelFiles;

/// A model, or a shape.
#[derive(Clone, Debug, Args)]
pub struct SubjectArgs {
    /// A folder, a weights file or a hub name. Without --model and --shape, the built-in model.
    #[arg(long, short, value_name = "MODEL")]
    pub model: Option<String>,
    #[command(flatten)]
    pub tower: TowerArgs,
    #[command(flatten)]
    shape: ShapeArgs,
}

/// The subject of a plan or benchmark.
pub struct Subject<'a> {
    /// The folder, or the name of the shape.
    pub name: String,
    /// The numbers of the config.
    pub config: HybridConfig,
    /// The config as JSON.
    pub json: Value,
    /// The weights.
    pub parameters: Box<dyn Parameters + 'a>,
    /// Whether linear layers are quantised, so that they multiply 8-bit integers.
    pub quantised: bool,
    /// Whether it has all that pictures need: a tower, and files that say how they are prepared.
    pub with_tower: bool,
    /// The pooling of embeddings that the model's files name.
    pub pooling: Option<Pooling>,
}

impl<'a> Subject<'a> {
    /// The subject for this device or these devices.
    pub fn on<'s>(&'s self, device: &'s DeviceArgs) -> PlacedModel<'s> {
        PlacedModel::new(device, &*self.parameters, &self.json)
    }

    /// The subject for a model on disk.
    pub fn of(model: &'a ModelFiles) -> Subject<'a> {
        Subject {
            name: model.path.display().to_string(),
            config: model.config.clone(),
            json: model.json.clone(),
            parameters: model.parameters(),
            quantised: model.is_quantized(),
            with_tower: crate::vision::takes_pictures(model),
            pooling: crate::pooling::of_model(model).unwrap_or_else(|error| {
                tracing::warn!("embeddings will be those of the last token (see --pooling): {error:#}");
                None
            }),
        }
    }
}

impl SubjectArgs {
    /// The options that name the subject, with a space before them. Empty for the built-in model.
    pub fn flags(&self) -> String {
        let Some(model) = &self.model else { return self.shape.flags() };
        format!(" --model {}{}", quoted(model), self.tower.flag())
    }

    /// The same shape in other formats: dense first, then in fewer and fewer bits. If the format is given, or the
    /// subject is a model, only the subject itself.
    pub fn in_other_formats(&self) -> Vec<SubjectArgs> {
        if self.shape.name().is_none() {
            return vec![self.clone()];
        }
        let of = |shape| SubjectArgs { model: None, tower: TowerArgs::default(), shape };
        self.shape.in_other_formats().into_iter().map(of).collect()
    }

    /// Opens the model. Returns `None` for a shape.
    ///
    /// # Errors
    /// As [`source::open`].
    pub fn open(&self) -> Result<Option<ModelFiles>> {
        if self.shape.name().is_some() {
            if self.tower.mmproj.is_some() {
                return Err(usage("--mmproj is for a GGUF model, and --shape has random weights"));
            }
            return Ok(None);
        }
        source::open(self.model.as_deref(), self.tower.mmproj.as_deref()).map(Some)
    }

    /// The subject for the opened model, or for the shape. With `drafts` the shape includes its multi-token-prediction
    /// head, if any.
    ///
    /// # Errors
    /// There is no such shape or format.
    pub fn subject<'a>(&self, model: Option<&'a ModelFiles>, drafts: bool) -> Result<Subject<'a>> {
        match model {
            Some(model) => Ok(Subject::of(model)),
            None => self.shape.subject(drafts),
        }
    }

    /// The shape, without its multi-token-prediction head.
    ///
    /// # Errors
    /// There is no such shape or format.
    pub fn shape_subject(&self) -> Result<Subject<'static>> {
        self.shape.subject(false)
    }
}

/// Quotes a word for a shell, if necessary.
pub fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=@+,".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.into();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}
