//! Presents a GGUF file as the tensors of a Hugging Face checkpoint, for writing one.

use std::collections::BTreeMap;
use std::ops::Range;

use keel_array::DType;
use keel_weights::gguf::GgufFile;
use keel_weights::quantize::RowSource;
use keel_weights::{TensorSource, TensorSpec, WeightsError, cols};
use serde_json::{Value, json};

use super::names::{Names, split};
use super::order::{Orders, RowOrder};
use super::{DIVISORS, LONG_DIVISORS, SHORT_DIVISORS, architecture, is_offset_norm};
use crate::{HybridConfig, ModelError, Result};

/// Model types that transformers reads with a `text_config` alone. For each: its name of a text model whose keys are at
/// the top level, and the class of that model.
const TEXT_TYPES: [(&str, &str, &str); 2] = [
    ("qwen3_5", "qwen3_5_text", "Qwen3_5ForCausalLM"),
    ("qwen3_5_moe", "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
];

/// A [config](fn@super::config) without a vision tower as transformers expects it, for a checkpoint of safetensors. All
/// of its keys are at the top level. transformers has other names of model types for such a config. mlx-lm does not
/// know them, and reads the names that `config` gives.
#[must_use]
pub fn transformers_config(config: &Value) -> Value {
    let mut config = config.clone();
    let known = TEXT_TYPES.iter().find(|(name, ..)| config["model_type"] == *name);
    if let Some((_, text, class)) = known {
        config["model_type"] = json!(text);
        config["architectures"] = json!([class]);
    }
    config
}

/// The tensors of a GGUF file with the names, shapes and row order of a checkpoint of its model type. Experts are
/// stacked as in MLX. Values in blocks become f16; others keep their type.
pub struct GgufAsCheckpoint<'a> {
    file: &'a GgufFile,
    tensors: BTreeMap<String, Parameter>,
}

/// One tensor of the checkpoint.
struct Parameter {
    /// The file's tensor, and its number of columns.
    tensor: String,
    cols: usize,
    rows: RowOrder,
    columns: RowOrder,
    change: Change,
    spec: TensorSpec,
}

/// Conversion of the file's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    None,
    /// The scale of a norm becomes an offset from one.
    MinusOne,
    /// `-e^A_log` becomes `A_log`.
    Log,
}

