//! The conversion itself: read rows, quantise them, append them to the output.

use std::{fs, io, path::Path};

use rayon::prelude::*;

use super::{
    plan::{Plan, Target},
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
/// `quantization` section in config.json with an override for each module that differs from the rest. Experts become
/// MLX's stacks, `switch_mlp.{gate,up,down}_proj`. **All other names and layouts are the source's**: `conv1d` stays
/// `(C, 1, K)`, norms keep their offset and the multi-token-prediction head is kept, which readers of `qwen3_5` tell by the
/// convolution; overrides are under the name in the source and under that in mlx-lm. Tokenizer, template and other json
/// files are copied; config.json is written last.
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
    let mut writer = ShardedWriter::create(target, &plan.outputs, source.metadata(), shard_bytes_max)?;
    let mut report = QuantizeReport { source_bytes: source.total_bytes(), ..Default::default() };
    report.output_bytes = plan.outputs.iter().filter_map(TensorSpec::bytes).map(|bytes| bytes as u64).sum();
    let (mut done_bytes, total_bytes) = (0, report.source_bytes);
    for step in &plan.steps {
        let mut advance = |bytes: usize| {
            done_bytes += bytes as u64;
            progress(QuantizeProgress { tensor: &step.name, done_bytes, total_bytes });
        };
        let view = source.tensor(&step.name)?;
        match &step.targets[..] {
            [Target::Copy(to)] => {
                writer.append(to, view.bytes())?;
                advance(view.bytes().len());
            }
            targets => write_turns(source, &view, (targets, step.turn_rows), &mut writer, &mut advance)?,
        }
        source.release(&step.name);
        let is_quantized = step.targets.iter().any(|target| matches!(target, Target::Quantize { .. }));
        *(if is_quantized { &mut report.quantized } else { &mut report.copied }) += 1;
    }
    writer.finish()?;
    Ok(report)
}

/// Writes the rows of a tensor to its targets, which take turns.
fn write_turns(
    source: &dyn TensorSource,
    view: &TensorView<'_>,
    (targets, turn_rows): (&[Target], usize),
    writer: &mut ShardedWriter,
    advance: &mut dyn FnMut(usize),
) -> Result<()> {
    let turn_rows = if turn_rows == 0 { view.rows() } else { turn_rows };
    let row_bytes = view.cols() * view.dtype().size();
    let chunk_rows = (CHUNK_VALUES / view.cols()).clamp(1, turn_rows);
    let mut chunk: Option<Chunk> = None;
    for (turn, target) in (0..view.rows()).step_by(turn_rows).zip(targets.iter().cycle()) {
        for start in (turn..turn + turn_rows).step_by(chunk_rows) {
            let rows = start..(start + chunk_rows).min(turn + turn_rows);
            match target {
                Target::Copy(to) => {
                    writer.append(to, &view.bytes()[rows.start * row_bytes..rows.end * row_bytes])?;
                }
                Target::Quantize { outputs, format } => {
                    let chunk = match &mut chunk {
                        Some(chunk) if chunk.format == *format => chunk,
                        other => other.insert(Chunk::new(*format, view, chunk_rows)),
                    };
                    for (name, bytes) in outputs.iter().zip(chunk.quantize(view, rows.start, rows.end)?) {
                        writer.append(name, bytes)?;
                    }
                }
            }
            source.release_rows(view.name(), rows.clone());
            advance(rows.len() * row_bytes);
        }
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
