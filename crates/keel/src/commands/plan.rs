//! `keel plan`: prints the memory of a run before the run.

use anyhow::{Context, Result};
use clap::Args;
use keel_array::AttentionSpec;
use keel_engine::EngineOptions;
use keel_engine::plan::{fit, launches, steps};
use keel_engine::split::MixtureChoice;
use keel_models::{MixtureCut, Share};
use serde_json::{Value, json};

use crate::args::{SpeculateArgs, SubjectArgs, parse_bytes};
use crate::commands::serve::ServeOptions;
use crate::failure::usage;
use crate::output;
use crate::placed_model::{DevicePlan, PlacedModel, Plans};
use crate::report::{categories, devices_table, driver_json, plan_table};
use crate::server_plan::{self, Models, ServerPlan};
use crate::session;
use evenkeel::context_for;
use evenkeel::human_bytes;
use evenkeel::{DriverMemory, FreeMemory, on_device, on_host};

/// Default context of `generate`, unless the model's own is shorter.
const CONTEXT_DEFAULT: usize = 4096;

/// The help of an option that a plan of `keel generate` refuses.
const MEMORY_LIMIT_HELP: &str = "Only with --serve: the server's limit on tensor memory, for example 800M or 1.5Gi; \
     with --devices, of each device, or one for each: 8Gi,4Gi. Sizes that are not given are lowered until the plan \
     fits. Otherwise --limit and keel fit print what fits into a number of bytes";