impl<'a> GgufAsCheckpoint<'a> {
    /// The tensors of a file whose config has these numbers.
    ///
    /// # Errors
    /// [`ModelError::Config`] for a tensor without a name in checkpoints, [`ModelError::Shape`] for one whose rows are
    /// not those of the config.
    pub fn new(file: &'a GgufFile, config: &HybridConfig) -> Result<GgufAsCheckpoint<'a>> {
        let arch = architecture(file);
        let (names, orders) = (Names::new(arch, config.layers.len()), Orders::new(arch, config));
        let fused = file.names().any(|name| name.contains("ffn_gate_up_exps"));
        let mut tensors = BTreeMap::new();
        // The config contains the divisors of the rotary frequencies.
        let is_said = |name: &str| [DIVISORS, SHORT_DIVISORS, LONG_DIVISORS].contains(&name);
        for stored in file.tensors()?.into_iter().filter(|spec| !is_said(&spec.name)) {
            let whole = names.parameters(&stored.name, fused);
            let (module, suffix) = split(&stored.name);
            let (parameters, suffix) =
                if whole.is_empty() { (names.parameters(module, fused), suffix) } else { (whole, "") };
            if parameters.is_empty() {
                let reason = format!("tensor {} of the GGUF file is not known", stored.name);
                return Err(ModelError::Config(reason));
            }
            for parameter in parameters {
                let suffix = if parameter.contains(".experts.") { "" } else { suffix };
                let parameter = parameter_of(&stored, &orders, arch, file, format!("{parameter}{suffix}"))?;
                tensors.insert(parameter.spec.name.clone(), parameter);
            }
        }
        Ok(GgufAsCheckpoint { file, tensors })
    }

    fn parameter(&self, name: &str) -> keel_weights::Result<&Parameter> {
        let missing =
            || WeightsError::Module { module: name.into(), problem: "the GGUF file does not have it".into() };
        self.tensors.get(name).ok_or_else(missing)
    }
}

fn parameter_of(
    stored: &TensorSpec,
    orders: &Orders,
    arch: &str,
    file: &GgufFile,
    name: String,
) -> Result<Parameter> {
    let (rows, columns) = (orders.rows(&name), orders.cols(&name));
    rows.check(&stored.name, stored.shape.first().copied().unwrap_or(1), &stored.shape)?;
    columns.check(&stored.name, cols(&stored.shape), &stored.shape)?;
    let mut shape = stored.shape.clone();
    if let Some(first) = shape.first_mut() {
        *first /= rows.share();
    }
    if name.ends_with("conv1d.weight") {
        if shape.len() != 2 {
            let (name, expected) = (stored.name.clone(), "two dimensions".into());
            return Err(ModelError::Shape { name, expected, got: format!("{shape:?}") });
        }
        shape.insert(1, 1);
    }
    let change = if name.ends_with("A_log") {
        Change::Log
    } else if is_offset_norm(arch, &name) {
        Change::MinusOne
    } else {
        Change::None
    };
    let in_blocks = file.info(&stored.name).is_err();
    let dtype = if in_blocks { DType::F16 } else { stored.dtype };
    let is_vector = stored.shape.len() < 2;
    Ok(Parameter {
        tensor: stored.name.clone(),
        // If a vector has a row order, each of its elements is a row.
        cols: if is_vector && rows != RowOrder::Same { 1 } else { cols(&stored.shape) },
        rows,
        columns,
        change,
        spec: TensorSpec { name, dtype, shape },
    })
}

impl RowSource for GgufAsCheckpoint<'_> {
    fn tensors(&self) -> keel_weights::Result<Vec<TensorSpec>> {
        Ok(self.tensors.values().map(|parameter| parameter.spec.clone()).collect())
    }

    fn rows_f32(&self, name: &str, rows: Range<usize>, out: &mut [f32]) -> keel_weights::Result<()> {
        let parameter = self.parameter(name)?;
        let Parameter { tensor, cols, rows: order, .. } = parameter;
        if *order == RowOrder::Same {
            self.file.rows_f32(tensor, rows, out)?;
        } else if parameter.spec.shape.len() < 2 {
            let stored = self.file.tensor(tensor)?.to_f32()?;
            for (row, out) in out.iter_mut().enumerate() {
                *out = stored[order.row(row)];
            }
        } else {
            for (row, out) in rows.zip(out.chunks_exact_mut(*cols)) {
                let at = order.row(row);
                self.file.rows_f32(tensor, at..at + 1, out)?;
            }
        }
        if parameter.columns != RowOrder::Same {
            for row in out.chunks_exact_mut(*cols) {
                let stored = row.to_vec();
                row.iter_mut().enumerate().for_each(|(col, out)| *out = stored[parameter.columns.row(col)]);
            }
        }
        match parameter.change {
            Change::None => {}
            Change::MinusOne => out.iter_mut().for_each(|x| *x -= 1.0),
            Change::Log => out.iter_mut().for_each(|x| *x = (-*x).ln()),
        }
        Ok(())
    }

    fn release_rows(&self, name: &str, rows: Range<usize>) {
        let Some(parameter) = self.tensors.get(name) else { return };
        let all = keel_weights::rows(&parameter.spec.shape);
        if parameter.rows == RowOrder::Same {
            RowSource::release_rows(self.file, &parameter.tensor, rows);
        } else if rows.end >= all {
            // Rows in another order lie all over the tensor.
            self.file.release(&parameter.tensor);
        }
    }

    fn check_intact(&self) -> keel_weights::Result<()> {
        RowSource::check_intact(self.file)
    }
}
