//! Presents a checkpoint as the tensors of a GGUF file, for writing one.

use std::collections::BTreeMap;
use std::ops::Range;

use keel_array::DType;
use keel_weights::quantize::{Dequantized, RowSource, expert_of};
use keel_weights::{Checkpoint, TensorSpec, WeightsError, cols, part_of_mtp_head, rows as rows_of};

use super::names::Names;
use super::order::{Orders, RowOrder};
use super::{DIVISORS, LONG_DIVISORS, SHORT_DIVISORS, architecture_of, is_offset_norm};
use crate::{HybridConfig, ModelError, Result, RopeScaling};

/// The tensors of a checkpoint with the names, shapes and row order of a GGUF file. Quantised tensors are decoded.
pub struct CheckpointAsGguf<'a> {
    source: Dequantized<'a>,
    tensors: BTreeMap<String, Tensor>,
    /// Divisors of the rotary frequencies, if tables scale them.
    divisors: BTreeMap<&'static str, Vec<f32>>,
}

/// One tensor of the file.
struct Tensor {
    spec: TensorSpec,
    /// The sources of its rows, one after the other.
    sources: Vec<RowRuns>,
    rows: RowOrder,
    columns: RowOrder,
    change: Change,
}

/// Rows of a tensor of the checkpoint: in each run of `stride` rows, the `len` rows from `offset` on.
#[derive(Clone, Debug)]
struct RowRuns {
    name: String,
    rows: usize,
    stride: usize,
    offset: usize,
    len: usize,
}

/// Conversion of the checkpoint's values.
#[derive(Clone, Copy, Debug)]
enum Change {
    None,
    /// The offset of a norm from one becomes its scale.
    PlusOne,
    /// `A_log` becomes `-e^A_log`.
    NegativeExponential,
}

impl<'a> CheckpointAsGguf<'a> {
    /// The tensors of a checkpoint whose config has these numbers.
    ///
    /// # Errors
    /// [`ModelError::UnknownModelType`], [`ModelError::Config`] for a tensor without a name in GGUF files,
    /// [`ModelError::Shape`] for one whose rows are not those of the config, and errors of [`Dequantized::new`].
    pub fn new(checkpoint: &'a Checkpoint, config: &HybridConfig) -> Result<CheckpointAsGguf<'a>> {
        let arch = architecture_of(config)?;
        let source = Dequantized::new(checkpoint)?;
        let specs = source.tensors()?;
        // As when a checkpoint is read: MLX's converter transposes the convolution and shifts the norms.
        let is_mlx = specs.iter().any(|spec| {
            spec.name.ends_with("conv1d.weight") && matches!(spec.shape[..], [_, width, 1] if width > 1)
        });
        let builder = Builder {
            arch,
            names: Names::new(arch, config.layers.len()),
            orders: Orders::new(arch, config),
            norms_are_offsets: !is_mlx,
            config,
        };
        let has_head = specs.iter().any(|spec| part_of_mtp_head(&spec.name) == Some("fc.weight"));
        let mtp_layers = if has_head { config.mtp_layers } else { 0 };
        let (mut tensors, mut left_out) = (BTreeMap::new(), 0);
        let mut experts: BTreeMap<String, BTreeMap<usize, TensorSpec>> = BTreeMap::new();
        for spec in specs {
            let Some(name) = text_name(&spec.name) else { continue };
            if name == "lm_head.weight" && config.tied {
                continue;
            }
            if is_uncounted(&name, mtp_layers) {
                left_out += 1;
                continue;
            }
            if let Some((stack, number, _)) = expert_of(&name) {
                experts.entry(stack).or_default().insert(number, spec);
                continue;
            }
            for tensor in builder.tensors(&name, &spec)? {
                tensors.insert(tensor.spec.name.clone(), tensor);
            }
        }
        for (stack, experts) in experts {
            let tensor = builder.stack(&stack, experts)?;
            tensors.insert(tensor.spec.name.clone(), tensor);
        }
        if left_out > 0 {
            tracing::warn!(
                "{left_out} tensors of the multi-token-prediction head are left out: config.json counts {} of its layers \
                 (mtp_num_hidden_layers), and the checkpoint {} its projection fc",
                config.mtp_layers,
                if has_head { "has" } else { "does not have" }
            );
        }
        if !tensors.contains_key("token_embd.weight") {
            let reason = "the checkpoint has no token embedding under any known name";
            return Err(ModelError::Config(reason.into()));
        }
        Ok(CheckpointAsGguf { source, tensors, divisors: divisors(config) })
    }

    /// Whether the file has a multi-token-prediction head.
    pub fn has_mtp_head(&self) -> bool {
        self.tensors.keys().any(|name| name.contains(".nextn."))
    }
}

/// Whether a tensor is of a layer of the multi-token-prediction head that the file's metadata do not count, or of a
/// head without layers. Other programs refuse files with such tensors. Qwen3-Next's configs do not count their head.
fn is_uncounted(name: &str, mtp_layers: usize) -> bool {
    let Some(part) = name.strip_prefix("mtp.") else { return false };
    let layer = part.strip_prefix("layers.").and_then(|rest| rest.split('.').next()?.parse().ok());
    layer.unwrap_or(0usize) >= mtp_layers
}

/// A tensor's name with the prefix of a checkpoint that is a language model and nothing else; `None` for a tensor
/// outside the language model.
fn text_name(name: &str) -> Option<String> {
    if name.ends_with("rotary_emb.inv_freq") {
        return None;
    }
    if let Some(part) = part_of_mtp_head(name) {
        return Some(format!("mtp.{part}"));
    }
    // Embedding models are saved without a prefix.
    if ["embed_tokens.", "layers.", "norm."].iter().any(|part| name.starts_with(part)) {
        return Some(format!("model.{name}"));
    }
    for (root, stands_for) in
        [("model.language_model.", "model."), ("language_model.model.", "model."), ("language_model.", "")]
    {
        if let Some(rest) = name.strip_prefix(root) {
            return Some(format!("{stands_for}{rest}"));
        }
    }
    let is_text = ["model.", "lm_head."].iter().any(|root| name.starts_with(root));
    let is_vision = name
        .split('.')
        .any(|part| part == "visual" || part == "multi_modal_projector" || part.starts_with("vision"));
    (is_text && !is_vision).then(|| name.into())
}

/// Builds the tensors of the file.
struct Builder<'c> {
    arch: &'static str,
    names: Names,
    orders: Orders,
    norms_are_offsets: bool,
    config: &'c HybridConfig,
}

