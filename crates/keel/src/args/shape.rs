//! Options for a shape with random weights: a config without a checkpoint.

use std::path::Path;

use anyhow::{Context, Result};
use clap::Args;
use keel_array::{DType, WeightFormat};
use keel_models::SHAPE_NAMES;
use keel_models::loading::RandomParameters;
use keel_weights::affine::{AFFINE_BITS, AFFINE_GROUP_SIZES};
use keel_weights::gguf::GgmlType;
use keel_weights::{AffineFormat, read_regular};
use serde_json::Value;

use super::{Subject, quoted};
use crate::failure::usage;

/// Largest size of a config that `--shape` reads.
const CONFIG_BYTES_MAX: u64 = 1 << 20;
const HEAD_LAYERS: &str = "mtp_num_hidden_layers";

/// A shape, and the format of its random weights.
#[derive(Clone, Debug, Args)]
pub struct ShapeArgs {
    /// A published shape, or the path of a config.json, with random weights: no checkpoint is needed.
    #[arg(long, value_name = "NAME", conflicts_with = "model")]
    shape: Option<String>,
    /// Bits per random weight: 2, 3, 4, 5, 6 or 8. [default: 4]
    #[arg(long, value_name = "N", requires = "shape")]
    bits: Option<usize>,
    /// Number of random weights that share a scale: 32, 64 or 128. [default: 64]
    #[arg(long, value_name = "N", requires = "shape")]
    group_size: Option<usize>,
    /// Random weights of this type instead: bf16, f16, f32, or one of GGUF's block codings such as Q4_K.
    #[arg(long, value_name = "TYPE", requires = "shape", conflicts_with_all = ["bits", "group_size"])]
    dtype: Option<String>,
}

impl ShapeArgs {
    /// The name or path, if a shape is asked for.
    pub fn name(&self) -> Option<&str> {
        self.shape.as_deref()
    }

    /// The options that name the shape, with a space before them; empty without a shape.
    pub fn flags(&self) -> String {
        let Some(shape) = &self.shape else { return String::new() };
        let number = |name: &str, n: Option<usize>| n.map_or(String::new(), |n| format!(" --{name} {n}"));
        let dtype = self.dtype.as_ref().map_or(String::new(), |dtype| format!(" --dtype {dtype}"));
        let (bits, group_size) = (number("bits", self.bits), number("group-size", self.group_size));
        format!(" --shape {}{bits}{group_size}{dtype}", quoted(shape))
    }

    /// The same shape in other formats: dense first, then in fewer and fewer bits. If the format is given, only the
    /// shape itself.
    pub fn in_other_formats(&self) -> Vec<ShapeArgs> {
        if self.dtype.is_some() || self.bits.is_some() {
            return vec![self.clone()];
        }
        let dense = ShapeArgs { dtype: Some("bf16".into()), group_size: None, ..self.clone() };
        let quantised = [8, 6, 4, 3].map(|bits| ShapeArgs { bits: Some(bits), ..self.clone() });
        [dense].into_iter().chain(quantised).collect()
    }

    /// The shape as a subject. With `drafts` it includes its multi-token-prediction head, if any.
    ///
    /// # Errors
    /// There is no such shape or format.
    pub fn subject(&self, drafts: bool) -> Result<Subject<'static>> {
        let name = self.shape.clone().unwrap_or_default();
        let json = config(&name, drafts)?;
        let format = self.random_format()?;
        Ok(Subject {
            config: keel_models::read_config(&json).with_context(|| format!("--shape {name}"))?,
            name,
            json,
            parameters: Box::new(RandomParameters { format }),
            quantised: !matches!(format, WeightFormat::Dense(_)),
            with_tower: false,
            pooling: None,
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

/// The config of a published shape, or of a file whose name ends in `.json`.
fn config(name: &str, drafts: bool) -> Result<Value> {
    let path = Path::new(name);
    if path.extension().is_some_and(|extension| extension == "json") {
        return config_of_file(path, drafts).with_context(|| format!("--shape {name}"));
    }
    let with_head = if drafts { keel_models::shape_with_mtp_head(name) } else { None };
    with_head.or_else(|| keel_models::shape(name)).ok_or_else(|| {
        let names = SHAPE_NAMES.join(", ");
        usage(format!("--shape {name} is not known; there are {names}, and paths of a config.json"))
    })
}

fn config_of_file(path: &Path, drafts: bool) -> Result<Value> {
    let mut json: Value = serde_json::from_slice(&read_regular(path, CONFIG_BYTES_MAX)?)?;
    // A checkpoint with a vision tower has the numbers of its text model in an object of their own.
    for at in ["", "/text_config"] {
        if let Some(layers) = json.pointer_mut(at).and_then(|fields| fields.get_mut(HEAD_LAYERS))
            && !drafts
        {
            *layers = 0.into();
        }
    }
    Ok(json)
}

/// The affine format with these numbers.
///
/// # Errors
/// There is no such format.
pub fn affine_format(bits: usize, group_size: usize) -> Result<AffineFormat> {
    AffineFormat::new(bits, group_size).ok_or_else(|| {
        usage(format!(
            "{bits} bits in groups of {group_size} are not supported: bits are one of {AFFINE_BITS:?}, group sizes one of \
             {AFFINE_GROUP_SIZES:?}"
        ))
    })
}
