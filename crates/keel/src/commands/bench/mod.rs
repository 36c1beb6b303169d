//! `keel bench`: speed, beside what the machine allows at most.

mod cost;
mod machine;
mod plot;
mod runs;

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use keel_array::{DType, WeightFormat};
use keel_engine::EngineOptions;
use keel_models::loading::{CheckpointParameters, Parameters, RandomParameters};
use keel_models::{HybridConfig, SHAPE_NAMES};
use keel_weights::affine::{AFFINE_BITS, AFFINE_GROUP_SIZES};
use keel_weights::{AffineFormat, TensorSource};
use serde_json::{Value, json};

use crate::args::{DeviceArgs, EngineArgs};
use crate::report::{Memory, human_bytes};
use crate::session::{self, Session, context_for};
use crate::source::Model;
use crate::{output, source};
use cost::Cost;
use machine::Machine;
use plot::Recorder;
use runs::{Runs, Spread};

/// Time the prefill of a random prompt and the decoding behind it.
///
/// Loading and a short warm-up come first and are not timed. With --shape the weights are random and made in place.
/// Beside the speed stands the floor: what the machine's memory bandwidth (decode) or arithmetic (prefill), measured
/// in the same run, would allow at most.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// A folder, a weights file or a hub name; without it and --shape, the built-in model.
    #[arg(long, short, value_name = "MODEL")]
    model: Option<String>,
    /// A published shape with random weights.
    #[arg(long, value_name = "NAME", conflicts_with = "model")]
    shape: Option<String>,
    /// Bits per random weight: 2, 3, 4, 5, 6 or 8.
    #[arg(long, value_name = "N", requires = "shape", conflicts_with = "dtype")]
    bits: Option<usize>,
    /// Random weights that share a scale: 32, 64 or 128.
    #[arg(long, value_name = "N", requires = "shape", conflicts_with = "dtype", default_value_t = 64)]
    group_size: usize,
    /// Dense random weights of this type.
    #[arg(long, value_enum, value_name = "TYPE", requires = "shape")]
    dtype: Option<DTypeArg>,
    /// Tokens of the prompt.
    #[arg(long, value_name = "N", default_value_t = 512)]
    prompt: usize,
    /// Tokens to decode behind it.
    #[arg(long = "gen", value_name = "N", default_value_t = 128)]
    generated: usize,
    /// Sequences to decode side by side.
    #[arg(long, value_name = "B", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=4096))]
    batch: u16,
    /// Timed repeats.
    #[arg(long, value_name = "R", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    repeat: u16,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    device: DeviceArgs,
    /// Draw memory over time per category to an SVG file.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum DTypeArg {
    Bf16,
    F16,
    F32,
}

/// What is timed.
struct Subject<'a> {
    name: String,
    config: HybridConfig,
    json: Value,
    parameters: Box<dyn Parameters + 'a>,
    /// Whether linear layers are quantised, and so multiplied in 8-bit integers.
    quantised: bool,
}

/// What was measured.
struct Report {
    subject: String,
    runs: Runs,
    machine: Machine,
    cost: Cost,
    memory: Memory,
    load_s: f64,
    /// Tokens per second if nothing but memory, or arithmetic, took time.
    decode_floor: f64,
    prefill_floor: Option<f64>,
}

/// Runs the command.
pub fn run(args: &BenchArgs) -> Result<()> {
    if args.prompt == 0 || args.generated == 0 {
        bail!("--prompt and --gen take at least one token");
    }
    let model = if args.shape.is_none() { Some(source::open(args.model.as_deref())?) } else { None };
    let subject = subject(args, model.as_ref())?;
    let tokens = args.prompt.saturating_add(args.generated);
    let options = EngineOptions {
        context: context_for(&subject.config, tokens).context("--prompt and --gen")?,
        sequences: args.batch.into(),
        ..args.engine.options()
    };
    let report = measure(args, &subject, options)?;
    if args.json { output::json(&report.to_json(args)) } else { output::text(&report.to_text(args)) }
}

fn subject<'a>(args: &BenchArgs, model: Option<&'a Model>) -> Result<Subject<'a>> {
    if let Some(model) = model {
        return Ok(Subject {
            name: model.checkpoint.folder().display().to_string(),
            config: model.config.clone(),
            json: model.checkpoint.config().clone(),
            parameters: Box::new(CheckpointParameters(&model.checkpoint)),
            quantised: model.checkpoint.quantization().is_some(),
        });
    }
    let name = args.shape.clone().unwrap_or_default();
    let Some(json) = keel_models::shape(&name) else {
        bail!("--shape {name} is not known; there are {}", SHAPE_NAMES.join(", "));
    };
    let format = random_format(args)?;
    let config = keel_models::read_config(&json)?;
    let quantised = matches!(format, WeightFormat::Affine { .. });
    Ok(Subject { name, config, json, parameters: Box::new(RandomParameters { format }), quantised })
}

