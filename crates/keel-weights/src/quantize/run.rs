//! The conversion: reads rows, quantises them, and appends them to the output.

use std::{collections::BTreeMap, fs, io, path::Path};

use keel_array::DType;
use rayon::prelude::*;
use serde_json::Value;

use super::{
    plan::{Conversion, Target, TensorConversion},
    recipe::QuantizeRecipe,
    source::{RowSource, encode_floats},
};
use crate::{
    AffineFormat, Checkpoint, Result, ShardedWriter, TensorSource, TensorSpec, WeightsError,
    affine::quantize_rows,
    cols, float,
    gguf::{GgmlType, encode},
    json, rows,
    view::fill_rows,
};

/// Values decoded at a time: 16 MiB of f32.
pub(super) const CHUNK_VALUES: usize = 4 << 20;

/// Extensions of the files that are copied with the weights: tokenizer, template, generation settings.
const COPIED_EXTENSIONS: [&str; 5] = ["json", "jinja", "txt", "model", "tiktoken"];

/// Progress of a conversion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuantizeProgress<'a> {
    /// The tensor being converted.
    pub tensor: &'a str,
    /// Bytes of the source that are converted.
    pub done_bytes: u64,
    /// Bytes of the source.
    pub total_bytes: u64,
}

/// Result of a conversion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QuantizeReport {
    /// Tensors that were quantised.
    pub quantized: usize,
    /// Tensors that were copied.
    pub copied: usize,
    /// Matrices that have another form than the recipe's, because their rows are not whole groups or blocks.
    pub other_forms: usize,
    /// Bytes of the source's tensors.
    pub source_bytes: u64,
    /// Bytes of the output's tensors.
    pub output_bytes: u64,
}

