//! `keel fit`: the variants of a model that fit into a machine.

mod variants;

use anyhow::{Result, bail};
use clap::Args;
use keel_array::{AttentionSpec, Category, KvFormat, MemoryReport};
use keel_engine::EngineOptions;
use serde_json::{Value, json};

use crate::args::{
    Device, DeviceArgs, EngineArgs, MemoryArgs, Split, Subject, SubjectArgs, count, parse_bytes,
};
use crate::commands::serve::STEP_TOKENS_DEFAULT;
use crate::failure::usage;
use crate::server_plan::{self, CONTEXT_MIN, Planner};
use crate::{output, source};
use evenkeel::ModelFiles;
use evenkeel::human_bytes;
use variants::Variant;

/// Numbers of sequences to try if none is given.
const SEQUENCES: [usize; 3] = [1, 4, 16];

/// Print the ways in which a model fits into this machine, best first: bits of the weights, bits of keys and values,
/// sequences and context. Each line has the command that serves the model this way.
///
/// More bits of the weights rank first, then more bits of keys and values. Fewer bits are listed only if a longer
/// context then fits. With --devices there is a line for each split that fits, unless --split names one: first the
/// split whose largest device is smallest. The bytes equal those of keel plan with the same options. For a model that
/// is yet to be quantised they come from a plan of its shape.
#[derive(Debug, Args)]
pub struct FitArgs {
    /// A folder, a weights file or a hub name.
    #[arg(value_name = "MODEL", conflicts_with_all = ["model", "shape"])]
    path: Option<String>,
    #[command(flatten, next_help_heading = "Model")]
    subject: SubjectArgs,
    /// Bytes to fit into, for example 24Gi; with --devices, of each device. By default the free memory of the device;
    /// of devices that are parts of the CPU, the free memory of the host for all of them.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    limit: Option<u64>,
    /// Use this context, not the longest that fits.
    #[arg(long, short = 'c', aliases = ["ctx", "ctx-size", "num-ctx"], value_name = "N", value_parser = count)]
    context: Option<usize>,
    /// Use this number of sequences at once, not 1, 4 and 16.
    #[arg(long, alias = "parallel", value_name = "N", value_parser = count)]
    sequences: Option<usize>,
    #[command(flatten, next_help_heading = "Arithmetic")]
    engine: EngineArgs,
    #[command(flatten, next_help_heading = "Device")]
    device: DeviceArgs,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// One way to run the model that fits.
struct Line {
    weights: String,
    kv: KvFormat,
    options: EngineOptions,
    planned: MemoryReport,
    /// The bytes that are compared with the limit.
    needed: u64,
    /// How several devices share the model, and the bytes of the largest.
    split: Option<(Split, u64)>,
    command: String,
}

/// The form that needs the fewest bytes.
#[derive(Default)]
struct Least {
    needed: u64,
    what: String,
}

/// Runs the command.
pub fn run(args: &FitArgs) -> Result<()> {
    args.device.check()?;
    if args.device.is_limited() {
        return Err(usage(
            "--memory-limit: nothing is loaded here; use --limit for the number of bytes to fit into",
        ));
    }
    let limit = limit(args)?;
    let mut lines = Vec::new();
    let model = match &args.path {
        Some(path) => Some(source::open(Some(path), args.subject.tower.mmproj.as_deref())?),
        None => args.subject.open()?,
    };
    let mut least: Option<Least> = None;
    for variant in variants(args, model.as_ref())? {
        fit_variant(args, &variant, limit, &mut lines, &mut least)?;
    }
    if lines.is_empty() {
        let Least { needed: bytes, what } = least.unwrap_or_default();
        bail!(
            "nothing fits into {limit} bytes ({}): {what} needs {bytes} bytes ({}), {} more; what would fit is that with a --limit \
             or free memory of {bytes} bytes, or a smaller model",
            human_bytes(limit),
            human_bytes(bytes),
            human_bytes(bytes.saturating_sub(limit)),
        );
    }
    if args.json {
        let lines: Vec<Value> = lines.iter().map(Line::to_json).collect();
        return output::json(&json!({"limit": limit, "fits": lines}));
    }
    output::line(&format!("what fits into {} ({limit} bytes), best first:\n", human_bytes(limit)))?;
    let largest = if args.device.split.is_split() { "  each at most" } else { "" };
    output::line(&format!(
        "{:<10}{:>4}{:>11}{:>10}{:>12}{:>12}{largest}  command",
        "weights", "kv", "sequences", "context", "needed", "left"
    ))?;
    lines.iter().try_for_each(|line| output::line(&line.to_line(limit)))
}

/// The number of bytes to fit into.
fn limit(args: &FitArgs) -> Result<u64> {
    if let Some(limit) = args.limit {
        return Ok(limit);
    }
    match server_plan::room(&args.device, args.engine.options().compute) {
        Some(room) => {
            tracing::info!("{} are {}", human_bytes(room.bytes), room.why);
            Ok(room.bytes)
        }
        None => Err(usage("the free memory of this machine is unknown: give --limit")),
    }
}

/// The model as it is, and in fewer bits.
fn variants<'a>(args: &'a FitArgs, model: Option<&'a ModelFiles>) -> Result<Vec<Variant<'a>>> {
    let Some(model) = model else {
        return args.subject.in_other_formats().into_iter().map(Variant::of_shape).collect();
    };
    let name = args.path.as_deref().or(args.subject.model.as_deref());
    Ok(Variant::of_model(model, name, &args.subject.tower.flag()))
}

/// Adds the lines for one form of the weights. A line is added only if its context is longer than those of earlier
/// lines with the same number of sequences.
fn fit_variant(
    args: &FitArgs,
    variant: &Variant<'_>,
    limit: u64,
    lines: &mut Vec<Line>,
    least: &mut Option<Least>,
) -> Result<()> {
    let kv_formats = match args.engine.kv_bits {
        Some(kv) => vec![kv],
        None => vec![args.engine.options().kv_format(), KvFormat::Bits8, KvFormat::Bits4],
    };
    let sequences = args.sequences.map_or(SEQUENCES.to_vec(), |n| vec![n]);
    let smallest = Form {
        variant,
        kv: *kv_formats.last().unwrap_or(&KvFormat::Bits4),
        sequences: sequences.iter().copied().min().unwrap_or(1),
        context: contexts(args, &variant.subject, 0).last().copied().unwrap_or(CONTEXT_MIN),
    };
    if smallest.may_fit(args, limit)? {
        for &kv in &kv_formats {
            for &sequences in &sequences {
                let so_far = lines.iter().filter(|line| line.options.sequences == sequences);
                let longest = so_far.map(|line| line.options.context).max().unwrap_or(0);
                let contexts = contexts(args, &variant.subject, longest);
                let form = |context| Form { variant, kv, sequences, context };
                if let Some(line) = longest_that_fits(args, &contexts, form, limit)? {
                    let others = form(line.options.context).other_splits(args, &line, limit);
                    lines.push(line);
                    lines.extend(others);
                }
            }
        }
    }
    // The least is told where nothing fits.
    if lines.is_empty() {
        let line = smallest.line(args, limit, Steps::All)?;
        if least.as_ref().is_none_or(|least| line.needed < least.needed) {
            *least = Some(Least { needed: line.needed, what: line.what() });
        }
    }
    Ok(())
}

/// The line for the first of these contexts, which descend, that fits.
fn longest_that_fits<'a>(
    args: &FitArgs,
    contexts: &[usize],
    form: impl Fn(usize) -> Form<'a>,
    limit: u64,
) -> Result<Option<Line>> {
    let (mut first, mut end) = (0, contexts.len());
    while first < end {
        let middle = first + (end - first) / 2;
        if form(contexts[middle]).may_fit(args, limit)? {
            end = middle;
        } else {
            first = middle + 1;
        }
    }
    for &context in &contexts[first..] {
        let line = form(context).line(args, limit, Steps::All)?;
        if line.needed <= limit {
            return Ok(Some(line));
        }
    }
    Ok(None)
}

