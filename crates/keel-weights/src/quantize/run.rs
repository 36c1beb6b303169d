//! The conversion itself: read rows, quantise them, append them to the output.

use std::{fs, io, path::Path};

use rayon::prelude::*;

use super::{
    plan::{Plan, Step},
    recipe::QuantizeRecipe,
};
use crate::{
    AffineFormat, Checkpoint, Result, ShardedWriter, TensorSource, TensorSpec, TensorView, WeightsError,
    affine::quantize_rows, float, json,
};

/// Values that are decoded at a time: 16 MiB of f32.
const CHUNK_VALUES: usize = 4 << 20;

/// The extensions of the files that are copied beside the weights: tokenizer, template, generation settings.
const COPIED_EXTENSIONS: [&str; 5] = ["json", "jinja", "txt", "model", "tiktoken"];

/// How far a conversion has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuantizeProgress<'a> {
    /// The tensor at work.
    pub tensor: &'a str,
    /// Bytes of the source that are done.
    pub done_bytes: u64,
    /// Bytes of the source.
    pub total_bytes: u64,
}

/// What a conversion did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QuantizeReport {
    /// Tensors that were quantised.
    pub quantized: usize,
    /// Tensors that were copied.
    pub copied: usize,
    /// Bytes of the source's tensors.
    pub source_bytes: u64,
    /// Bytes of the output's tensors.
    pub output_bytes: u64,
}

