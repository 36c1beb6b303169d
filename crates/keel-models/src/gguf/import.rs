//! Presents a GGUF file as the tensors of a Hugging Face checkpoint, for writing one.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;

use keel_array::DType;
use keel_weights::gguf::GgufFile;
use keel_weights::quantize::RowSource;
use keel_weights::{TensorSource, TensorSpec, WeightsError, cols};
use serde_json::{Value, json};

use super::names::{Names, split};
use super::order::{Orders, RowOrder};
use super::{DIVISORS, LONG_DIVISORS, SHORT_DIVISORS, architecture, is_offset_norm};
use crate::{HybridConfig, ModelError, Result, RopeScaling};

/// The model types that [`config`](fn@super::config) gives. For each: transformers' name of a text model whose keys are
/// at the top level, and the class of that model. Text models of Qwen3-VL are those of Qwen3.
const TEXT_TYPES: [(&str, &str, &str); 15] = [
    ("llama", "llama", "LlamaForCausalLM"),
    ("mistral", "mistral", "MistralForCausalLM"),
    ("ministral3", "ministral3", "Ministral3ForCausalLM"),
    ("smollm3", "smollm3", "SmolLM3ForCausalLM"),
    ("phi3", "phi3", "Phi3ForCausalLM"),
    ("olmo3", "olmo3", "Olmo3ForCausalLM"),
    ("glm4", "glm4", "Glm4ForCausalLM"),
    ("gemma3_text", "gemma3_text", "Gemma3ForCausalLM"),
    ("qwen2", "qwen2", "Qwen2ForCausalLM"),
    ("qwen3", "qwen3", "Qwen3ForCausalLM"),
    ("qwen3_vl", "qwen3", "Qwen3ForCausalLM"),
    ("qwen3_moe", "qwen3_moe", "Qwen3MoeForCausalLM"),
    ("qwen3_vl_moe", "qwen3_moe", "Qwen3MoeForCausalLM"),
    ("qwen3_5", "qwen3_5_text", "Qwen3_5ForCausalLM"),
    ("qwen3_5_moe", "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
];

/// A [config](fn@super::config) without a vision tower as transformers expects it, for a checkpoint of safetensors. All
/// of its keys are at the top level. transformers has other names of some model types for such a config. mlx-lm does
/// not know them, and reads the names that `config` gives. `parsed` are the config's numbers.
#[must_use]
pub fn transformers_config(config: &Value, parsed: &HybridConfig) -> Value {
    let mut config = portable_config(config, parsed);
    let known = TEXT_TYPES.iter().find(|(name, ..)| config["model_type"] == *name);
    if let Some((name, text, class)) = known {
        config["model_type"] = json!(text);
        config["architectures"] = json!([class]);
        let sections = config.get_mut("rope_scaling").filter(|_| name.starts_with("qwen3_vl"));
        if let Some(rope) = sections.and_then(Value::as_object_mut) {
            rope.retain(|key, _| !key.starts_with("mrope"));
        }
    }
    config
}

/// A [config](fn@super::config) for other programs. They do not read a table of divisors of the rotary frequencies: if
/// its numbers are those of Llama 3's scaling, the config gets this scaling. `parsed` are the config's numbers.
#[must_use]
pub fn portable_config(config: &Value, parsed: &HybridConfig) -> Value {
    let mut config = config.clone();
    let RopeScaling::Divisors(divisors) = &parsed.rope_scaling else { return config };
    let factor = divisors.last().map_or(1.0, |last| last.round());
    let llama3 = json!({"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192});
    let scaling = RopeScaling::Llama3 { factor, low: 1.0, high: 4.0, original: 8192.0 };
    let frequencies = scaling.inverse_frequencies(parsed.rope_theta, parsed.rotary);
    let is_close = |(a, b): (&f32, f32)| (a / b - 1.0).abs() < 1e-4;
    if frequencies.iter().zip(parsed.inverse_frequencies()).all(is_close) {
        config["rope_scaling"] = llama3;
    } else {
        tracing::warn!(
            "the file's rope_freqs are not those of Llama 3: only keel reads the config that is written"
        );
    }
    config
}

/// The tensors of a GGUF file with the names, shapes and row order of a checkpoint of its model type. The experts of a
/// layer are two stacks, as in transformers: gate and up in one, and down. Values in blocks become f16; others keep
/// their type.
pub struct GgufAsCheckpoint<'a> {
    file: &'a GgufFile,
    tensors: BTreeMap<String, Parameter>,
}

/// One tensor of the checkpoint.
struct Parameter {
    /// The file's tensors. Each has `turn_rows` rows before the next one's turn.
    tensors: Vec<String>,
    turn_rows: usize,
    /// Columns of the file's tensors.
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
        let mut tensors: BTreeMap<String, Parameter> = BTreeMap::new();
        // The config contains the divisors of the rotary frequencies.
        let is_said = |name: &str| [DIVISORS, SHORT_DIVISORS, LONG_DIVISORS].contains(&name);
        for stored in file.tensors()?.into_iter().filter(|spec| !is_said(&spec.name)) {
            let whole = names.parameters(&stored.name);
            let (module, suffix) = split(&stored.name);
            let (parameters, suffix) =
                if whole.is_empty() { (names.parameters(module), suffix) } else { (whole, "") };
            if parameters.is_empty() {
                let reason = format!("tensor {} of the GGUF file is not known", stored.name);
                return Err(ModelError::Config(reason));
            }
            for parameter in parameters {
                let suffix = if parameter.contains(".experts.") { "" } else { suffix };
                let parameter = parameter_of(&stored, &orders, arch, file, format!("{parameter}{suffix}"))?;
                match tensors.entry(parameter.spec.name.clone()) {
                    Entry::Vacant(entry) => {
                        entry.insert(parameter);
                    }
                    Entry::Occupied(mut entry) => entry.get_mut().join(parameter)?,
                }
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

impl Parameter {
    /// Adds a second stack of experts. The rows of each expert follow those of this stack's expert.
    fn join(&mut self, other: Parameter) -> Result<()> {
        let (ours, theirs) = (&self.spec.shape, &other.spec.shape);
        if self.tensors.len() > 1 || ours.len() != 3 || ours != theirs {
            let (name, tensors) = (&self.spec.name, [&self.tensors[..], &other.tensors[..]].concat());
            let reason = format!("tensors {tensors:?} of {ours:?} and {theirs:?} do not make up {name}");
            return Err(ModelError::Config(reason));
        }
        self.turn_rows = ours[1].max(1);
        self.spec.shape[1] *= 2;
        if self.spec.dtype != other.spec.dtype {
            self.spec.dtype = DType::F32;
        }
        self.tensors.extend(other.tensors);
        Ok(())
    }

    /// The file's tensors and rows that hold these rows, in their order.
    fn runs(&self, rows: Range<usize>) -> Vec<(&str, Range<usize>)> {
        let mut runs = Vec::new();
        let mut row = rows.start;
        while row < rows.end {
            let (turn, within) = (row / self.turn_rows, row % self.turn_rows);
            let first = turn / self.tensors.len() * self.turn_rows + within;
            let count = (self.turn_rows - within).min(rows.end - row);
            runs.push((self.tensors[turn % self.tensors.len()].as_str(), first..first + count));
            row += count;
        }
        runs
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
        tensors: vec![stored.name.clone()],
        turn_rows: keel_weights::rows(&shape).max(1),
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
        let Parameter { tensors, cols, rows: order, .. } = parameter;
        let tensor = &tensors[0];
        if *order == RowOrder::Same {
            let mut rest = &mut *out;
            for (tensor, rows) in parameter.runs(rows) {
                let (own, others) = std::mem::take(&mut rest).split_at_mut(rows.len() * cols);
                self.file.rows_f32(tensor, rows, own)?;
                rest = others;
            }
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
            for (tensor, rows) in parameter.runs(rows.start..rows.end.min(all)) {
                RowSource::release_rows(self.file, tensor, rows);
            }
        } else if rows.end >= all {
            // Rows in another order lie all over the tensor.
            self.file.release(&parameter.tensors[0]);
        }
    }

    fn check_intact(&self) -> keel_weights::Result<()> {
        RowSource::check_intact(self.file)
    }
}
