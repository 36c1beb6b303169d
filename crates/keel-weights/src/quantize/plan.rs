//! The conversion of each tensor, planned from headers only.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::experts::Experts;
use super::recipe::{QuantizeRecipe, is_tail, module_of};
use crate::{AffineFormat, Result, TensorInfo, TensorSpec, WeightsError, gguf::GgmlType, part_of_mtp_head};
use keel_array::DType;

/// The conversion of one tensor of the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TensorConversion {
    /// The source's tensor.
    pub source: TensorSpec,
    /// The outputs of its rows.
    pub targets: Vec<Target>,
    /// Rows that a target takes before the next target's turn; 0 if the only target takes all.
    pub turn_rows: usize,
}

/// An output of rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// Rows are copied to this tensor, of the same type.
    Copy(String),
    /// Rows are checked for values that are not finite, and encoded in this tensor's type.
    Encode(String, GgmlType),
    /// Rows are quantised.
    Quantize {
        /// Codes, scales and biases, in this order.
        outputs: [String; 3],
        /// Bits and group size.
        format: AffineFormat,
    },
}

/// The whole conversion.
#[derive(Debug)]
pub(super) struct Conversion {
    /// In the order of the source's names. Matrices of one stack follow each other.
    pub tensors: Vec<TensorConversion>,
    /// The tensors of the output.
    pub outputs: Vec<TensorSpec>,
    /// The `quantization` section of config.json.
    pub section: Value,
    /// Matrices that stay dense because their rows are not whole groups.
    pub other_forms: usize,
}

impl Conversion {
    /// Copies every tensor. Floats with more than one dimension are converted to `dtype` if it is given.
    pub(super) fn dense(tensors: &[TensorSpec], dtype: Option<DType>) -> Conversion {
        let mut conversion =
            Conversion { tensors: Vec::new(), outputs: Vec::new(), section: Value::Null, other_forms: 0 };
        for source in tensors {
            let is_matrix = source.dtype.is_float() && source.shape.len() > 1;
            let dtype = dtype.filter(|_| is_matrix).unwrap_or(source.dtype);
            conversion.outputs.push(TensorSpec { dtype, ..source.clone() });
            let kind = (dtype != source.dtype).then_some(GgmlType::Plain(dtype));
            conversion.tensors.push(TensorConversion::whole(source, kind));
        }
        conversion
    }

    /// Quantises matrices by a recipe.
    pub(super) fn affine(tensors: &[TensorSpec], recipe: &QuantizeRecipe) -> Result<Conversion> {
        let experts = Experts::find(tensors);
        let mut conversion = Conversion {
            tensors: Vec::new(),
            outputs: Vec::new(),
            section: describe(recipe.format),
            other_forms: 0,
        };
        let mut overrides = Map::new();
        let mut unused: BTreeSet<&str> = recipe.overrides.keys().map(String::as_str).collect();
        let by_name: BTreeMap<&str, &TensorSpec> = tensors.iter().map(|t| (t.name.as_str(), t)).collect();
        for source in tensors {
            let (name, dtype) = (&source.name, source.dtype);
            let info = TensorInfo { dtype, shape: &source.shape };
            let Some(module) = module_of(name, &info) else {
                conversion.outputs.push(source.clone());
                conversion.tensors.push(TensorConversion::whole(source, None));
                continue;
            };
            let Some(stacks) = experts.stacks_of(name, module, &info) else { continue };
            let mut targets = Vec::new();
            for stack in &stacks.modules {
                unused.retain(|path| !is_tail(stack, path));
                let format = recipe.format_of(stack);
                let parts = format.and_then(|f| Some((f, outputs(stack, f, dtype, &stacks.shape)?)));
                targets.push(match parts {
                    Some((format, specs)) => {
                        let outputs = specs.each_ref().map(|spec| spec.name.clone());
                        conversion.outputs.extend(specs);
                        Target::Quantize { outputs, format }
                    }
                    None => {
                        conversion.other_forms += usize::from(format.is_some());
                        let name = if stacks.is_moved { format!("{stack}.weight") } else { name.clone() };
                        let shape = stacks.shape.clone();
                        conversion.outputs.push(TensorSpec { name: name.clone(), dtype, shape });
                        Target::Copy(name)
                    }
                });
                match format {
                    Some(format) if format != recipe.format => {
                        overrides.insert(stack.clone(), describe(format))
                    }
                    Some(_) => None,
                    None => overrides.insert(stack.clone(), Value::Bool(false)),
                };
            }
            let turn_rows = stacks.turn_rows;
            let convert = |name: &String| TensorConversion {
                source: by_name[name.as_str()].clone(),
                targets: targets.clone(),
                turn_rows,
            };
            conversion.tensors.extend(stacks.sources.iter().map(convert));
        }
        if let Some(path) = unused.first() {
            let problem = "an override names it, but no weight that can be quantised is called that".into();
            return Err(WeightsError::Module { module: (*path).into(), problem });
        }
        conversion.section["mode"] = "affine".into();
        let section = conversion.section.as_object_mut().expect("an object");
        let nested = tensors.iter().any(|tensor| tensor.name.starts_with(NESTED));
        for (module, value) in overrides {
            if let Some(alias) = name_in_mlx(&module).filter(|_| nested) {
                section.insert(alias, value.clone());
            }
            section.insert(module, value);
        }
        Ok(conversion)
    }
}

