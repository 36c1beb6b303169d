//! `keel quantize`: converts a checkpoint to another form.

mod convert;

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use keel_array::DType;
use keel_weights::AffineFormat;
use keel_weights::gguf::GgmlType;
use keel_weights::quantize::{GgufRecipe, QuantizeRecipe, is_written, written_types};
use serde_json::json;

use crate::args::{affine_format, parse_bytes};
use crate::failure::usage;
use crate::signals::Signals;
use crate::{output, progress, source};
use evenkeel::{TowerFile, human_bytes};

/// Write a copy of a checkpoint in another form: quantised in MLX's format, as a GGUF file, or dense.
///
/// The source is a folder of safetensors (a dense one for MLX's format) or a GGUF file. As in MLX, routers and gates of
/// shared experts take 8 bits; norms, A_log, dt_bias, the convolution and the vision tower stay unchanged. In a GGUF
/// file these tensors are f32, and the vision tower is left out.
#[derive(Debug, Args)]
pub struct QuantizeArgs {
    /// The checkpoint: a folder, a weights file or a hub name.
    #[arg(value_name = "MODEL")]
    source: String,
    /// The folder to write, or the GGUF file.
    #[arg(value_name = "OUT")]
    target: PathBuf,
    /// The form to write. By default gguf if OUT ends in .gguf, else mlx.
    #[arg(long, value_name = "FORM")]
    to: Option<Form>,
    /// GGUF: the type of matrices (Q4_0, Q5_0, Q8_0, Q4_K, Q5_K, Q6_K, F16, BF16, F32), or a mix: Q4_K_M and Q5_K_M
    /// give Q6_K to the most sensitive matrices.
    /// [default: Q4_K_M]
    #[arg(long = "type", value_name = "TYPE")]
    recipe: Option<String>,
    /// Safetensors: the type of matrices, f32, f16 or bf16. By default the type of the source.
    #[arg(long, value_name = "DTYPE")]
    dtype: Option<Float>,
    /// MLX: bits per weight: 2, 3, 4, 5, 6 or 8. [default: 4]
    #[arg(long, value_name = "N")]
    bits: Option<usize>,
    /// MLX: number of weights that share a scale: 32, 64 or 128. [default: 64]
    #[arg(long, value_name = "N")]
    group_size: Option<usize>,
    /// Another format for some tensors. NAME is the end of a module's path, or the name of a GGUF tensor without
    /// .weight. May be repeated. MLX: NAME=BITS, NAME=BITS/GROUP_SIZE or NAME=dense; GGUF: NAME=TYPE.
    #[arg(long = "module", value_name = "NAME=FORMAT")]
    overrides: Vec<String>,
    /// MLX: most bytes of a safetensors file. Only a file with a single larger tensor exceeds this. [default: 5G]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    shard_size: Option<u64>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Defaults of `--bits`, `--group-size` and `--type`.
const BITS_DEFAULT: usize = 4;
const GROUP_SIZE_DEFAULT: usize = 64;
const RECIPE_DEFAULT: &str = "Q4_K_M";

/// A form that can be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Form {
    /// Safetensors, quantised as MLX does.
    Mlx,
    /// A GGUF file.
    Gguf,
    /// Safetensors, dense.
    Safetensors,
}

impl Form {
    fn name(self) -> &'static str {
        match self {
            Form::Mlx => "mlx",
            Form::Gguf => "gguf",
            Form::Safetensors => "safetensors",
        }
    }
}

/// Types of dense matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Float {
    F32,
    F16,
    Bf16,
}

impl From<Float> for DType {
    fn from(float: Float) -> DType {
        match float {
            Float::F32 => DType::F32,
            Float::F16 => DType::F16,
            Float::Bf16 => DType::BF16,
        }
    }
}

/// A form with its settings.
enum Output {
    Mlx(QuantizeRecipe),
    Gguf(GgufRecipe),
    Safetensors(Option<DType>),
}

