//! Converts a checkpoint from one form to another.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail};
use keel_models::HybridConfig;
use keel_models::gguf::{CheckpointAsGguf, GgufAsCheckpoint, portable_config, transformers_config};
use keel_text::{GenerationDefaults, TextFiles};
use keel_weights::Checkpoint;
use keel_weights::gguf::GgufFile;
use keel_weights::quantize::{
    Dequantized, GgufRecipe, QuantizeProgress, QuantizeReport, SafetensorsForm, copy_side_files, metadata_of,
    quantize_checkpoint, write_config, write_gguf, write_safetensors,
};
use serde_json::Value;

use super::Output;
use crate::pooling;
use evenkeel::{gguf, is_gguf};

type Progress<'p> = dyn FnMut(QuantizeProgress<'_>) + 'p;

/// Writes the model at `source` in the requested form.
///
/// # Errors
/// The source cannot be read or expressed in that form, or the target cannot be written.
pub fn convert(
    source: &Path,
    target: &Path,
    output: &Output,
    progress: &mut Progress<'_>,
) -> Result<QuantizeReport> {
    if let Output::Gguf(_) = output
        && target.exists()
    {
        bail!("{} exists already; name another file", target.display());
    }
    if is_gguf(source) {
        let file = GgufFile::open(source)?;
        return from_gguf(&file, source, target, output, progress);
    }
    let checkpoint = Checkpoint::open(source)?;
    let report = match output {
        Output::Gguf(recipe) => to_gguf(&checkpoint, target, recipe, progress)?,
        Output::Mlx(recipe) => {
            let report = quantize_checkpoint(source, target, recipe, progress)?;
            pooling::copy(checkpoint.folder(), target)?;
            report
        }
        Output::Safetensors(dtype) => {
            let (dense, form) = (Dequantized::new(&checkpoint)?, SafetensorsForm::Dense(*dtype));
            let (report, section) =
                write_safetensors(&dense, target, checkpoint.metadata(), &form, progress)?;
            copy_side_files(checkpoint.folder(), target)?;
            pooling::copy(checkpoint.folder(), target)?;
            write_config(target, checkpoint.config(), section)?;
            report
        }
    };
    Ok(QuantizeReport { source_bytes: checkpoint.total_bytes(), ..report })
}

fn to_gguf(
    checkpoint: &Checkpoint,
    target: &Path,
    recipe: &GgufRecipe,
    progress: &mut Progress<'_>,
) -> Result<QuantizeReport> {
    let folder = checkpoint.folder();
    let config = keel_models::read_config(checkpoint.config())?;
    let tensors = CheckpointAsGguf::new(checkpoint, &config)?;
    let mut metadata = keel_models::gguf::metadata(checkpoint.config(), &config, tensors.has_mtp_head())?;
    let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or("model");
    metadata.string("general.name", name);
    if folder.join("tokenizer.json").exists() {
        let files = TextFiles::read(folder)?;
        let vocabulary =
            files.vocabulary(config.vocab).context("the tokenizer cannot be written into a GGUF file")?;
        gguf::write_vocabulary(&vocabulary, &mut metadata);
        gguf::write_sampling(&GenerationDefaults::new(&files)?, &mut metadata);
    } else {
        metadata.string("tokenizer.ggml.model", "none");
    }
    Ok(write_gguf(&tensors, target, metadata, recipe, progress)?)
}

fn from_gguf(
    file: &GgufFile,
    path: &Path,
    target: &Path,
    output: &Output,
    progress: &mut Progress<'_>,
) -> Result<QuantizeReport> {
    let form = match output {
        Output::Gguf(recipe) => return Ok(write_gguf(file, target, metadata_of(file), recipe, progress)?),
        Output::Mlx(recipe) => SafetensorsForm::Affine(recipe),
        Output::Safetensors(dtype) => SafetensorsForm::Dense(*dtype),
    };
    let json: Value = keel_models::gguf::config(file)?;
    let config: HybridConfig = keel_models::read_config(&json)?;
    let tensors = GgufAsCheckpoint::new(file, &config)?;
    let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    let (report, section) = write_safetensors(&tensors, target, &metadata, &form, progress)?;
    if gguf::has_vocabulary(file) {
        let files = gguf::text_files(file, path.display().to_string())?;
        for (name, bytes) in files.to_write() {
            let path = target.join(name);
            std::fs::write(&path, bytes).with_context(|| format!("cannot write {}", path.display()))?;
        }
    }
    // mlx-lm does not know the names that transformers has for text models.
    let written = match output {
        Output::Mlx(_) => portable_config(&json, &config),
        _ => transformers_config(&json, &config),
    };
    write_config(target, &written, section)?;
    let source_bytes = file.entries().map(|(_, entry)| entry.range.len() as u64).sum();
    Ok(QuantizeReport { source_bytes, ..report })
}