impl TensorConversion {
    /// Encodes all rows in this type, or copies them if there is none.
    pub(super) fn whole(source: &TensorSpec, kind: Option<GgmlType>) -> TensorConversion {
        let name = source.name.clone();
        let target = match kind {
            Some(kind) => Target::Encode(name, kind),
            None => Target::Copy(name),
        };
        TensorConversion { source: source.clone(), targets: vec![target], turn_rows: 0 }
    }
}

/// Hugging Face's prefix for the language model in a checkpoint with a vision tower.
const NESTED: &str = "model.language_model.";

/// mlx-lm's name for a module of such a model; it looks up overrides under this name. It does not load the MTP head.
fn name_in_mlx(module: &str) -> Option<String> {
    if part_of_mtp_head(module).is_some() {
        return None;
    }
    match module.strip_prefix(NESTED) {
        Some(rest) => Some(format!("language_model.model.{rest}")),
        None => Some(format!("language_model.{module}")),
    }
}

/// The three tensors of a module; `None` if its rows are not whole groups.
fn outputs(module: &str, format: AffineFormat, dtype: DType, shape: &[usize]) -> Option<[TensorSpec; 3]> {
    let (&cols, leading) = shape.split_last()?;
    let groups = format.groups(cols).filter(|&groups| groups > 0 && !leading.contains(&0))?;
    let spec = |part, dtype, last: usize| TensorSpec {
        name: format!("{module}.{part}"),
        dtype,
        shape: leading.iter().copied().chain([last]).collect(),
    };
    let words = format.packed_bytes(cols) / DType::U32.size();
    Some([spec("weight", DType::U32, words), spec("scales", dtype, groups), spec("biases", dtype, groups)])
}

fn describe(format: AffineFormat) -> Value {
    json!({"group_size": format.group_size(), "bits": format.bits()})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MTP_ROOTS;

    #[test]
    fn modules_of_the_mtp_head_have_no_name_in_mlx() {
        for root in MTP_ROOTS {
            assert_eq!(name_in_mlx(&format!("{root}fc")), None, "{root}");
        }
        let name = |module: &str| name_in_mlx(module).expect("mlx-lm loads it");
        assert_eq!(name("lm_head"), "language_model.lm_head");
        assert_eq!(name("model.language_model.layers.0.mlp.gate"), "language_model.model.layers.0.mlp.gate");
    }
}
