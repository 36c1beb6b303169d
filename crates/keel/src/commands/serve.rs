//! `keel serve`: answers over HTTP.

use std::path::PathBuf;
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context, Result};
use clap::Args;
use keel_array::{AttentionSpec, Category};
use keel_engine::batch::BatchOptions;
use keel_engine::{DRAFTS_MAX, EngineError, EngineOptions, SpeculationOptions};
use keel_server::{ModelText, PrefixStore, Server, ServerOptions, bind, wait_for_signal};

use crate::args::{AccessArgs, DeviceArgs, EngineArgs, ModelArgs, PatienceArgs, parse_bytes, seconds};
use crate::placement::settle;
use crate::report::human_bytes;
use crate::session::{self, Session, context_for};
use crate::source::{self, Model};

/// Tokens of a sequence unless another number is asked for or the model's own context is shorter.
const CONTEXT_DEFAULT: usize = 8192;
/// Tokens of keys and values of all sequences together, unless bytes are asked for.
const POOL_TOKENS_DEFAULT: usize = 65536;

/// Of sequences, requests that wait, or tokens: so many that sums of them are numbers still.
const COUNT_MAX: usize = 1 << 24;

/// Threads that render templates and tokenize. Each keeps some memory, whatever it did last.
const TEXT_THREADS: usize = 4;

/// Serve the model over HTTP, with OpenAI's API: many requests at once, memory promised before a request starts.
///
/// SIGTERM or Ctrl-C lets running requests end for the time of --grace; a second one ends them at once.
#[derive(Debug, Args)]
pub struct ServeArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Address to listen on. Other machines can reach the server only if it is another than loopback.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 takes any that is free.
    #[arg(long, value_name = "PORT", default_value_t = 8080)]
    port: u16,
    /// Name of the model in the API; by default its folder's.
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Sequences at once.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = count)]
    sequences: usize,
    /// Tokens of one sequence, prompt and answer together; by default 8192, or the model's context if that is shorter.
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    /// Memory for the keys and values of all sequences and remembered prefixes together; by default enough for 65536
    /// tokens, or for all sequences at full length if that is less.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    kv_cache: Option<u64>,
    /// Let in more requests than the memory of keys and values can promise: a request starts when there is room for its
    /// prompt. Where pages run short the newest sequence is parked in host memory, and goes on with the same tokens when
    /// others have ended; none fails for memory.
    #[arg(long)]
    overcommit: bool,
    /// Host memory for parked sequences; by default enough for all keys, values and states.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, requires = "overcommit")]
    swap: Option<u64>,
    /// Memory for recurrent states of remembered prefixes. Each answer at work takes one, too.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "128Mi")]
    prefix_states: u64,
    /// Take planned memory from the system as it is first used (CPU). By default all is taken at the start: then none is
    /// missing later, and no request waits while the system clears pages.
    #[arg(long, conflicts_with = "resident")]
    on_demand: bool,
    /// Do not remember prefixes.
    #[arg(long)]
    no_prefix_reuse: bool,
    /// Remember prompts alone, not answers: what is reused then has the bits of a fresh run.
    #[arg(long)]
    exact_prefix_reuse: bool,
    /// Folder in which remembered prefixes outlive the server. A damaged file in it is passed over with a warning.
    #[arg(long, value_name = "FOLDER", conflicts_with = "no_prefix_reuse")]
    prefix_cache_dir: Option<PathBuf>,
    /// Drafts of the multi-token-prediction head that a step may verify for each sequence, if the model has one; how many
    /// are made is measured, down to none. A sampled request with a seed makes none on the CPU.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(0..=DRAFTS_MAX as i64))]
    drafts: u8,
    /// Tokens of one step, of answers and prompts together: a long prompt delays others by no more than this.
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = count)]
    step_tokens: usize,
    /// Requests that may wait; more are refused with 429.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = count)]
    queue: usize,
    /// Seconds that a request may wait; then it is refused with 503.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = seconds())]
    queue_timeout: u64,
    /// Seconds that a request may take in all.
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = seconds())]
    deadline: u64,
    /// Tokens of an answer where the request names no number.
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = count)]
    max_tokens: usize,
    /// Bytes of a request's body.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "8Mi")]
    body_limit: u64,
    #[command(flatten)]
    access: AccessArgs,
    #[command(flatten)]
    patience: PatienceArgs,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    device: DeviceArgs,
}

/// A number of things that there is room for: at least one.
fn count(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(n) if (1..=COUNT_MAX).contains(&n) => Ok(n),
        _ => Err(format!("expected a number from 1 to {COUNT_MAX}")),
    }
}

/// Runs the command.
pub fn run(args: &ServeArgs) -> Result<()> {
    keel_cpu::heap::share_arena();
    let model = source::open(args.model.model.as_deref())?;
    let text = ModelText::new(&model.text_files()?)?;
    let server_options = server_options(args, &model)?;
    settle(&args.device, &*model.parameters(), &model.json, |device| engine_options(args, device, &model));
    let options = engine_options(args, &args.device, &model)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(TEXT_THREADS)
        .enable_all()
        .build()?;
    runtime.block_on(async {
        // Before the model is loaded: a port in use should be known at once.
        let listener = bind(&format!("{}:{}", args.host, args.port)).await?;
        let device = if args.on_demand { args.device.clone() } else { args.device.with_resident_memory() };
        let mut session = Session::load(&device, &model, options)?;
        session::close(model);
        session.make_ready()?;
        tracing::info!(
            "{} for {} sequences of up to {} tokens, {} of it keys and values",
            human_bytes(session.planned.total()),
            options.sequences,
            options.context,
            human_bytes(session.planned.get(Category::Kv)),
        );
        if let Some(driver) = session.memory().driver {
            tracing::info!("the driver has {}", driver.to_line());
        }
        if args.overcommit {
            let swap = human_bytes(session.planned.get(Category::Swap));
            tracing::info!("more is let in than fits: {swap} of host memory are for parked sequences");
        }
        let address = listener.local_addr()?;
        if !address.ip().is_loopback() && server_options.keys.is_empty() {
            tracing::warn!(
                "anyone who reaches {address} may use this server: ask for a key with --api-key-file"
            );
        }
        tracing::info!("{} is served at http://{address}", server_options.model_id);
        let server = Server::new(session.engine, text, server_options)?;
        let abort = async {
            wait_for_signal().await;
            wait_for_signal().await;
        };
        Ok(server.run(listener, wait_for_signal(), abort).await?)
    })
}