/// Runs the command.
pub fn run(args: &QuantizeArgs) -> Result<()> {
    let output_form = output_form(args)?;
    // A signal removes the file that is being written. Finished files stay.
    let _signals = Signals::watch()?;
    let source = source::locate(&args.source, &TowerFile::None)?;
    let bar = progress::bytes("converting", 0);
    let report = convert::convert(&source, &args.target, &output_form, &mut |progress| {
        bar.set_length(progress.total_bytes);
        bar.set_position(progress.done_bytes);
    });
    bar.finish_and_clear();
    let report = report?;
    if args.json {
        return output::json(&json!({
            "quantized": report.quantized,
            "copied": report.copied,
            "other_forms": report.other_forms,
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
    ))?;
    match report.other_forms {
        0 => Ok(()),
        count => output::line(&format!(
            "{count} of them have another form than asked for: their rows are not whole groups or blocks of it"
        )),
    }
}

fn output_form(args: &QuantizeArgs) -> Result<Output> {
    let is_gguf = args.target.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
    let form = args.to.unwrap_or(if is_gguf { Form::Gguf } else { Form::Mlx });
    check_options(args, form)?;
    match form {
        Form::Mlx | Form::Safetensors if is_gguf => Err(usage(format!(
            "{}: this is the name of a GGUF file, but --to asks for a folder of safetensors",
            args.target.display()
        ))),
        Form::Mlx => {
            let group_size = args.group_size.unwrap_or(GROUP_SIZE_DEFAULT);
            let mut recipe =
                QuantizeRecipe::new(affine_format(args.bits.unwrap_or(BITS_DEFAULT), group_size)?);
            recipe.shard_bytes_max = args.shard_size.unwrap_or(recipe.shard_bytes_max);
            recipe.overrides = overrides(args, |text| parse_override(text, group_size))?;
            Ok(Output::Mlx(recipe))
        }
        Form::Gguf if !is_gguf => {
            Err(usage(format!("{}: the name of a GGUF file must end in .gguf", args.target.display())))
        }
        Form::Gguf => {
            let name = args.recipe.as_deref().unwrap_or(RECIPE_DEFAULT);
            let unknown = || {
                usage(format!(
                    "--type {name} is not a type that can be written; there are {}, Q4_K_M and Q5_K_M",
                    type_names()
                ))
            };
            let mut recipe = GgufRecipe::from_name(name).ok_or_else(unknown)?;
            recipe.overrides = overrides(args, parse_type)?;
            Ok(Output::Gguf(recipe))
        }
        Form::Safetensors => Ok(Output::Safetensors(args.dtype.map(DType::from))),
    }
}

/// Refuses options that belong to another form.
fn check_options(args: &QuantizeArgs, form: Form) -> Result<()> {
    let given = [
        ("--type", args.recipe.is_some(), &[Form::Gguf][..]),
        ("--dtype", args.dtype.is_some(), &[Form::Safetensors]),
        ("--bits", args.bits.is_some(), &[Form::Mlx]),
        ("--group-size", args.group_size.is_some(), &[Form::Mlx]),
        ("--shard-size", args.shard_size.is_some(), &[Form::Mlx]),
        ("--module", !args.overrides.is_empty(), &[Form::Mlx, Form::Gguf]),
    ];
    let Some((option, _, forms)) =
        given.iter().find(|(_, is_given, forms)| *is_given && !forms.contains(&form))
    else {
        return Ok(());
    };
    let names: Vec<&str> = forms.iter().map(|form| form.name()).collect();
    Err(usage(format!("{option} is for --to {}, but {} is written", names.join(" and "), form.name())))
}

fn overrides<T>(
    args: &QuantizeArgs,
    parse: impl Fn(&str) -> Result<(String, T)>,
) -> Result<BTreeMap<String, T>> {
    let wrong = |text: &str, error: anyhow::Error| usage(format!("--module {text}: {error:#}"));
    args.overrides.iter().map(|text| parse(text).map_err(|error| wrong(text, error))).collect()
}

/// The types of matrices in a GGUF file that is written.
fn type_names() -> String {
    written_types().map(|kind| kind.to_string()).collect::<Vec<_>>().join(", ")
}

fn parse_type(text: &str) -> Result<(String, GgmlType)> {
    let (name, wanted) = text.split_once('=').context("expected NAME=TYPE")?;
    let kind = GgmlType::from_name(wanted).filter(|&kind| is_written(kind));
    let unknown = || format!("{wanted} is not a type that can be written; there are {}", type_names());
    Ok((name.into(), kind.with_context(unknown)?))
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
    use std::collections::BTreeSet;

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
        let (name, kind) = parse_type("attn_v=q6_k").expect("a type");
        assert_eq!((name.as_str(), kind.to_string()), ("attn_v", "Q6_K".into()));
        for wrong in ["x", "x=4", "x=Q2_K", "x=I32"] {
            assert!(parse_type(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn help_and_messages_name_the_types_that_are_written() {
        let message = parse_type("x=Q2_K").expect_err("not written").to_string();
        assert!(
            message.ends_with("there are F32, F16, Q4_0, Q5_0, Q8_0, Q4_K, Q5_K, Q6_K, BF16"),
            "{message}"
        );
        let command = QuantizeArgs::augment_args(clap::Command::new("quantize"));
        let option = command.get_arguments().find(|arg| arg.get_long() == Some("type")).expect("an option");
        let help = option.get_help().expect("a help text").to_string();
        let (_, listed) = help.split_once('(').expect("a list of types");
        let (listed, _) = listed.split_once(')').expect("the end of the list");
        let sorted = |names: &str| names.split(", ").map(str::to_string).collect::<BTreeSet<_>>();
        assert_eq!(sorted(listed), sorted(&type_names()));
    }
}
