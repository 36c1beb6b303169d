//! `keel plan`: prints the memory of a run before the run.

use std::sync::Arc;

use anyhow::{Context, Result};
use clap::Args;
use keel_array::{AttentionSpec, Backend, MemoryReport};
use keel_engine::EngineOptions;
use keel_engine::plan::{fit, launches, steps};
use keel_engine::split::{MixtureChoice, PlacedPart};
use keel_models::{MixtureCut, Shard};
use serde_json::{Value, json};

use crate::args::{Device, SpeculateArgs, Subject, SubjectArgs, parse_bytes};
use crate::commands::serve::ServeOptions;
use crate::failure::usage;
use crate::output;
use crate::report::{categories, devices_table, driver_json, plan_table};
use crate::server_plan;
use crate::session::{self, Plans, resolve_drafting};
use crate::split_model::{self, DevicePlan};
use evenkeel::DRIVER_ROOM_BYTES;
use evenkeel::context_for;
use evenkeel::human_bytes;
use evenkeel::{FreeMemory, on_host};

/// Default context of `generate`, unless the model's own is shorter.
const CONTEXT_DEFAULT: usize = 4096;

/// Print the memory that a run takes, by category, without loading weights.
///
/// With --serve, or with an option that only a server has, the numbers are those of `keel serve` with the same options.
/// Otherwise they are those of `keel generate` with the same context. If the machine has the GPU that --device names,
/// the memory of its driver is measured and printed, too. --verbose also prints the shapes of steps, and the
/// launches of a step (of a model on one device). `keel fit` shows what fits.
#[derive(Debug, Args)]
pub struct PlanArgs {
    #[command(flatten, next_help_heading = "Model")]
    subject: SubjectArgs,
    /// Plan for `keel serve`.
    #[arg(long)]
    serve: bool,
    /// Sequences at once, as in `keel bench`. For a server use --sequences.
    #[arg(long, short, value_name = "B")]
    batch: Option<usize>,
    /// Print the longest context (for the batch) and the largest batch (for the context) that fit in this number of
    /// bytes.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    limit: Option<u64>,
    #[command(flatten, next_help_heading = "Speculation of generate")]
    speculate: SpeculateArgs,
    #[command(flatten)]
    server: ServeOptions,
    /// Print one JSON object: the bytes of each category, and `driver` on a GPU; with --limit, `context` and `batch`.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &PlanArgs, verbose: bool) -> Result<()> {
    let (device, holding) = (&args.server.device, &args.server.holding);
    let is_server = args.serve || holding.is_of_a_server();
    // A server's sizes that the user did not set are lowered until it fits. A plan without a server has none.
    if device.is_limited() && !is_server {
        return Err(usage(
            "--memory-limit: a plan takes no memory; use --limit or keel fit to see what fits in a number of bytes",
        ));
    }
    if is_server {
        check_no_run(args)?;
    }
    let model = args.subject.open()?;
    let drafts = args.speculate.wants_head() || holding.drafts.is_some_and(|drafts| drafts > 0);
    let subject = args.subject.subject(model.as_ref(), drafts)?;
    if is_server {
        let held = server_plan::plan_server(&args.server, &subject)?;
        if device.split.is_split() {
            let requests = Some(args.server.request_memory());
            return print_devices(args, &subject, held.options, requests, verbose);
        }
        return print_all(
            args,
            &subject,
            &held.planned,
            held.options,
            Some(args.server.request_memory()),
            verbose,
        );
    }
    let context = holding.context.unwrap_or(subject.config.context_max.min(CONTEXT_DEFAULT));
    let context = context_for(&subject.config, context).context("--context")?;
    let sequences = args.batch.unwrap_or(1);
    let speculation = args.speculate.for_subject(&subject, device, model.is_none())?;
    let options = EngineOptions { context, sequences, ..args.server.engine.options() };
    let options =
        resolve_drafting(device, &*subject.parameters, &subject.json, options, speculation)?.options;
    if device.split.is_split() {
        return print_devices(args, &subject, options, None, verbose);
    }
    match args.limit {
        Some(limit) => print_fit(args, &subject, options, limit),
        None => {
            let planned = session::plan(device, &*subject.parameters, &subject.json, options)?;
            print_all(args, &subject, &planned, options, None, verbose)
        }
    }
}