/// The format of random weights: 4 bits in groups of 64 unless another is asked for.
fn random_format(args: &BenchArgs) -> Result<WeightFormat> {
    if let Some(dtype) = args.dtype {
        return Ok(WeightFormat::Dense(match dtype {
            DTypeArg::Bf16 => DType::BF16,
            DTypeArg::F16 => DType::F16,
            DTypeArg::F32 => DType::F32,
        }));
    }
    let (bits, group_size) = (args.bits.unwrap_or(4), args.group_size);
    if AffineFormat::new(bits, group_size).is_none() {
        bail!(
            "{bits} bits in groups of {group_size} do not exist: bits are one of {AFFINE_BITS:?}, group sizes one \
             of {AFFINE_GROUP_SIZES:?}"
        );
    }
    Ok(WeightFormat::Affine { bits: bits as u8, group_size: group_size as u16, scale_dtype: DType::BF16 })
}

fn measure(args: &BenchArgs, subject: &Subject<'_>, options: EngineOptions) -> Result<Report> {
    let machine = Machine::measure(&args.device)?;
    let runtime = session::runtime(&args.device)?;
    let recorder = args.plot.as_ref().map(|_| Recorder::start(runtime.ledger()));
    let mut session = Session::open(&args.device, &runtime, &*subject.parameters, &subject.json, options)?;
    let runs = Runs::time(&mut session.engine, args.prompt, args.generated, args.repeat.into())?;
    if let (Some(recorder), Some(path)) = (recorder, &args.plot) {
        recorder.stop().draw(path)?;
    }
    let cost = Cost::of(&session.engine, &args.device, &*subject.parameters, &subject.json)?;
    let batch = options.sequences;
    let depth = args.prompt + args.generated / 2;
    let decode_floor = machine.read_bytes_per_s / cost.decode_bytes(batch, depth) * batch as f64;
    let peak = machine.peak_of(options.compute, subject.quantised);
    Ok(Report {
        subject: subject.name.clone(),
        runs,
        memory: session.memory(),
        load_s: session.load_time.as_secs_f64(),
        decode_floor,
        prefill_floor: peak.map(|peak| peak / (cost.prefill_ops(args.prompt) / args.prompt as f64)),
        machine,
        cost,
    })
}

impl Report {
    fn to_json(&self, args: &BenchArgs) -> Value {
        let (prefill, decode) = (self.runs.prefill(), self.runs.decode());
        json!({
            "model": self.subject,
            "device": "cpu",
            "instructions": self.machine.isa.to_string(),
            "threads": self.machine.threads,
            "prompt_tokens": args.prompt,
            "generated_tokens": args.generated,
            "batch": args.batch,
            "repeat": args.repeat,
            "prefill_tokens_per_second": prefill.median,
            "prefill_tokens_per_second_min": prefill.min,
            "prefill_tokens_per_second_max": prefill.max,
            "prefill_floor_tokens_per_second": self.prefill_floor,
            "decode_tokens_per_second": decode.median,
            "decode_tokens_per_second_min": decode.min,
            "decode_tokens_per_second_max": decode.max,
            "decode_floor_tokens_per_second": self.decode_floor,
            "decode_share_of_floor": decode.median / self.decode_floor,
            "read_gb_per_s": self.machine.read_bytes_per_s / 1e9,
            "weights_bytes": self.cost.weights_bytes,
            "bytes_per_decoded_token": self.cost.decode_bytes(1, args.prompt + args.generated / 2),
            "load_s": self.load_s,
            "memory": self.memory.to_json(),
        })
    }

    fn to_text(&self, args: &BenchArgs) -> String {
        let (prefill, decode) = (self.runs.prefill(), self.runs.decode());
        let row = |name: &str, tokens: usize, spread: Spread, floor: Option<f64>, by: &str| {
            let floor = floor.map_or("not measured".into(), |floor| {
                format!("{floor:.1} by {by}: {:.0}% reached", 100.0 * spread.median / floor)
            });
            format!("{name} {tokens:>6}  {spread}  floor {floor}\n")
        };
        let weights = human_bytes(self.cost.weights_bytes);
        let mut text = format!(
            "{}: weights {weights}, batch {}, {} threads, {}\n",
            self.subject, args.batch, self.machine.threads, self.machine.isa
        );
        text += &format!(
            "memory read {:.1} GB/s; loaded in {:.2} s\n\n",
            self.machine.read_bytes_per_s / 1e9,
            self.load_s
        );
        text += "         tokens  tokens/s, median (min..max)\n";
        text += &row("prefill ", args.prompt, prefill, self.prefill_floor, "arithmetic");
        text += &row("decode  ", args.generated, decode, Some(self.decode_floor), "bandwidth");
        text + "\n" + &self.memory.to_table()
    }
}