/// The contexts to try that are longer than `longest`, in descending order. None is shorter than [`CONTEXT_MIN`] or, if
/// that is less, the model's own.
fn contexts(args: &FitArgs, subject: &Subject<'_>, longest: usize) -> Vec<usize> {
    let context_max = subject.config.context_max;
    if let Some(context) = args.context {
        return if longest == 0 { vec![context] } else { Vec::new() };
    }
    let halves = std::iter::successors(Some(context_max), |context| Some(context / 2));
    let least = CONTEXT_MIN.min(context_max);
    halves.take_while(|&context| context >= least).filter(|&context| context > longest).collect()
}

/// The steps that a plan counts.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Steps {
    All,
    Largest,
}

/// The form of the model on a line.
struct Form<'a> {
    variant: &'a Variant<'a>,
    kv: KvFormat,
    sequences: usize,
    context: usize,
}

impl Form<'_> {
    /// Whether a plan of the largest steps alone fits. It is quick, and never larger than the whole plan.
    fn may_fit(&self, args: &FitArgs, limit: u64) -> Result<bool> {
        Ok(self.line(args, limit, Steps::Largest)?.needed <= limit)
    }

    /// The line, of a plan of these steps. Of several splits, the one whose largest device is smallest is taken: among
    /// those that fit, or among all if none fits.
    fn line(&self, args: &FitArgs, limit: u64, steps: Steps) -> Result<Line> {
        if !args.device.split.is_split() {
            return self.line_on(args, &args.device, steps);
        }
        let choices = args.device.split.choices().into_iter();
        let mut best: Option<Result<Line>> = None;
        for line in choices.map(|split| self.line_on(args, &args.device.split_as(split), steps)) {
            // A split that the model does not allow is an error if there is no other.
            let is_better = match (&best, &line) {
                (Some(Ok(best)), Ok(line)) => line.rank(limit) < best.rank(limit),
                (Some(_), Err(_)) => false,
                (None, _) | (Some(Err(_)), Ok(_)) => true,
            };
            if is_better {
                best = Some(line);
            }
        }
        best.unwrap_or_else(|| unreachable!("there is a split"))
    }

    /// The lines of the other splits that fit, best first.
    fn other_splits(&self, args: &FitArgs, best: &Line, limit: u64) -> Vec<Line> {
        let Some((chosen, _)) = best.split else { return Vec::new() };
        let others = args.device.split.choices().into_iter().filter(|&split| split != chosen);
        // A split that the model does not allow has no line.
        let line = |split| self.line_on(args, &args.device.split_as(split), Steps::All).ok();
        let mut lines: Vec<Line> = others.filter_map(line).filter(|line| line.needed <= limit).collect();
        lines.sort_by_key(|line| line.rank(limit));
        lines
    }

    fn line_on(&self, args: &FitArgs, on: &DeviceArgs, steps: Steps) -> Result<Line> {
        let Form { variant, kv, sequences, context } = *self;
        let memory = MemoryArgs {
            sequences: Some(sequences),
            context: Some(context),
            whole_contexts: true,
            ..MemoryArgs::default()
        };
        let engine = EngineArgs { kv_bits: Some(kv), ..args.engine.clone() };
        let planner = Planner::new(&memory, &variant.subject, on, engine.options(), STEP_TOKENS_DEFAULT)?;
        let options = EngineOptions { largest_steps: steps == Steps::Largest, ..planner.wanted };
        let plans = variant.subject.on(on).plans(options)?;
        let planned = plans.model();
        // A limit counts the bytes of --memory-limit. Free memory is a GPU's own; devices of the CPU share the host's.
        let needed = if args.limit.is_some() { plans.charged() } else { plans.needed() };
        let split = plans.largest().map(|largest| (on.split.split(), largest));
        let default_kv = args.engine.kv_bits.is_none() && kv == args.engine.options().kv_format();
        let kv_flag = if default_kv { String::new() } else { format!(" --kv-bits {}", bits_of(kv)) };
        let device = match on.device() {
            _ if on.split.is_split() => {
                format!(" --devices {} --split {}", on.split.list(), on.split.split())
            }
            Device::Cpu if on.is_given() => " --device cpu".into(),
            Device::Cpu => String::new(),
            Device::Cuda(n) => format!(" --device cuda:{n}"),
        };
        let command = format!(
            "{} --sequences {sequences} --context {context} --kv-cache {}{kv_flag}{}{device}{}",
            variant.command,
            planner.kv_bytes(&planner.wanted),
            args.engine.flags(),
            on.flags()
        );
        Ok(Line {
            weights: variant.name.clone(),
            kv,
            options: planner.wanted,
            planned,
            needed,
            split,
            command,
        })
    }
}