/// Refuses options of `generate` and `bench` in a plan for a server.
fn check_no_run(args: &PlanArgs) -> Result<()> {
    let wrong = if args.batch.is_some() {
        "--batch is of bench: a server has --sequences"
    } else if args.limit.is_some() {
        "--limit: use keel fit --limit, which prints the servers that fit into a number of bytes"
    } else if args.speculate.is_given() {
        "--speculate is of generate: a server has --drafts"
    } else {
        return Ok(());
    };
    Err(usage(wrong))
}

/// `requests` is the bound on the memory of a server's requests. It is not one of the plan's categories, because it is
/// not allocated.
fn print_all(
    args: &PlanArgs,
    subject: &Subject<'_>,
    planned: &MemoryReport,
    options: EngineOptions,
    requests: Option<u64>,
    verbose: bool,
) -> Result<()> {
    let tower = match args.server.device.tower()? {
        Some(_) => {
            session::plan_apart(&args.server.device, &*subject.parameters, &subject.json, options)?.tower
        }
        None => None,
    };
    print_plan(args, &Plans { model: *planned, tower }, options, requests)?;
    if !verbose || args.json {
        return Ok(());
    }
    let backend = args.server.device.planning_backend(options.compute);
    print_steps(args, &subject.json, options, &[PlacedPart::whole(Arc::clone(&backend))])?;
    output::line("")?;
    let launches = launches(&backend, &*subject.parameters, &subject.json, options)?;
    launches.iter().try_for_each(|line| output::line(line))
}

fn print_steps(
    args: &PlanArgs,
    config: &Value,
    options: EngineOptions,
    devices: &[PlacedPart<Arc<dyn Backend>>],
) -> Result<()> {
    let apart = args.server.device.tower()?.map(|tower| tower.planning_backend(options.compute));
    let tower = apart.as_ref().unwrap_or(&devices[devices.len() - 1].device);
    output::line("")?;
    steps(devices, &**tower, config, options)?.iter().try_for_each(|line| output::line(line))
}

fn print_plan(args: &PlanArgs, plans: &Plans, options: EngineOptions, requests: Option<u64>) -> Result<()> {
    let device = &args.server.device;
    device.announce();
    let driver = session::driver(device, options.compute);
    if args.json {
        let mut object = categories(&plans.total());
        let devices = plans.devices(device);
        if !devices.is_empty() {
            let of = |plan: &DevicePlan| {
                let mut object = categories(&plan.planned);
                object["device"] = json!(plan.name);
                object
            };
            object["devices"] = devices.iter().map(of).collect();
        }
        if let Some(driver) = driver {
            object["driver"] = driver_json(&driver);
        }
        if let Some(requests) = requests {
            object["requests"] = json!(requests);
        }
        return output::json(&object);
    }
    let of_pool = match options.pool_pages {
        Some(pages) => format!(", {} tokens of keys and values together", pages * AttentionSpec::PAGE),
        None => String::new(),
    };
    output::line(&format!("context {}, batch {}{of_pool}\n", options.context, options.sequences))?;
    let devices = plans.devices(device);
    let columns: Vec<_> = devices.iter().map(|plan| (plan.name.as_str(), plan.planned)).collect();
    output::text(&if columns.is_empty() { plan_table(&plans.model) } else { devices_table(&columns) })?;
    if let Some(requests) = requests {
        let bound = human_bytes(requests);
        output::line(&format!("requests    {bound} more at most, as requests come (--request-memory)"))?;
    }
    if let Some(host) = FreeMemory::of_host() {
        let tower = plans.tower.map_or(0, |tower| tower.total());
        let needed = on_host(&plans.model, device.device() != Device::Cpu) + tower;
        let fits = if needed <= host.bytes { "fits" } else { "does not fit" };
        output::line(&format!("free        {} ({}): the plan {fits}", human_bytes(host.bytes), host.why))?;
    }
    let Some(driver) = driver else { return Ok(()) };
    output::line(&format!("driver      {}; code is added as it is first used", driver.to_line()))?;
    let (limit, room) = (human_bytes(driver.limit()), human_bytes(DRIVER_ROOM_BYTES));
    output::line(&format!(
        "limit       {limit} (default: the free memory minus {room} for code and other programs)"
    ))
}