/// Quantises the checkpoint at `source` into the folder `target`, which must not hold a checkpoint yet.
///
/// The output has MLX's form: `weight` (u32), `scales` and `biases` for each quantised module, and the `quantization`
/// section in config.json, with an override for each module that differs from the default. Experts become MLX's stacks,
/// `switch_mlp.{gate,up,down}_proj`. **All other names and layouts are the source's**: `conv1d` stays `(C, 1, K)`,
/// norms keep their offset, and the multi-token-prediction head is kept. Readers of `qwen3_5` recognise this by the
/// shape of the convolution. Overrides are listed under the source's name and under mlx-lm's name. Tokenizer, template
/// and other json files are copied. config.json is written last.
///
/// # Memory
/// A chunk of rows: 16 MiB of f32, or one row if that is larger. The source's pages are released after use.
///
/// # Errors
/// [`WeightsError::Output`] if the target holds a checkpoint, [`WeightsError::Module`] if the source is quantised
/// already or an override matches nothing, [`WeightsError::NotFinite`] if a weight is NaN or infinite,
/// [`WeightsError::Io`] if a file cannot be read or written. No unfinished weights file remains.
pub fn quantize_checkpoint(
    source: &Path,
    target: &Path,
    recipe: &QuantizeRecipe,
    progress: &mut dyn FnMut(QuantizeProgress<'_>),
) -> Result<QuantizeReport> {
    let source = Checkpoint::open(source)?;
    check_source(&source)?;
    let form = SafetensorsForm::Affine(recipe);
    let (report, section) = write_safetensors(&source, target, source.metadata(), &form, progress)?;
    copy_side_files(source.folder(), target)?;
    write_config(target, source.config(), section)?;
    Ok(report)
}

/// The form in which [`write_safetensors`] stores matrices.
#[derive(Clone, Copy, Debug)]
pub enum SafetensorsForm<'a> {
    /// One float for each value, in this type, or in the source's type if `None`.
    Dense(Option<DType>),
    /// In MLX's affine form.
    Affine(&'a QuantizeRecipe),
}

/// Writes the weights of `source` into the folder `target`, which must not hold a checkpoint yet. Returns the
/// `quantization` section for its config.json; null for dense weights.
///
/// # Memory
/// As [`quantize_checkpoint`].
///
/// # Errors
/// As [`quantize_checkpoint`].
pub fn write_safetensors(
    source: &dyn RowSource,
    target: &Path,
    metadata: &BTreeMap<String, String>,
    form: &SafetensorsForm<'_>,
    progress: &mut dyn FnMut(QuantizeProgress<'_>),
) -> Result<(QuantizeReport, Value)> {
    let tensors = source.tensors()?;
    let (conversion, shard_bytes_max) = match form {
        SafetensorsForm::Dense(dtype) => {
            (Conversion::dense(&tensors, *dtype), super::recipe::SHARD_BYTES_MAX)
        }
        SafetensorsForm::Affine(recipe) => (Conversion::affine(&tensors, recipe)?, recipe.shard_bytes_max),
    };
    prepare_target(target)?;
    let Conversion { tensors, outputs, section, other_forms } = conversion;
    let mut writer = ShardedWriter::create(target, &outputs, metadata, shard_bytes_max)?;
    let report = write_weights(source, &tensors, &mut |name, bytes| writer.append(name, bytes), progress)?;
    writer.finish()?;
    let output_bytes = outputs.iter().filter_map(TensorSpec::bytes).map(|bytes| bytes as u64).sum();
    Ok((QuantizeReport { output_bytes, other_forms, ..report }, section))
}

/// Writes config.json with a `quantization` section; without one if that is null. This completes the checkpoint.
///
/// # Errors
/// [`WeightsError::Io`] if it cannot be written.
pub fn write_config(target: &Path, config: &Value, section: Value) -> Result<()> {
    let mut config = config.clone();
    if let Some(config) = config.as_object_mut() {
        for key in ["quantization", "quantization_config"] {
            if section.is_null() {
                config.remove(key);
            } else {
                config.insert(key.into(), section.clone());
            }
        }
    }
    json::write(&target.join("config.json"), &config)
}

fn check_source(source: &Checkpoint) -> Result<()> {
    if source.quantization().is_none() {
        return Ok(());
    }
    let module = source.folder().display().to_string();
    let problem = "its config.json says that it is quantised already; start from the original weights".into();
    Err(WeightsError::Module { module, problem })
}

fn prepare_target(target: &Path) -> Result<()> {
    fs::create_dir_all(target).map_err(WeightsError::io("create", target))?;
    for entry in fs::read_dir(target).map_err(WeightsError::io("list", target))? {
        let name = entry.map_err(WeightsError::io("list", target))?.file_name();
        let name = name.to_string_lossy();
        if name == "config.json" || name.ends_with(".safetensors") {
            let problem = format!("it already holds {name}; name an empty folder");
            return Err(WeightsError::Output { path: target.into(), problem });
        }
    }
    Ok(())
}

/// Appends bytes to a tensor of the output.
type Append<'w> = dyn FnMut(&str, &[u8]) -> Result<()> + 'w;

/// Converts `tensors` in this order. The report leaves the output's bytes and other forms to the caller.
pub(super) fn write_weights(
    source: &dyn RowSource,
    tensors: &[TensorConversion],
    append: &mut Append<'_>,
    progress: &mut dyn FnMut(QuantizeProgress<'_>),
) -> Result<QuantizeReport> {
    let source_bytes = tensors.iter().map(|tensor| source.stored_bytes(&tensor.source)).sum();
    let mut report = QuantizeReport { source_bytes, ..Default::default() };
    let (mut done_bytes, total_bytes) = (0, source_bytes);
    for tensor in tensors {
        let (before, rows_all) = (done_bytes, rows(&tensor.source.shape).max(1) as u64);
        let (mut rows_done, tensor_bytes) = (0, source.stored_bytes(&tensor.source));
        write_tensor(source, tensor, append, &mut |rows| {
            rows_done += rows as u64;
            done_bytes = before + tensor_bytes * rows_done / rows_all;
            progress(QuantizeProgress { tensor: &tensor.source.name, done_bytes, total_bytes });
        })?;
        let is_quantized = tensor.targets.iter().any(|target| match target {
            Target::Quantize { .. } => true,
            Target::Encode(_, kind) => kind.dtype().is_none(),
            Target::Copy(_) => false,
        });
        *(if is_quantized { &mut report.quantized } else { &mut report.copied }) += 1;
    }
    Ok(report)
}

/// Writes the rows of a tensor to its targets, in turn.
fn write_tensor(
    source: &dyn RowSource,
    tensor: &TensorConversion,
    append: &mut Append<'_>,
    advance: &mut dyn FnMut(usize),
) -> Result<()> {
    let spec = &tensor.source;
    let (all, cols) = (rows(&spec.shape), cols(&spec.shape));
    if all == 0 || cols == 0 {
        return Ok(());
    }
    let turn_rows = if tensor.turn_rows == 0 { all } else { tensor.turn_rows };
    let chunk_rows = (CHUNK_VALUES / cols).clamp(1, turn_rows);
    let mut values = Vec::new();
    let mut buffers: Option<QuantizeBuffers> = None;
    for (turn, target) in (0..all).step_by(turn_rows).zip(tensor.targets.iter().cycle()) {
        for start in (turn..turn + turn_rows).step_by(chunk_rows) {
            let rows = start..(start + chunk_rows).min(turn + turn_rows);
            match target {
                Target::Copy(to) => append(to, &source.bytes_of_rows(spec, rows.clone())?)?,
                Target::Encode(to, kind) => match blocks_of(source, &spec.name, *kind) {
                    Some(blocks) => {
                        let row_bytes = blocks.len() / all;
                        append(to, &blocks[rows.start * row_bytes..rows.end * row_bytes])?;
                    }
                    None => {
                        decode(source, spec, rows.clone(), &mut values)?;
                        append(to, &encode_rows(to, *kind, rows.start, cols, &values)?)?;
                    }
                },
                Target::Quantize { outputs, format } => {
                    decode(source, spec, rows.clone(), &mut values)?;
                    let buffers = match &mut buffers {
                        Some(buffers) if buffers.format == *format => buffers,
                        other => other.insert(QuantizeBuffers::new(*format, spec, chunk_rows)),
                    };
                    for (name, bytes) in outputs.iter().zip(buffers.quantize(spec, rows.start, &values)?) {
                        append(name, bytes)?;
                    }
                }
            }
            source.check_intact()?;
            source.release_rows(&spec.name, rows.clone());
            advance(rows.len());
        }
    }
    Ok(())
}

/// The blocks of a tensor, if the source has them in this type.
fn blocks_of<'s>(source: &'s dyn RowSource, name: &str, kind: GgmlType) -> Option<&'s [u8]> {
    if let GgmlType::Blocks(format) = kind { source.blocks(name, format) } else { None }
}

/// Rows of `name` from `start` on, in this type.
fn encode_rows(name: &str, kind: GgmlType, start: usize, cols: usize, values: &[f32]) -> Result<Vec<u8>> {
    let format = match kind {
        GgmlType::Plain(dtype) => return encode_floats(name, dtype, start, cols, values),
        GgmlType::Blocks(format) => format,
    };
    let row_bytes = cols / format.values() * format.bytes();
    let mut bytes = vec![0; values.len() / cols * row_bytes];
    let rows = bytes.par_chunks_exact_mut(row_bytes).zip(values.par_chunks_exact(cols)).enumerate();
    rows.try_for_each(|(row, (bytes, values))| {
        let encoded = encode(format, values, bytes);
        encoded.then_some(()).ok_or_else(|| WeightsError::NotFinite { name: name.into(), row: start + row })
    })?;
    Ok(bytes)
}

/// Decodes rows on all threads. Values that are not finite are an error.
fn decode(
    source: &dyn RowSource,
    spec: &TensorSpec,
    rows: std::ops::Range<usize>,
    values: &mut Vec<f32>,
) -> Result<()> {
    let cols = cols(&spec.shape);
    values.resize(rows.len() * cols, 0.0);
    fill_rows(&rows, cols, values, |rows, values| {
        source.rows_f32(&spec.name, rows.clone(), values)?;
        let mut rows = rows.zip(values.chunks_exact(cols));
        rows.try_for_each(|(row, values)| check_finite(&spec.name, row, values))
    })
}

/// Buffers for the rows that are quantised at a time.
struct QuantizeBuffers {
    format: AffineFormat,
    packed: Vec<u8>,
    scales: Vec<f32>,
    biases: Vec<f32>,
    scale_bytes: Vec<u8>,
    bias_bytes: Vec<u8>,
}

impl QuantizeBuffers {
    fn new(format: AffineFormat, spec: &TensorSpec, rows: usize) -> QuantizeBuffers {
        let values = rows * cols(&spec.shape);
        let groups = values / format.group_size();
        let group_bytes = groups * spec.dtype.size();
        QuantizeBuffers {
            format,
            packed: vec![0; format.packed_bytes(values)],
            scales: vec![0.0; groups],
            biases: vec![0.0; groups],
            scale_bytes: vec![0; group_bytes],
            bias_bytes: vec![0; group_bytes],
        }
    }

    /// The bytes of codes, scales and biases for rows from `start` on.
    fn quantize(&mut self, spec: &TensorSpec, start: usize, values: &[f32]) -> Result<[&[u8]; 3]> {
        let (cols, dtype) = (cols(&spec.shape), spec.dtype);
        let groups = values.len() / self.format.group_size();
        let packed = &mut self.packed[..self.format.packed_bytes(values.len())];
        let (scales, biases) = (&mut self.scales[..groups], &mut self.biases[..groups]);
        quantize_rows(self.format, cols, values, packed, scales, biases);
        // In a group of huge f32 values the span can overflow, although each value is finite.
        check_finite(&spec.name, start, scales)?;
        let scale_bytes = &mut self.scale_bytes[..groups * dtype.size()];
        let bias_bytes = &mut self.bias_bytes[..groups * dtype.size()];
        float::encode(dtype, scales, scale_bytes);
        float::encode(dtype, biases, bias_bytes);
        Ok([packed, scale_bytes, bias_bytes])
    }
}

fn check_finite(name: &str, row: usize, values: &[f32]) -> Result<()> {
    // Without an early exit, the loop compiles to vector code.
    if values.iter().fold(true, |finite, value| finite & value.is_finite()) {
        return Ok(());
    }
    Err(WeightsError::NotFinite { name: name.into(), row })
}

/// Copies the other files of a checkpoint's folder: tokenizer, template, generation settings.
///
/// # Errors
/// [`WeightsError::Io`] if a file cannot be read or written.
pub fn copy_side_files(source: &Path, target: &Path) -> Result<()> {
    // If the path was a bare file name, the folder is empty and stands for the current one.
    let folder = if source.as_os_str().is_empty() { Path::new(".") } else { source };
    let listed: io::Result<Vec<_>> = fs::read_dir(folder).and_then(Iterator::collect);
    for entry in listed.map_err(WeightsError::io("list", folder))? {
        let path = entry.path();
        let name = entry.file_name();
        let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
        let is_weights = name.to_string_lossy().ends_with(".safetensors.index.json");
        let is_copied = COPIED_EXTENSIONS.contains(&extension) && name != "config.json" && !is_weights;
        if is_copied && path.is_file() {
            fs::copy(&path, target.join(name)).map_err(WeightsError::io("copy", &path))?;
        }
    }
    Ok(())
}
