//! `keel bench`: speed, compared with the limits of the machine.

mod cost;
mod drawing;
mod machine;
mod plot;
mod profile;
mod runs;
mod serve;
mod speculative;

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use keel_cpu::CpuBackend;
use keel_engine::{EarlySteps, EngineOptions, SpeculationOptions};
use serde_json::{Value, json};

use crate::args::{Device, DeviceArgs, EngineArgs, SpeculateArgs, Subject, SubjectArgs};
use crate::failure::usage;
use crate::output;
use crate::placed_model::ResolvedOptions;
use crate::report::Memory;
use crate::session::{self, Session};
use cost::Cost;
use drawing::Drawing;
use evenkeel::human_bytes;
use evenkeel::{Determinism, context_for};
use machine::Machine;
use plot::Recorder;
use profile::Profile;
use runs::{Runs, Spread};
use speculative::SpeculativeRuns;

/// Measure the speed of prefill on a random prompt, and of decoding after it.
///
/// Loading and a short warm-up are not timed. With --shape the weights are random. The report compares the speed with
/// the most that the machine allows: by memory bandwidth for decoding, by arithmetic for prefill. Both limits are
/// measured in the same run.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct BenchArgs {
    #[command(subcommand)]
    what: Option<What>,
    #[command(flatten)]
    subject: SubjectArgs,
    /// Tokens of the prompt.
    #[arg(long, value_name = "N", default_value_t = 512)]
    prompt: usize,
    /// Tokens to decode after the prompt.
    #[arg(long = "gen", value_name = "N", default_value_t = 128)]
    generated: usize,
    /// Sequences to decode together.
    #[arg(long, value_name = "B", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=4096))]
    batch: u16,
    /// Timed repeats.
    #[arg(long, value_name = "R", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    repeat: u16,
    /// How the next token is drawn after each timed step.
    #[arg(long, value_enum, default_value_t)]
    draw: Drawing,
    #[command(flatten)]
    speculate: SpeculateArgs,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Write a plot of memory over time, by category, to an SVG file.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Run once more and print the time of each operation (CPU only).
    #[arg(long)]
    profile: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Other measurements.
#[derive(Debug, Subcommand)]
enum What {
    Serve(serve::BenchServeArgs),
}

/// The results.
struct Report {
    subject: String,
    runs: Runs,
    /// The runs with drafts and the plain runs in turn.
    speculative: Option<SpeculativeRuns>,
    /// Time per operation, from a separate run.
    profile: Option<Profile>,
    machine: Machine,
    cost: Cost,
    memory: Memory,
    load_s: f64,
    /// Tokens per second if only memory traffic took time. [`Report::prefill_floor`] is the same for arithmetic.
    decode_floor: f64,
    prefill_floor: Option<f64>,
}

/// Runs the command.
pub fn run(args: &BenchArgs) -> Result<()> {
    if let Some(What::Serve(args)) = &args.what {
        return serve::run(args);
    }
    if args.prompt == 0 || args.generated == 0 {
        return Err(usage("--prompt and --gen take at least one token"));
    }
    let model = args.subject.open()?;
    let subject = args.subject.subject(model.as_ref(), args.speculate.wants_head())?;
    let tokens = args.prompt.saturating_add(args.generated);
    let context = context_for(&subject.config, tokens).context("--prompt and --gen")?;
    let speculation = args.speculate.for_subject(&subject, &args.device, model.is_none())?;
    let (sequences, early_steps) = (args.batch.into(), EarlySteps::Prompt(args.prompt));
    let options = EngineOptions { context, sequences, early_steps, ..args.engine.options() };
    let ResolvedOptions { options, speculation } =
        subject.on(&args.device).resolve_drafting(options, speculation)?;
    let report = measure(args, &subject, options, speculation)?;
    if args.json { output::json(&report.to_json(args)) } else { output::text(&report.to_text(args)) }
}