impl Builder<'_> {
    /// The tensors that a tensor of the checkpoint becomes.
    fn tensors(&self, name: &str, spec: &TensorSpec) -> Result<Vec<Tensor>> {
        let whole = |rows| RowRuns { name: spec.name.clone(), rows, stride: rows, offset: 0, len: rows };
        if let (Some(layer), &[experts, rows, cols]) =
            (name.strip_suffix(".experts.gate_up_proj"), &spec.shape[..])
        {
            let half = |offset: usize| {
                let len = rows / 2;
                let rows = RowRuns { rows: experts * len, stride: rows, offset, len, ..whole(rows) };
                (rows, vec![experts, len, cols])
            };
            let halves = [("gate_proj", half(0)), ("up_proj", half(rows / 2))];
            let tensor = |(name, (rows, shape))| {
                self.tensor(&format!("{layer}.switch_mlp.{name}.weight"), spec.dtype, shape, vec![rows])
            };
            return halves.into_iter().map(tensor).collect();
        }
        if let Some(layer) = name.strip_suffix(".in_proj_qkvz.weight") {
            return self.split_qkvz(layer, spec);
        }
        if let Some(layer) = name.strip_suffix(".in_proj_ba.weight") {
            // The file has the same row order.
            let sources = vec![whole(rows_of(&spec.shape))];
            let mut tensor =
                self.tensor(&format!("{layer}.in_proj_b.weight"), spec.dtype, spec.shape.clone(), sources)?;
            tensor.rows = RowOrder::Same;
            return Ok(vec![tensor]);
        }
        let name = match name.strip_suffix(".experts.down_proj") {
            Some(layer) => format!("{layer}.switch_mlp.down_proj.weight"),
            None => name.to_string(),
        };
        let mut shape = spec.shape.clone();
        if name.ends_with("conv1d.weight") {
            shape.retain(|&dim| dim != 1);
        }
        let sources = vec![whole(rows_of(&shape))];
        Ok(vec![self.tensor(&name, spec.dtype, shape, sources)?])
    }

    /// Splits the projection of `qwen3_next` into two. It holds q, k, v and z for one key head after the other.
    fn split_qkvz(&self, layer: &str, spec: &TensorSpec) -> Result<Vec<Tensor>> {
        let c = self.config.recurrent.ok_or_else(|| {
            ModelError::Config(format!("{} is of a recurrent layer, and the config has none", spec.name))
        })?;
        let values = c.value_heads / c.key_heads * c.value_dim;
        let stride = 2 * c.key_dim + 2 * values;
        let rows =
            |offset, len| RowRuns { name: spec.name.clone(), rows: c.key_heads * len, stride, offset, len };
        let qkv = vec![rows(0, c.key_dim), rows(c.key_dim, c.key_dim), rows(2 * c.key_dim, values)];
        let z = vec![rows(2 * c.key_dim + values, values)];
        if rows_of(&spec.shape) != c.key_heads * stride {
            return Err(ModelError::Shape {
                name: spec.name.clone(),
                expected: format!("{} rows", c.key_heads * stride),
                got: format!("{:?}", spec.shape),
            });
        }
        let tensor = |name: &str, all: Vec<RowRuns>| {
            let rows = all.iter().map(|source| source.rows).sum();
            self.tensor(&format!("{layer}.{name}.weight"), spec.dtype, vec![rows, self.config.hidden], all)
        };
        Ok(vec![tensor("in_proj_qkv", qkv)?, tensor("in_proj_z", z)?])
    }

    /// A stack of experts that are separate tensors in the checkpoint.
    fn stack(&self, name: &str, experts: BTreeMap<usize, TensorSpec>) -> Result<Tensor> {
        let first = &experts.values().next().expect("a stack has an expert").clone();
        let alike = experts.values().all(|spec| (&spec.shape, spec.dtype) == (&first.shape, first.dtype));
        if !alike || !experts.keys().copied().eq(0..experts.len()) {
            let reason = format!("the experts of {name} are not of one shape and type, or some are missing");
            return Err(ModelError::Config(reason));
        }
        let rows = rows_of(&first.shape);
        let whole = |spec: TensorSpec| RowRuns { name: spec.name, rows, stride: rows, offset: 0, len: rows };
        let shape = [&[experts.len()], &first.shape[..]].concat();
        self.tensor(name, first.dtype, shape, experts.into_values().map(whole).collect())
    }

    fn tensor(&self, name: &str, dtype: DType, shape: Vec<usize>, sources: Vec<RowRuns>) -> Result<Tensor> {
        let stored = self.names.tensor(name).ok_or_else(|| {
            ModelError::Config(format!("GGUF files of {} have no name for {name}", self.arch))
        })?;
        let change = if name.ends_with("A_log") {
            Change::NegativeExponential
        } else if self.norms_are_offsets && is_offset_norm(self.arch, name) {
            Change::PlusOne
        } else {
            Change::None
        };
        let (rows, columns) = (self.orders.rows(name), self.orders.cols(name));
        let (count, width) = match shape[..] {
            [count] => (count, 1),
            _ => (rows_of(&shape), cols(&shape)),
        };
        // Tensors that join two layers are not taken apart here.
        if !matches!(rows, RowOrder::EveryOther { .. }) {
            rows.check(name, count, &shape)?;
        }
        columns.check(name, width, &shape)?;
        Ok(Tensor { spec: TensorSpec { name: stored, dtype, shape }, sources, rows, columns, change })
    }
}