/// Quantises the checkpoint at `source` into the folder `target`, which must not hold one yet.
///
/// The output has MLX's form: `weight` (u32), `scales` and `biases` for each quantised module, and the
/// `quantization` section in config.json with an override for each module that differs from the rest. **Names and
/// layouts are the source's**: experts stay fused or apart, `conv1d` stays `(C, 1, K)` and norms keep their
/// offset, so a model that loads the source loads the result. A bare parameter `<module>` (stacked experts)
/// becomes `<module>.weight`. Tokenizer, template and other json files are copied; config.json is written last.
///
/// # Memory
/// A chunk of rows: 16 MiB of f32, or one row if that is more. Pages of the source are released as they are
/// consumed.
///
/// # Errors
/// [`WeightsError::Output`] if the target holds a checkpoint, [`WeightsError::Module`] if the source is
/// quantised already or an override matches nothing, [`WeightsError::NotFinite`] if a weight is NaN or infinite,
/// [`WeightsError::Io`] if a file cannot be read or written. No weights file is left behind unfinished.
pub fn quantize_checkpoint(
    source: &Path,
    target: &Path,
    recipe: &QuantizeRecipe,
    progress: &mut dyn FnMut(QuantizeProgress<'_>),
) -> Result<QuantizeReport> {
    let source = Checkpoint::open(source)?;
    check_source(&source)?;
    let plan = Plan::new(&source, recipe)?;
    prepare_target(target)?;
    let report = write_weights(&source, &plan, target, recipe.shard_bytes_max, progress)?;
    copy_side_files(source.folder(), target)?;
    let mut config = source.config().clone();
    config["quantization"] = plan.section.clone();
    config["quantization_config"] = plan.section;
    json::write(&target.join("config.json"), &config)?;
    Ok(report)
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

fn write_weights(
    source: &Checkpoint,
    plan: &Plan,
    target: &Path,
    shard_bytes_max: u64,
    progress: &mut dyn FnMut(QuantizeProgress<'_>),
) -> Result<QuantizeReport> {
    let specs: Vec<TensorSpec> = plan.steps.iter().flat_map(Step::outputs).cloned().collect();
    let mut writer = ShardedWriter::create(target, &specs, source.metadata(), shard_bytes_max)?;
    let mut report = QuantizeReport { source_bytes: source.total_bytes(), ..Default::default() };
    report.output_bytes = specs.iter().filter_map(TensorSpec::bytes).map(|bytes| bytes as u64).sum();
    let (mut done_bytes, total_bytes) = (0, report.source_bytes);
    for step in &plan.steps {
        let mut advance = |tensor: &str, bytes: usize| {
            done_bytes += bytes as u64;
            progress(QuantizeProgress { tensor, done_bytes, total_bytes });
        };
        match step {
            Step::Copy(spec) => {
                let bytes = source.tensor(&spec.name)?.bytes();
                writer.append(&spec.name, bytes)?;
                source.release(&spec.name);
                advance(&spec.name, bytes.len());
                report.copied += 1;
            }
            Step::Quantize { name, outputs, format } => {
                quantize_tensor(source, name, *format, outputs, &mut writer, &mut advance)?;
                report.quantized += 1;
            }
        }
    }
    writer.finish()?;
    Ok(report)
}

impl Step {
    fn outputs(&self) -> &[TensorSpec] {
        match self {
            Step::Copy(spec) => std::slice::from_ref(spec),
            Step::Quantize { outputs, .. } => outputs,
        }
    }
}

/// Quantises one tensor, chunk by chunk of rows.
fn quantize_tensor(
    source: &dyn TensorSource,
    name: &str,
    format: AffineFormat,
    outputs: &[TensorSpec; 3],
    writer: &mut ShardedWriter,
    advance: &mut dyn FnMut(&str, usize),
) -> Result<()> {
    let view = source.tensor(name)?;
    let chunk_rows = (CHUNK_VALUES / view.cols()).clamp(1, view.rows());
    let mut chunk = Chunk::new(format, &view, chunk_rows);
    for start in (0..view.rows()).step_by(chunk_rows) {
        let end = (start + chunk_rows).min(view.rows());
        let parts = chunk.quantize(&view, start, end)?;
        for (spec, bytes) in outputs.iter().zip(parts) {
            writer.append(&spec.name, bytes)?;
        }
        source.release_rows(name, start..end);
        advance(name, (end - start) * view.cols() * view.dtype().size());
    }
    Ok(())
}

/// The buffers of a chunk of rows.
struct Chunk {
    format: AffineFormat,
    values: Vec<f32>,
    packed: Vec<u8>,
    scales: Vec<f32>,
    biases: Vec<f32>,
    scale_bytes: Vec<u8>,
    bias_bytes: Vec<u8>,
}

impl Chunk {
    fn new(format: AffineFormat, view: &TensorView<'_>, rows: usize) -> Chunk {
        let values = rows * view.cols();
        let groups = values / format.group_size();
        let group_bytes = groups * view.dtype().size();
        Chunk {
            format,
            values: vec![0.0; values],
            packed: vec![0; format.packed_bytes(values)],
            scales: vec![0.0; groups],
            biases: vec![0.0; groups],
            scale_bytes: vec![0; group_bytes],
            bias_bytes: vec![0; group_bytes],
        }
    }

    /// The bytes of codes, scales and biases of rows `start..end`.
    fn quantize(&mut self, view: &TensorView<'_>, start: usize, end: usize) -> Result<[&[u8]; 3]> {
        let (cols, dtype) = (view.cols(), view.dtype());
        let values = &mut self.values[..(end - start) * cols];
        let rows = values.par_chunks_exact_mut(cols).enumerate();
        rows.try_for_each(|(i, values)| {
            let row = start + i;
            view.rows_f32(row..row + 1, values)?;
            check_finite(view.name(), row, values)
        })?;
        let groups = values.len() / self.format.group_size();
        let packed = &mut self.packed[..self.format.packed_bytes(values.len())];
        let (scales, biases) = (&mut self.scales[..groups], &mut self.biases[..groups]);
        quantize_rows(self.format, cols, values, packed, scales, biases);
        // The span of a group of huge f32 values can overflow although each of them is finite.
        check_finite(view.name(), start, scales)?;
        let scale_bytes = &mut self.scale_bytes[..groups * dtype.size()];
        let bias_bytes = &mut self.bias_bytes[..groups * dtype.size()];
        float::encode(dtype, scales, scale_bytes);
        float::encode(dtype, biases, bias_bytes);
        Ok([packed, scale_bytes, bias_bytes])
    }
}

fn check_finite(name: &str, row: usize, values: &[f32]) -> Result<()> {
    // Without a way out of the loop it compiles to vector code.
    if values.iter().fold(true, |finite, value| finite & value.is_finite()) {
        return Ok(());
    }
    Err(WeightsError::NotFinite { name: name.into(), row })
}

fn copy_side_files(source: &Path, target: &Path) -> Result<()> {
    // A checkpoint opened by a bare file name has an empty folder, which means the current one.
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