fn measure(
    args: &BenchArgs,
    subject: &Subject<'_>,
    options: EngineOptions,
    speculation: Option<SpeculationOptions>,
) -> Result<Report> {
    let machine = Machine::measure(&args.device)?;
    let Opened { mut session, recorder, profiled } = open(args, subject, options)?;
    session.make_rounds_ready()?;
    let repeats = usize::from(args.repeat);
    let runs = Runs::time(&mut session.engine, args.prompt, args.generated, repeats, args.draw)?;
    let mut speculative = None;
    if let Some(how) = speculation {
        // Otherwise a near tie may fall differently in a pass of several rows.
        let is_exact =
            args.device.device() == Device::Cpu || args.device.options().determinism != Determinism::Off;
        let mut runs = SpeculativeRuns::new(how, is_exact);
        session.engine = runs.time(session.engine, args.prompt, args.generated, repeats)?;
        speculative = Some(runs);
    }
    let profile = profiled
        .map(|backend| Profile::take(&mut session.engine, &backend, args.prompt, args.generated, args.draw))
        .transpose()?;
    if let (Some(recorder), Some(path)) = (recorder, &args.plot) {
        recorder.stop().draw(path)?;
    }
    let cost = Cost::of(&session.engine, subject.on(&args.device))?;
    let batch = options.sequences;
    let depth = args.prompt + args.generated / 2;
    let decode_floor = machine.read_bytes_per_s / cost.decode_bytes(batch, depth) * batch as f64;
    let peak = machine.peak_of(options.compute, subject.quantised);
    Ok(Report {
        subject: subject.name.clone(),
        runs,
        speculative,
        profile,
        memory: session.memory(),
        load_s: session.load_time.as_secs_f64(),
        decode_floor,
        prefill_floor: peak.map(|peak| peak / (cost.prefill_ops(args.prompt) / args.prompt as f64)),
        machine,
        cost,
    })
}

/// A loaded model.
struct Opened {
    session: Session,
    /// Records its memory.
    recorder: Option<Recorder>,
    /// The backend that records the time of each operation.
    profiled: Option<Arc<CpuBackend>>,
}

/// Loads the model on its device or devices. Also starts the recorders of the memory and of the time of each operation,
/// if they are asked for.
fn open(args: &BenchArgs, subject: &Subject<'_>, options: EngineOptions) -> Result<Opened> {
    let device = &args.device;
    if device.split.is_split() {
        if args.plot.is_some() || args.profile {
            return Err(usage("--plot and --profile are of one device: leave out --devices"));
        }
        let session = Session::start(subject.on(device), options)?;
        return Ok(Opened { session, recorder: None, profiled: None });
    }
    let (runtime, profiled) = if args.profile {
        let backend = Arc::new(device.profiled_backend()?);
        (device.options().runtime_on(Arc::clone(&backend) as _), Some(backend))
    } else {
        (session::runtime(device, options.compute)?, None)
    };
    let recorder = args.plot.as_ref().map(|_| Recorder::start(runtime.ledger()));
    let session = Session::open(subject.on(device), &runtime, options)?;
    Ok(Opened { session, recorder, profiled })
}

impl Report {
    fn to_json(&self, args: &BenchArgs) -> Value {
        let (prefill, decode) = (self.runs.prefill(), self.runs.decode());
        let mut object = json!({
            "model": self.subject,
            "device": self.machine.device,
            "instructions": self.machine.instructions,
            "threads": self.machine.threads,
            "prompt_tokens": args.prompt,
            "generated_tokens": args.generated,
            "batch": args.batch,
            "repeat": args.repeat,
            "draw": args.draw.name(),
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
        });
        if let Some(speculative) = &self.speculative {
            object["speculation"] = speculative.to_json();
        }
        if let Some(profile) = &self.profile {
            object["profile"] = profile.to_json();
        }
        object
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
        let mut text =
            format!("{}: weights {weights}, batch {}, {}\n", self.subject, args.batch, self.machine);
        text += &format!(
            "memory read {:.1} GB/s; loaded in {:.2} s\n\n",
            self.machine.read_bytes_per_s / 1e9,
            self.load_s
        );
        text += "         tokens  tokens/s, median (min..max)\n";
        text += &row("prefill ", args.prompt, prefill, self.prefill_floor, "arithmetic");
        text += &row("decode  ", args.generated, decode, Some(self.decode_floor), "bandwidth");
        if let Some(speculative) = &self.speculative {
            text += &speculative.to_text(args.generated);
        }
        if let Some(profile) = &self.profile {
            text += &profile.to_text();
        }
        text + "\n" + &self.memory.to_table()
    }
}
