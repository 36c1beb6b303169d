//! Options for the subject of a plan or benchmark: a model on disk, or a shape with random weights.

use anyhow::Result;
use clap::Args;
use keel_array::{DType, WeightFormat};
use keel_models::loading::{Parameters, RandomParameters};
use keel_models::{HybridConfig, SHAPE_NAMES};
use keel_weights::AffineFormat;
use keel_weights::affine::{AFFINE_BITS, AFFINE_GROUP_SIZES};
use keel_weights::gguf::GgmlType;
use serde_json::Value;

use crate::failure::usage;
use crate::source::{self, Model};

/// A model, or a shape.
#[derive(Clone, Debug, Args)]
pub struct SubjectArgs {
    /// A folder, a weights file or a hub name; without it and --shape, the built-in model.
    #[arg(long, short, value_name = "MODEL")]
    model: Option<String>,
    /// A published shape, with random weights: no checkpoint is needed.
    #[arg(long, value_name = "NAME", conflicts_with = "model")]
    shape: Option<String>,
    /// Bits per random weight: 2, 3, 4, 5, 6 or 8. [default: 4]
    #[arg(long, value_name = "N", requires = "shape")]
    bits: Option<usize>,
    /// Random weights that share a scale: 32, 64 or 128. [default: 64]
    #[arg(long, value_name = "N", requires = "shape")]
    group_size: Option<usize>,
    /// Random weights of this type instead: bf16, f16, f32, or one of GGUF's block codings such as Q4_K.
    #[arg(long, value_name = "TYPE", requires = "shape", conflicts_with_all = ["bits", "group_size"])]
    dtype: Option<String>,
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
    pub sees: bool,
}

impl<'a> Subject<'a> {
    /// The subject for a model on disk.
    pub fn of(model: &'a Model) -> Subject<'a> {
        Subject {
            name: model.path.display().to_string(),
            config: model.config.clone(),
            json: model.json.clone(),
            parameters: model.parameters(),
            quantised: model.is_quantised(),
            sees: crate::sight::can_see(model),
        }
    }
}

impl SubjectArgs {
    /// The options that name the subject, with a space before them. Empty for the built-in model.
    pub fn flags(&self) -> String {
        match (&self.model, &self.shape) {
            (Some(model), None) => format!(" --model {}", quoted(model)),
            (_, Some(shape)) => {
                let number =
                    |name: &str, n: Option<usize>| n.map_or(String::new(), |n| format!(" --{name} {n}"));
                let dtype = self.dtype.as_ref().map_or(String::new(), |dtype| format!(" --dtype {dtype}"));
                let (bits, group_size) = (number("bits", self.bits), number("group-size", self.group_size));
                format!(" --shape {shape}{bits}{group_size}{dtype}")
            }
            (None, None) => String::new(),
        }
    }

    /// The same shape in other formats: dense first, then in fewer and fewer bits. If the format is given, or the
    /// subject is a model, only the subject itself.
    pub fn in_other_formats(&self) -> Vec<SubjectArgs> {
        if self.shape.is_none() || self.dtype.is_some() || self.bits.is_some() {
            return vec![self.clone()];
        }
        let dense = SubjectArgs { dtype: Some("bf16".into()), group_size: None, ..self.clone() };
        let quantised = [8, 6, 4, 3].map(|bits| SubjectArgs { bits: Some(bits), ..self.clone() });
        [dense].into_iter().chain(quantised).collect()
    }

    /// Opens the model. Returns `None` for a shape.
    ///
    /// # Errors
    /// As [`source::open`].
    pub fn open(&self) -> Result<Option<Model>> {
        if self.shape.is_some() { Ok(None) } else { source::open(self.model.as_deref()).map(Some) }
    }

    /// The subject for the opened model, or for the shape. With `drafts` the shape includes its multi-token-prediction
    /// head, if any.
    ///
    /// # Errors
    /// There is no such shape or format.
    pub fn subject<'a>(&self, model: Option<&'a Model>, drafts: bool) -> Result<Subject<'a>> {
        if let Some(model) = model {
            return Ok(Subject::of(model));
        }
        self.shape_of(drafts)
    }

    /// The shape, without its multi-token-prediction head.
    ///
    /// # Errors
    /// There is no such shape or format.
    pub fn shape_subject(&self) -> Result<Subject<'static>> {
        self.shape_of(false)
    }

    fn shape_of(&self, drafts: bool) -> Result<Subject<'static>> {
        let name = self.shape.clone().unwrap_or_default();
        let with_head = if drafts { keel_models::shape_with_head(&name) } else { None };
        let Some(json) = with_head.or_else(|| keel_models::shape(&name)) else {
            return Err(usage(format!("--shape {name} is not known; there are {}", SHAPE_NAMES.join(", "))));
        };
        let format = self.random_format()?;
        Ok(Subject {
            name,
            config: keel_models::read_config(&json)?,
            json,
            parameters: Box::new(RandomParameters { format }),
            quantised: !matches!(format, WeightFormat::Dense(_)),
            sees: false,
        })
    }

    fn random_format(&self) -> Result<WeightFormat> {
        if let Some(name) = &self.dtype {
            return match GgmlType::from_name(name) {
                Some(GgmlType::Plain(dtype @ (DType::BF16 | DType::F16 | DType::F32))) => {
                    Ok(WeightFormat::Dense(dtype))
                }
                Some(GgmlType::Blocks(format)) => Ok(WeightFormat::Blocks(format)),
                _ => Err(usage(format!(
                    "--dtype {name} is not known; there are bf16, f16, f32 and GGUF's block codings"
                ))),
            };
        }
        let (bits, group_size) = (self.bits.unwrap_or(4), self.group_size.unwrap_or(64));
        affine_format(bits, group_size)?;
        let (bits, group_size) = (bits as u8, group_size as u16);
        Ok(WeightFormat::Affine { bits, group_size, scale_dtype: DType::BF16 })
    }
}

/// The affine format with these numbers.
///
/// # Errors
/// There is no such format.
pub fn affine_format(bits: usize, group_size: usize) -> Result<AffineFormat> {
    AffineFormat::new(bits, group_size).ok_or_else(|| {
        usage(format!(
            "{bits} bits in groups of {group_size} do not exist: bits are one of {AFFINE_BITS:?}, group sizes one of \
             {AFFINE_GROUP_SIZES:?}"
        ))
    })
}

/// Quotes a word for a shell, if necessary.
pub fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=@+,".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.into();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}