/// Print the memory that a run takes, by category, without loading weights.
///
/// With --serve, or with an option on which only a server's memory depends, the numbers are those of `keel serve` with
/// the same options.
/// Otherwise they are those of `keel generate` with the same context. If the machine has the GPU that --device names,
/// the memory of its driver is measured and printed, too. --verbose also prints the shapes of steps, and the
/// launches of a step (of a model on one device). `keel fit` shows what fits.
#[derive(Debug, Args)]
#[command(mut_arg("memory_limit", |arg| arg.help(MEMORY_LIMIT_HELP)))]
pub struct PlanArgs {
    #[command(flatten, next_help_heading = "Model")]
    subject: SubjectArgs,
    /// Plan for `keel serve`.
    #[arg(long)]
    serve: bool,
    /// Sequences at once, as in `keel bench`. For a server use --sequences.
    #[arg(long, short, value_name = "B", value_parser = clap::value_parser!(u16).range(1..=4096))]
    batch: Option<u16>,
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

impl PlanArgs {
    /// Whether the plan is one of `keel serve`.
    pub fn is_of_a_server(&self) -> bool {
        self.serve || self.server.is_of_a_server()
    }
}

/// Runs the command.
pub fn run(args: &PlanArgs, verbose: bool) -> Result<()> {
    let (device, memory) = (&args.server.device, &args.server.memory);
    let is_server = args.is_of_a_server();
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
    let drafts = args.speculate.wants_head() || memory.drafts.is_some_and(|drafts| drafts > 0);
    let subject = args.subject.subject(model.as_ref(), drafts)?;
    let placed = subject.on(device);
    if is_server {
        let ServerPlan { options, plans } = server_plan::plan_server(&args.server, &subject, Models::One)?;
        let requests = Some(args.server.request_memory());
        return Printed { placed, options, plans, requests }.print(args.json, verbose);
    }
    let context = memory.context.unwrap_or(subject.config.context_max.min(CONTEXT_DEFAULT));
    let context = context_for(&subject.config, context).context("--context")?;
    let sequences = args.batch.map_or(1, usize::from);
    let speculation = args.speculate.for_subject(&subject, device, model.is_none())?;
    let options = EngineOptions { context, sequences, ..args.server.engine.options() };
    let options = placed.resolve_drafting(options, speculation)?.options;
    match args.limit {
        Some(_) if device.split.is_split() => {
            Err(usage("--limit: what fits is told of one device; leave out --devices"))
        }
        Some(limit) => print_fit(placed, options, limit, args.json),
        None => {
            let plans = placed.plans(options)?;
            Printed { placed, options, plans, requests: None }.print(args.json, verbose)
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

/// A plan to print.
struct Printed<'a> {
    placed: PlacedModel<'a>,
    options: EngineOptions,
    plans: Plans,
    /// The bound on the memory of a server's requests. It is not one of the plan's categories, because it is not
    /// allocated.
    requests: Option<u64>,
}

impl Printed<'_> {
    fn print(&self, as_json: bool, verbose: bool) -> Result<()> {
        self.placed.device.announce();
        let driver = session::driver(self.placed.device, self.options.compute);
        let mixture = self.placed.mixture(self.options)?;
        if as_json {
            return output::json(&self.to_json(driver, mixture));
        }
        self.print_table(mixture)?;
        if !self.is_split() {
            self.print_room(driver)?;
        }
        if verbose { self.print_steps() } else { Ok(()) }
    }

    fn is_split(&self) -> bool {
        self.placed.device.split.is_split()
    }

    fn to_json(&self, driver: Option<DriverMemory>, mixture: Option<MixtureChoice>) -> Value {
        let mut object = categories(&self.plans.total());
        let device = |DevicePlan { name, part, planned }: &DevicePlan| {
            let mut object = categories(planned);
            object["device"] = json!(name);
            if self.is_split() {
                object["layers"] = json!([part.layers.start, part.layers.end]);
            }
            object
        };
        let devices: Vec<Value> = self.plans.several().iter().map(device).collect();
        if !devices.is_empty() {
            object["devices"] = devices.into();
        }
        if let Some(MixtureChoice { cut, reason }) = mixture {
            let cut = if cut == MixtureCut::Experts { "experts" } else { "columns" };
            object["experts"] = json!({"by": cut, "why": reason});
        }
        if let Some(driver) = driver {
            object["driver"] = driver_json(&driver);
        }
        if let Some(requests) = self.requests {
            object["requests"] = json!(requests);
        }
        object
    }

    fn print_table(&self, mixture: Option<MixtureChoice>) -> Result<()> {
        let Printed { options, plans, .. } = self;
        let of_pool = match options.pool_pages {
            Some(pages) if !self.is_split() => {
                format!(", {} tokens of keys and values together", pages * AttentionSpec::PAGE)
            }
            _ => String::new(),
        };
        output::line(&format!("context {}, batch {}{of_pool}", options.context, options.sequences))?;
        if self.is_split() {
            plans
                .devices
                .iter()
                .try_for_each(|plan| output::line(&format!("{}: {}", plan.name, holds(plan))))?;
        }
        if let Some(MixtureChoice { reason, .. }) = mixture {
            output::line(&format!("experts: {reason}"))?;
        }
        output::line("")?;
        let devices = plans.several();
        output::text(&if devices.is_empty() { plan_table(&plans.total()) } else { devices_table(&devices) })?;
        let Some(requests) = self.requests else { return Ok(()) };
        let bound = human_bytes(requests);
        output::line(&format!("requests    {bound} more at most, as requests come (--request-memory)"))
    }

    /// Compares the plan with the free memory of its device, and the host memory of a model on a GPU with that of the
    /// host.
    fn print_room(&self, driver: Option<DriverMemory>) -> Result<()> {
        let (model, is_gpu) = (self.plans.model(), self.plans.is_gpu);
        let of_host = on_host(&model, is_gpu) + self.plans.tower.map_or(0, |tower| tower.total());
        if let Some(host) = FreeMemory::of_host().filter(|_| of_host > 0) {
            compare(if is_gpu { "what the host holds" } else { "the plan" }, of_host, &host)?;
        }
        match driver {
            Some(driver) => {
                let line = driver.to_line();
                output::line(&format!("driver      {line}; code is added as it is first used"))?;
                compare("the plan", on_device(&model, is_gpu), &FreeMemory::of_gpu(&driver))
            }
            None if is_gpu && self.requests.is_some() => output::line(
                "free        unknown: this machine has no such GPU; --memory-limit says how much it has, on which the default of --sequences depends",
            ),
            None if is_gpu => output::line("free        unknown: this machine has no such GPU"),
            None => Ok(()),
        }
    }

    /// Prints the shapes of steps; of a model on one device also the launches of a step.
    fn print_steps(&self) -> Result<()> {
        let Printed { placed: PlacedModel { device, parameters, config }, options, .. } = *self;
        let devices = &self.plans.planned_on;
        let leader = &devices[devices.len() - 1].device;
        let tower = device.tower()?.map(|tower| tower.planning_backend(options.compute));
        let steps = steps(devices, &**tower.as_ref().unwrap_or(leader), config, options)?;
        output::line("")?;
        steps.iter().try_for_each(|line| output::line(line))?;
        if self.is_split() {
            return Ok(());
        }
        output::line("")?;
        launches(leader, parameters, config, options)?.iter().try_for_each(|line| output::line(line))
    }
}

/// Prints whether this many bytes fit into free memory.
fn compare(what: &str, needed: u64, free: &FreeMemory) -> Result<()> {
    let fits = if needed <= free.bytes { "fits" } else { "does not fit" };
    output::line(&format!("free        {} ({}): {what} {fits}", human_bytes(free.bytes), free.why))
}

/// The part of the model that a device holds, in words.
fn holds(plan: &DevicePlan) -> String {
    let (part, Share { index, count, .. }) = (&plan.part, plan.part.share);
    let share = if count > 1 { format!("share {} of {count} of ", index + 1) } else { String::new() };
    if part.is_first() && part.is_last() {
        return format!("{share}every layer");
    }
    let (first, last) = (part.layers.start, part.layers.end - 1);
    let begin = if part.is_first() { "embedding, " } else { "" };
    let end = if part.is_last() { ", output head" } else { "" };
    format!("{share}{begin}layers {first} to {last}{end}")
}

fn print_fit(placed: PlacedModel<'_>, options: EngineOptions, limit: u64, as_json: bool) -> Result<()> {
    let PlacedModel { device, parameters, config } = placed;
    let backend = device.planning_backend(options.compute);
    let fit = fit(&backend, parameters, config, options, limit)?;
    if as_json {
        return output::json(&json!({"limit": limit, "context": fit.context, "batch": fit.sequences}));
    }
    let within = human_bytes(limit);
    output::line(&format!("longest context for a batch of {}: {}", options.sequences, fit.context))?;
    output::line(&format!("largest batch for a context of {}: {}", options.context, fit.sequences))?;
    output::line(&format!("within {limit} bytes ({within}); 0 means that nothing fits"))
}