/// Prints the plan of a model on several devices. `requests` is as in [`print_all`].
fn print_devices(
    args: &PlanArgs,
    subject: &Subject<'_>,
    options: EngineOptions,
    requests: Option<u64>,
    verbose: bool,
) -> Result<()> {
    if args.limit.is_some() {
        return Err(usage("--limit: what fits is told of one device; leave out --devices"));
    }
    let device = &args.server.device;
    let plans = split_model::plan_devices(device, &*subject.parameters, &subject.json, options)?;
    let mixture = split_model::mixture(device, &*subject.parameters, &subject.json, options)?;
    let layers = |plan: &DevicePlan| plan.part.layers.clone();
    if args.json {
        let mut object = categories(&plans.iter().map(|plan| plan.planned).sum());
        let of = |plan: &DevicePlan| {
            let mut object = categories(&plan.planned);
            object["device"] = json!(plan.name);
            object["layers"] = json!([layers(plan).start, layers(plan).end]);
            object
        };
        object["devices"] = plans.iter().map(of).collect();
        if let Some(MixtureChoice { cut, reason }) = mixture {
            let cut = if cut == MixtureCut::Experts { "experts" } else { "columns" };
            object["experts"] = json!({"by": cut, "why": reason});
        }
        if let Some(requests) = requests {
            object["requests"] = json!(requests);
        }
        return output::json(&object);
    }
    output::line(&format!("context {}, batch {}", options.context, options.sequences))?;
    plans.iter().try_for_each(|plan| output::line(&format!("{}: {}", plan.name, holds(plan))))?;
    if let Some(MixtureChoice { reason, .. }) = &mixture {
        output::line(&format!("experts: {reason}"))?;
    }
    let columns: Vec<_> = plans.iter().map(|plan| (plan.name.as_str(), plan.planned)).collect();
    output::line("")?;
    output::text(&devices_table(&columns))?;
    if let Some(requests) = requests {
        let bound = human_bytes(requests);
        output::line(&format!("requests    {bound} more at most, as requests come (--request-memory)"))?;
    }
    if !verbose {
        return Ok(());
    }
    let backends = device.group(options.compute, true)?;
    let devices = PlacedPart::each(backends, plans.iter().map(|plan| plan.part.clone()));
    print_steps(args, &subject.json, options, &devices)
}

/// The part of the model that a device holds, in words.
fn holds(plan: &DevicePlan) -> String {
    let (part, Shard { index, count, .. }) = (&plan.part, plan.part.shard);
    let share = if count > 1 { format!("share {} of {count} of ", index + 1) } else { String::new() };
    if part.is_first() && part.is_last() {
        return format!("{share}every layer");
    }
    let (first, last) = (part.layers.start, part.layers.end - 1);
    let begin = if part.is_first() { "embedding, " } else { "" };
    let end = if part.is_last() { ", output head" } else { "" };
    format!("{share}{begin}layers {first} to {last}{end}")
}

fn print_fit(args: &PlanArgs, subject: &Subject<'_>, options: EngineOptions, limit: u64) -> Result<()> {
    let backend = args.server.device.planning_backend(options.compute);
    let fit = fit(&backend, &*subject.parameters, &subject.json, options, limit)?;
    if args.json {
        return output::json(&json!({"limit": limit, "context": fit.context, "batch": fit.sequences}));
    }
    let within = human_bytes(limit);
    output::line(&format!("longest context for a batch of {}: {}", options.sequences, fit.context))?;
    output::line(&format!("largest batch for a context of {}: {}", options.context, fit.sequences))?;
    output::line(&format!("within {limit} bytes ({within}); 0 means that nothing fits"))
}
