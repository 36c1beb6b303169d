//! `keel plan`: memory before it is needed.

use anyhow::{Context, Result};
use clap::Args;
use keel_engine::EngineOptions;
use keel_engine::plan::{fit, steps};
use serde_json::json;

use crate::args::{DeviceArgs, EngineArgs, SpeculateArgs, Subject, SubjectArgs, drafts_max, parse_bytes};
use crate::driver::ROOM_BYTES;
use crate::output;
use crate::placement::settle;
use crate::report::{categories, human_bytes, plan_table};
use crate::session::{self, context_for};

/// Print the memory that a run will take, by category, without loading weights.
///
/// The numbers are those of `generate` with the same context. On a machine with the GPU that --device names, what its driver
/// takes beside them is measured and printed, too. With --limit, print instead the longest context and the largest batch
/// that fit. With --verbose, also the shapes that steps come in.
#[derive(Debug, Args)]
pub struct PlanArgs {
    #[command(flatten)]
    subject: SubjectArgs,
    /// Tokens of a sequence, prompt and generated together, rounded up to pages of 256.
    #[arg(long, value_name = "N", default_value_t = 4096)]
    context: usize,
    /// Sequences at once.
    #[arg(long, value_name = "B", default_value_t = 1)]
    batch: usize,
    /// Host memory for parked sequences, as with `keel serve --overcommit`.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value_t = 0)]
    swap: u64,
    /// Print the longest context (for the batch) and the largest batch (for the context) that fit in so many bytes.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    limit: Option<u64>,
    #[command(flatten)]
    speculate: SpeculateArgs,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print one JSON object of category to bytes (and `driver` on a GPU); with --limit, of `context` and `batch`.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &PlanArgs, verbose: bool) -> Result<()> {
    let model = args.subject.open()?;
    let subject = args.subject.subject(model.as_ref(), args.speculate.is_asked_for())?;
    let context = context_for(&subject.config, args.context).context("--context")?;
    let swap_bytes = args.swap as usize;
    let options = |device| {
        let drafts = drafts_max(args.speculate.for_subject(&subject, device, model.is_none())?);
        Ok(EngineOptions { context, sequences: args.batch, drafts, swap_bytes, ..args.engine.options() })
    };
    settle(&args.device, &*subject.parameters, &subject.json, |device| options(device.device()));
    let options = options(args.device.device())?;
    match args.limit {
        Some(limit) => print_fit(args, &subject, options, limit),
        None => {
            print_plan(args, &subject, options)?;
            if verbose && !args.json { print_steps(args, options) } else { Ok(()) }
        }
    }
}

fn print_steps(args: &PlanArgs, options: EngineOptions) -> Result<()> {
    let backend = args.device.planning_backend(options.compute);
    output::line("")?;
    steps(&*backend, options).iter().try_for_each(|line| output::line(line))
}

fn print_plan(args: &PlanArgs, subject: &Subject<'_>, options: EngineOptions) -> Result<()> {
    let planned = session::plan(&args.device, &*subject.parameters, &subject.json, options)?;
    args.device.announce();
    let driver = session::driver(&args.device, options.compute);
    if args.json {
        let mut object = categories(&planned);
        if let Some(driver) = driver {
            object["driver"] = driver.to_json();
        }
        return output::json(&object);
    }
    output::line(&format!("context {}, batch {}\n", options.context, options.sequences))?;
    output::text(&plan_table(&planned))?;
    let Some(driver) = driver else { return Ok(()) };
    output::line(&format!("driver      {}; code is added as it is first used", driver.to_line()))?;
    let (limit, room) = (human_bytes(driver.limit()), human_bytes(ROOM_BYTES));
    output::line(&format!(
        "limit       {limit} (by default: what is free now, less {room} for code and others)"
    ))
}

fn print_fit(args: &PlanArgs, subject: &Subject<'_>, options: EngineOptions, limit: u64) -> Result<()> {
    let backend = args.device.planning_backend(options.compute);
    let fit = fit(&backend, &*subject.parameters, &subject.json, options, limit)?;
    if args.json {
        return output::json(&json!({"limit": limit, "context": fit.context, "batch": fit.sequences}));
    }
    let within = human_bytes(limit);
    output::line(&format!("longest context for a batch of {}: {}", options.sequences, fit.context))?;
    output::line(&format!("largest batch for a context of {}: {}", options.context, fit.sequences))?;
    output::line(&format!("within {limit} bytes ({within}); 0 means that nothing fits"))
}
