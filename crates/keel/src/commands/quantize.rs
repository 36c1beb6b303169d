//! `keel quantize`: a checkpoint in MLX's affine form.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use keel_weights::AffineFormat;
use keel_weights::quantize::{QuantizeRecipe, quantize_checkpoint};
use serde_json::json;

use crate::args::{affine_format, parse_bytes};
use crate::report::human_bytes;
use crate::{output, progress, source};

/// Write a quantised copy of a checkpoint, in the form that MLX writes.
///
/// Routers and gates of shared experts take 8 bits; norms, A_log, dt_bias, the convolution and the vision tower stay
/// as they are.
#[derive(Debug, Args)]
pub struct QuantizeArgs {
    /// The checkpoint: a folder, a weights file or a hub name.
    #[arg(value_name = "MODEL")]
    source: String,
    /// The folder to write.
    #[arg(value_name = "OUT")]
    target: PathBuf,
    /// Bits per weight: 2, 3, 4, 5, 6 or 8.
    #[arg(long, value_name = "N", default_value_t = 4)]
    bits: usize,
    /// Weights that share a scale: 32, 64 or 128.
    #[arg(long, value_name = "N", default_value_t = 64)]
    group_size: usize,
    /// Another format for a module, by the end of its path: NAME=BITS, NAME=BITS/GROUP_SIZE or NAME=dense; may be
    /// repeated.
    #[arg(long = "module", value_name = "NAME=FORMAT")]
    overrides: Vec<String>,
    /// Bytes of a weights file at most, unless one tensor alone has more.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "5G")]
    shard_size: u64,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &QuantizeArgs) -> Result<()> {
    let mut recipe = QuantizeRecipe::new(affine_format(args.bits, args.group_size)?);
    recipe.shard_bytes_max = args.shard_size;
    for text in &args.overrides {
        let (module, format) =
            parse_override(text, args.group_size).with_context(|| format!("--module {text}"))?;
        recipe.overrides.insert(module, format);
    }
    let source = source::locate(Some(&args.source))?;
    let bar = progress::bytes("quantising", 0);
    let report = quantize_checkpoint(&source, &args.target, &recipe, &mut |progress| {
        bar.set_length(progress.total_bytes);
        bar.set_position(progress.done_bytes);
    });
    bar.finish_and_clear();
    let report = report?;
    if args.json {
        return output::json(&json!({
            "quantized": report.quantized,
            "copied": report.copied,
            "source_bytes": report.source_bytes,
            "output_bytes": report.output_bytes,
        }));
    }
    output::line(&format!(
        "{}: {} tensors quantised, {} copied, {} from {}",
        args.target.display(),
        report.quantized,
        report.copied,
        human_bytes(report.output_bytes),
        human_bytes(report.source_bytes)
    ))
}

fn parse_override(text: &str, group_size: usize) -> Result<(String, Option<AffineFormat>)> {
    let (module, wanted) = text.split_once('=').context("expected NAME=FORMAT")?;
    if wanted == "dense" {
        return Ok((module.into(), None));
    }
    let (bits, group_size) = match wanted.split_once('/') {
        Some((bits, group_size)) => {
            (bits, group_size.parse().context("the group size is not a whole number")?)
        }
        None => (wanted, group_size),
    };
    let bits = bits.parse().context("the bits are neither a whole number nor dense")?;
    Ok((module.into(), Some(affine_format(bits, group_size)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overrides_name_a_module_and_a_format() {
        let parse = |text| parse_override(text, 32).map_err(|e| e.to_string());
        assert_eq!(parse("lm_head=dense"), Ok(("lm_head".into(), None)));
        assert_eq!(parse("mlp.down_proj=6"), Ok(("mlp.down_proj".into(), AffineFormat::new(6, 32))));
        assert_eq!(parse("x=8/128"), Ok(("x".into(), AffineFormat::new(8, 128))));
        for wrong in ["x", "x=", "x=7", "x=4/48", "x=4/"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