impl Line {
    /// Smaller is better: lines that fit, then a smaller largest device.
    fn rank(&self, limit: u64) -> (bool, u64) {
        (self.needed > limit, self.split.map_or(self.needed, |(_, largest)| largest))
    }

    fn what(&self) -> String {
        format!(
            "the least (weights: {}; keys and values: {} bits; {} sequence(s); a context of {})",
            self.weights,
            bits_of(self.kv),
            self.options.sequences,
            self.options.context
        )
    }

    fn to_line(&self, limit: u64) -> String {
        let needed = self.needed;
        let largest = self.split.map_or(String::new(), |(_, bytes)| format!("{:>14}", human_bytes(bytes)));
        format!(
            "{:<10}{:>4}{:>11}{:>10}{:>12}{:>12}{largest}  {}",
            self.weights,
            bits_of(self.kv),
            self.options.sequences,
            self.options.context,
            human_bytes(needed),
            human_bytes(limit - needed),
            self.command
        )
    }

    fn to_json(&self) -> Value {
        let mut line = json!({
            "weights": self.weights,
            "kv_bits": bits_of(self.kv),
            "sequences": self.options.sequences,
            "context": self.options.context,
            "pool_tokens": self.options.pool_pages.map(|pages| pages * AttentionSpec::PAGE),
            "bytes": self.planned.total(),
            "needed": self.needed,
            "weights_bytes": self.planned.get(Category::Weights),
            "command": self.command,
        });
        if let Some((split, largest)) = self.split {
            line["split"] = json!(split.to_string());
            line["largest_device"] = json!(largest);
        }
        line
    }
}

fn bits_of(kv: KvFormat) -> usize {
    match kv {
        KvFormat::F32 => 32,
        KvFormat::F16 => 16,
        KvFormat::Bits8 => 8,
        KvFormat::Bits4 => 4,
    }
}