/// Tables of divisors for scaled frequencies; none if metadata describe the scaling.
fn divisors(config: &HybridConfig) -> BTreeMap<&'static str, Vec<f32>> {
    let table = |divisors: &[f64]| divisors.iter().map(|x| *x as f32).collect();
    match &config.rope_scaling {
        RopeScaling::Llama3 { .. } | RopeScaling::Divisors(_) => {
            let plain = RopeScaling::None.inverse_frequencies(config.rope_theta, config.rotary);
            let stretched = config.inverse_frequencies();
            let divisors = plain.iter().zip(stretched).map(|(plain, stretched)| plain / stretched);
            BTreeMap::from([(DIVISORS, divisors.collect())])
        }
        RopeScaling::Long { short, long, .. } => {
            BTreeMap::from([(SHORT_DIVISORS, table(short)), (LONG_DIVISORS, table(long))])
        }
        _ => BTreeMap::new(),
    }
}

/// A row of a tensor of the checkpoint.
struct FoundRow<'a> {
    source: &'a RowRuns,
    row: usize,
}

impl Tensor {
    /// Where row `row` lies, counted in the checkpoint's order.
    fn find(&self, mut row: usize) -> Option<FoundRow<'_>> {
        for source in &self.sources {
            if row < source.rows {
                let row = row / source.len * source.stride + source.offset + row % source.len;
                return Some(FoundRow { source, row });
            }
            row -= source.rows;
        }
        None
    }

    /// Number of consecutive rows from `row` to the end of its run.
    fn run(&self, mut row: usize) -> usize {
        for source in &self.sources {
            if row < source.rows {
                return source.len - row % source.len;
            }
            row -= source.rows;
        }
        1
    }
}