/// As many pages and states as the bytes asked for have room for. What one takes is learned from plans.
fn engine_options(args: &ServeArgs, device: &DeviceArgs, model: &Model) -> Result<EngineOptions> {
    let wanted = args.context.unwrap_or(model.config.context_max.min(CONTEXT_DEFAULT));
    let context = context_for(&model.config, wanted).context("--context")?;
    let drafts = if model.config.mtp_layers > 0 { args.drafts.into() } else { 0 };
    let mut base = EngineOptions { context, sequences: args.sequences, drafts, ..args.engine.options() };
    let all_pages = args.sequences * context.div_ceil(AttentionSpec::PAGE);
    let parameters = model.parameters();
    let probe = |base| {
        let small = EngineOptions { checkpoints: 1, pool_pages: Some(1), sequences: 1, ..base };
        session::plan(device, &*parameters, &model.json, small)
    };
    let one = match probe(base) {
        // A config may speak of a head that the checkpoint was saved without.
        Err(error) if matches!(error.downcast_ref(), Some(EngineError::NoMtpHead)) => {
            base.drafts = 0;
            probe(base)?
        }
        one => one?,
    };
    let pages = match args.kv_cache {
        Some(bytes) => (bytes / one.get(Category::Kv).max(1)) as usize,
        None => POOL_TOKENS_DEFAULT.max(context).div_ceil(AttentionSpec::PAGE),
    };
    let state_bytes = one.get(Category::Checkpoints);
    let reuses = !args.no_prefix_reuse && state_bytes > 0;
    let wanted = (args.prefix_states / state_bytes.max(1)).min(COUNT_MAX as u64) as usize;
    let states = if reuses { wanted + args.sequences } else { 0 };
    let pages = pages.clamp(1, all_pages);
    let all_bytes =
        one.get(Category::Kv) * pages as u64 + one.get(Category::Recurrent) * args.sequences as u64;
    let swap_bytes = if args.overcommit { args.swap.unwrap_or(all_bytes) } else { 0 };
    if swap_bytes > all_bytes {
        tracing::info!(
            "--swap: {} hold all sequences at full length; no more is taken",
            human_bytes(all_bytes)
        );
    }
    let swap_bytes = swap_bytes.min(all_bytes) as usize;
    Ok(EngineOptions { pool_pages: Some(pages), checkpoints: states, swap_bytes, ..base })
}

fn server_options(args: &ServeArgs, model: &Model) -> Result<ServerOptions> {
    let folder = model.path.file_name().and_then(|name| name.to_str());
    let prefix_store = match &args.prefix_cache_dir {
        Some(folder) => Some(PrefixStore { folder: folder.clone(), model: identity(args, model)? }),
        None => None,
    };
    let mut options = ServerOptions {
        batch: BatchOptions {
            step_tokens: args.step_tokens,
            queue_limit: args.queue,
            queue_timeout: Duration::from_secs(args.queue_timeout),
            reuse_prefixes: !args.no_prefix_reuse,
            reuse_generated: !args.no_prefix_reuse && !args.exact_prefix_reuse,
            speculation: SpeculationOptions::default(),
        },
        model_id: args.name.clone().or(folder.map(str::to_string)).unwrap_or_else(|| "keel".into()),
        max_tokens_default: args.max_tokens,
        deadline: Duration::from_secs(args.deadline),
        body_bytes_max: args.body_limit as usize,
        keys: args.access.keys()?,
        hosts: args.access.hosts(&args.host),
        cors_origins: args.access.cors.clone(),
        prefix_store,
        ..ServerOptions::default()
    };
    args.patience.apply(&mut options);
    Ok(options)
}

/// Tells a model's caches from those of others: its config, its files with their sizes and times, and the arithmetic.
fn identity(args: &ServeArgs, model: &Model) -> Result<String> {
    let compute = args.engine.options().compute;
    if model.is_built_in {
        return Ok(format!("{} {compute:?}", source::built_in::identity()));
    }
    let path = &model.path;
    let cannot_read = || format!("cannot read {}", path.display());
    let paths = if path.is_dir() {
        let entries = std::fs::read_dir(path).with_context(cannot_read)?;
        entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?
    } else {
        vec![path.clone()]
    };
    let mut files = Vec::new();
    for path in paths {
        let facts = std::fs::metadata(&path).with_context(cannot_read)?;
        if facts.is_file() {
            let changed = facts.modified()?.duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
            let name = path.file_name().unwrap_or_default();
            files.push(format!("{}:{}:{changed}", name.display(), facts.len()));
        }
    }
    files.sort();
    Ok(format!("{} {compute:?} {}", model.json, files.join(" ")))
}
