//! What becomes of each tensor, from headers alone.

use std::collections::BTreeSet;

use keel_array::DType;
use serde_json::{Map, Value, json};

use super::recipe::{QuantizeRecipe, is_tail, module_of};
use crate::{AffineFormat, Result, TensorSource, TensorSpec, WeightsError};

/// What becomes of one tensor of the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// It is copied.
    Copy(TensorSpec),
    /// It is quantised.
    Quantize {
        /// The source's tensor.
        name: String,
        /// Its codes, scales and biases, in this order.
        outputs: [TensorSpec; 3],
        /// Bits and group size.
        format: AffineFormat,
    },
}

/// The whole conversion.
#[derive(Debug)]
pub(super) struct Plan {
    /// In the order of the source's names.
    pub steps: Vec<Step>,
    /// The `quantization` section of config.json.
    pub section: Value,
}

impl Plan {
    pub(super) fn new(source: &dyn TensorSource, recipe: &QuantizeRecipe) -> Result<Plan> {
        let mut steps = Vec::new();
        let mut overrides = Map::new();
        let mut unused: BTreeSet<&str> = recipe.overrides.keys().map(String::as_str).collect();
        for name in source.names() {
            let info = source.info(name)?;
            let copy =
                || Step::Copy(TensorSpec { name: name.into(), dtype: info.dtype, shape: info.shape.into() });
            let Some(module) = module_of(name, &info) else {
                steps.push(copy());
                continue;
            };
            unused.retain(|path| !is_tail(module, path));
            let format = recipe.format_of(module);
            let quantize = |format| {
                let outputs = outputs(module, format, info.dtype, info.shape)?;
                Some(Step::Quantize { name: name.into(), outputs, format })
            };
            steps.push(format.and_then(quantize).unwrap_or_else(copy));
            match format {
                Some(format) if format != recipe.format => overrides.insert(module.into(), describe(format)),
                Some(_) => None,
                None => overrides.insert(module.into(), Value::Bool(false)),
            };
        }
        if let Some(path) = unused.first() {
            let problem = "an override names it, but no weight that can be quantised is called that".into();
            return Err(WeightsError::Module { module: (*path).into(), problem });
        }
        let mut section = describe(recipe.format);
        section["mode"] = "affine".into();
        section.as_object_mut().expect("an object").append(&mut overrides);
        Ok(Plan { steps, section })
    }
}

/// The three tensors of a module, or `None` if its rows are not whole groups.
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