impl RowSource for CheckpointAsGguf<'_> {
    fn tensors(&self) -> keel_weights::Result<Vec<TensorSpec>> {
        let mut specs: Vec<TensorSpec> = self.tensors.values().map(|tensor| tensor.spec.clone()).collect();
        let tables = self.divisors.iter();
        specs.extend(tables.map(|(name, divisors)| TensorSpec {
            name: (*name).into(),
            dtype: DType::F32,
            shape: vec![divisors.len()],
        }));
        Ok(specs)
    }

    fn rows_f32(&self, name: &str, rows: Range<usize>, out: &mut [f32]) -> keel_weights::Result<()> {
        if let Some(divisors) = self.divisors.get(name) {
            out.copy_from_slice(divisors);
            return Ok(());
        }
        let missing = || WeightsError::Module {
            module: name.into(),
            problem: "the checkpoint does not have it".into(),
        };
        let tensor = self.tensors.get(name).ok_or_else(missing)?;
        if tensor.spec.shape.len() < 2 {
            let source = &tensor.sources[0];
            let mut values = vec![0.0; out.len()];
            self.source.rows_f32(&source.name, 0..1, &mut values)?;
            out.iter_mut().enumerate().for_each(|(i, out)| *out = values[tensor.rows.row_of(i)]);
        } else {
            self.matrix_rows(tensor, rows, out)?;
        }
        match tensor.change {
            Change::None => {}
            Change::PlusOne => out.iter_mut().for_each(|x| *x += 1.0),
            Change::NegativeExponential => out.iter_mut().for_each(|x| *x = -x.exp()),
        }
        Ok(())
    }

    fn release_rows(&self, name: &str, rows: Range<usize>) {
        let Some(tensor) = self.tensors.get(name) else { return };
        if tensor.rows == RowOrder::Same {
            self.release_runs(tensor, rows);
        } else if rows.end >= rows_of(&tensor.spec.shape) {
            // Rows in another order lie all over the tensor.
            tensor.sources.iter().for_each(|source| self.source.release_rows(&source.name, 0..usize::MAX));
        }
    }

    fn check_intact(&self) -> keel_weights::Result<()> {
        self.source.check_intact()
    }
}

impl CheckpointAsGguf<'_> {
    fn matrix_rows(&self, tensor: &Tensor, rows: Range<usize>, out: &mut [f32]) -> keel_weights::Result<()> {
        let cols = cols(&tensor.spec.shape);
        let mut row = rows.start;
        while row < rows.end {
            let (from, count) = match tensor.rows {
                RowOrder::Same => (row, tensor.run(row).min(rows.end - row)),
                order => (order.row_of(row), 1),
            };
            let FoundRow { source, row: at } = tensor.find(from).expect("the sources make up the tensor");
            let out = &mut out[(row - rows.start) * cols..][..count * cols];
            self.source.rows_f32(&source.name, self.stored_rows(source, at..at + count, cols), out)?;
            row += count;
        }
        if tensor.columns != RowOrder::Same {
            for row in out.chunks_exact_mut(cols) {
                let stored = row.to_vec();
                row.iter_mut().enumerate().for_each(|(col, out)| *out = stored[tensor.columns.row_of(col)]);
            }
        }
        Ok(())
    }

    fn release_runs(&self, tensor: &Tensor, rows: Range<usize>) {
        let cols = cols(&tensor.spec.shape);
        let mut row = rows.start;
        while let (true, Some(FoundRow { source, row: at })) = (row < rows.end, tensor.find(row)) {
            let count = tensor.run(row).min(rows.end - row);
            self.source.release_rows(&source.name, self.stored_rows(source, at..at + count, cols));
            row += count;
        }
    }

    /// Rows of `cols` values, as rows of the checkpoint's tensor. A convolution in MLX's form has rows of single
    /// values.
    fn stored_rows(&self, source: &RowRuns, rows: Range<usize>, cols: usize) -> Range<usize> {
        let width = self.source.cols_of(&source.name).unwrap_or(cols);
        rows.start * cols / width..rows.end * cols / width
    }
}
