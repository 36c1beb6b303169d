//! `keel serve`: serves a model over HTTP.

mod multi_model;
mod named;
mod node;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use keel_array::Category;
use keel_engine::batch::BatchOptions;
use keel_engine::{EngineOptions, VisionOptions};
use keel_server::{
    PrefixStore, REQUEST_MEMORY_MIN, ServedText, Server, ServerOptions, WORK_THREADS, bind, wait_for_signal,
};
use keel_text::TextFiles;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

use crate::args::{
    AccessArgs, DeviceArgs, DraftArgs, EngineArgs, MemoryArgs, ShapeArgs, Subject, TimeoutArgs, TowerArgs,
    count, parse_bytes, seconds,
};
use crate::failure::usage;
use crate::logging::LogFormat;
use crate::server_plan;
use crate::session::{self, Session};
use crate::signals::Signals;
use crate::source;
use crate::vision;
use evenkeel::human_bytes;
use evenkeel::{Determinism, ModelFiles};
use named::Named;

/// Tokens of a step, unless another number is asked for.
pub const STEP_TOKENS_DEFAULT: usize = 512;
/// Bytes of requests, unless another number is asked for.
const REQUEST_MEMORY_DEFAULT: &str = "512Mi";
/// Threads for texts and grammars, and one thread for other blocking work. Each thread keeps some memory after its
/// work.
const BLOCKING_THREADS: usize = WORK_THREADS + 1;

/// Serve models over HTTP with OpenAI's and Anthropic's APIs. Many requests run at once. The memory of a request is
/// reserved before it starts.
///
/// Defaults follow the model and the machine. keel plan with the same options prints the bytes. After SIGTERM or
/// Ctrl-C, running requests may continue for the time of --grace. A second signal ends them at once.
#[derive(Debug, Args)]
pub struct ServeArgs {
    #[command(flatten, next_help_heading = "Model")]
    models: ModelsArgs,
    #[command(flatten)]
    options: ServeOptions,
}

impl ServeArgs {
    /// The format of log lines.
    pub fn log_format(&self) -> LogFormat {
        self.options.requests.log_format
    }
}

/// The models that are served.
#[derive(Debug, Args)]
struct ModelsArgs {
    /// A folder with config.json and weights, a weights file, or a hub name (owner/name). NAME=MODEL sets the model's
    /// name in the API. Without it, the built-in model. May be repeated: then a request's `model` chooses, and each
    /// model is loaded when it is first requested. If another model does not fit into --memory-limit or the free
    /// memory, the least recently used model is unloaded.
    #[arg(long, short, value_name = "[NAME=]MODEL")]
    model: Vec<String>,
    #[command(flatten)]
    tower: TowerArgs,
    #[command(flatten)]
    shape: ShapeArgs,
}

/// All that `keel serve` takes but the model. `keel plan` takes the same.
#[derive(Debug, Args)]
pub struct ServeOptions {
    #[command(flatten, next_help_heading = "Server")]
    server: ListenArgs,
    #[command(flatten, next_help_heading = "Access")]
    access: AccessArgs,
    #[command(flatten, next_help_heading = "Memory")]
    pub memory: MemoryArgs,
    #[command(flatten, next_help_heading = "Speculation")]
    drafts: DraftArgs,
    #[command(flatten, next_help_heading = "Requests")]
    requests: RequestArgs,
    #[command(flatten, next_help_heading = "Patience")]
    patience: TimeoutArgs,
    #[command(flatten, next_help_heading = "Arithmetic")]
    pub engine: EngineArgs,
    #[command(flatten, next_help_heading = "Device")]
    pub device: DeviceArgs,
}

impl ServeOptions {
    /// Bytes for bodies, texts and their copies.
    pub fn request_memory(&self) -> u64 {
        self.requests.request_memory
    }

    /// Whether an option is given on which only a server's memory depends.
    pub fn is_of_a_server(&self) -> bool {
        let RequestArgs { step_tokens, request_memory, .. } = self.requests;
        let differs =
            step_tokens != STEP_TOKENS_DEFAULT || Ok(request_memory) != request_bytes(REQUEST_MEMORY_DEFAULT);
        differs || self.memory.is_of_a_server()
    }

    /// Tokens of a step at most.
    pub fn step_tokens(&self) -> usize {
        self.requests.step_tokens
    }
}

/// Where it listens, and under which name.
#[derive(Debug, Args)]
struct ListenArgs {
    /// Address to listen on. Other machines can reach the server only if this is not a loopback address.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on. 0 takes any free port.
    #[arg(long, value_name = "PORT", default_value_t = 8080)]
    port: u16,
    /// Name of the model in the API. By default the name of its folder.
    #[arg(long, aliases = ["alias", "served-model-name"], value_name = "NAME")]
    name: Option<String>,
}

/// Bounds of requests.
#[derive(Debug, Args)]
struct RequestArgs {
    /// Remember only prompts, not answers. Reused prefixes then give the bits of a fresh run. --deterministic does so,
    /// too.
    #[arg(long, conflicts_with = "no_prefix_reuse")]
    exact_prefix_reuse: bool,
    /// Folder in which remembered prefixes are saved when the server ends, and from which the next server restores
    /// them. A damaged file is skipped with a warning.
    #[arg(long, value_name = "FOLDER", conflicts_with = "no_prefix_reuse")]
    prefix_cache_dir: Option<PathBuf>,
    /// Tokens of one step, answers and prompts together. It bounds how long a prompt can delay other requests. A prompt
    /// that is alone takes larger steps: in a pipeline, of up to about a second.
    #[arg(long, value_name = "N", default_value_t = STEP_TOKENS_DEFAULT, value_parser = count)]
    step_tokens: usize,
    /// Answers that may wait. A request is refused with 429 if there is no room for all of its answers, unless none
    /// waits.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = count)]
    queue: usize,
    /// Seconds that a request may wait before it is refused with 503.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = seconds())]
    queue_timeout: u64,
    /// Seconds that a request may take in total.
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = seconds())]
    deadline: u64,
    /// Most tokens of an answer if the request sets no number.
    #[arg(long, short = 'n', aliases = ["n-predict", "num-predict"], value_name = "N", default_value_t = 1024, value_parser = count)]
    max_tokens: usize,
    /// Most bytes of a request's body.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "8Mi")]
    body_limit: u64,
    /// Bytes for bodies, texts and their copies of all requests together, at least 1Mi. A request without room is
    /// refused with 503 or 413.
    #[arg(long, value_name = "BYTES", value_parser = request_bytes, default_value = REQUEST_MEMORY_DEFAULT)]
    request_memory: u64,
    /// Seconds in which a schema or grammar must be compiled.
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = seconds())]
    grammar_timeout: u64,
    /// Format of log lines: text, or one JSON object per line. RUST_LOG and -v select which lines are logged.
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t)]
    log_format: LogFormat,
}

/// Parses the memory of requests.
fn request_bytes(text: &str) -> Result<u64, String> {
    match parse_bytes(text)? {
        bytes if bytes >= REQUEST_MEMORY_MIN => Ok(bytes),
        bytes => Err(format!("{bytes} bytes have no room for a request: give at least 1Mi")),
    }
}

/// Runs the command.
pub fn run(args: &mut ServeArgs) -> Result<()> {
    keel_cpu::process::heap::stay_small();
    let signals = Signals::watch()?;
    if args.options.device.split.nodes.follows() {
        return node::follow(&args.options.device);
    }
    if args.models.model.len() < 2 && args.options.patience.keep_alive().is_some() {
        tracing::warn!("--keep-alive is for several models: a single one stays loaded");
    }
    named::warn_of_two(&args.models.model, args.options.server.name.as_deref());
    let split = &mut args.options.device.split;
    split.meet()?;
    split.nodes.signals = Some(signals);
    let mut reloads = node::Reloads::default();
    loop {
        let outcome = serve(args);
        if !reloads.meet_again(&mut args.options.device.split, &outcome) {
            return outcome;
        }
    }
}

fn serve(args: &ServeArgs) -> Result<()> {
    let ServeArgs { models, options } = args;
    let mmproj = models.tower.mmproj.as_deref();
    if models.shape.name().is_some() {
        if mmproj.is_some() {
            return Err(usage("--mmproj is for a GGUF model, and --shape has random weights"));
        }
        return serve_shape(options, &models.shape);
    }
    let models: Vec<Named> = models.model.iter().map(|model| Named::parse(model)).collect();
    match &models[..] {
        [] => serve_one(options, None, mmproj),
        [one] => serve_one(options, Some(one), mmproj),
        _ if mmproj.is_some_and(|file| file.as_os_str() != "none") => {
            Err(usage("--mmproj is for a single model; of several, each finds the file in its own folder"))
        }
        models => {
            options.device.split.refuse()?;
            multi_model::serve(options, models, mmproj)
        }
    }
}

/// The runtime of the tasks that answer requests.
fn runtime() -> Result<Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(BLOCKING_THREADS)
        .enable_all()
        .build()?)
}

/// Takes the server's port. Before a download the port is only tried, and freed at once. It must not listen meanwhile:
/// a load balancer would send clients to it, and nothing would answer them.
async fn bind_port(args: &ServeOptions) -> Result<TcpListener> {
    Ok(bind(&format!("{}:{}", args.server.host, args.server.port)).await?)
}

/// The device, which `keel serve` takes all planned memory of at the start.
fn device(args: &ServeOptions) -> DeviceArgs {
    if args.memory.on_demand { args.device.clone() } else { args.device.with_resident_memory() }
}

fn warn_if_open(address: SocketAddr, options: &ServerOptions) {
    if !address.ip().is_loopback() && options.keys.is_empty() {
        tracing::warn!(
            "anyone who can reach {address} may use this server: require a key with --api-key-file"
        );
    }
}

fn serve_one(args: &ServeOptions, named: Option<&Named>, mmproj: Option<&Path>) -> Result<()> {
    // The model may be downloaded, which can take hours. Wrong keys and a port in use are reported before that.
    let mut server_options = server_options(args)?;
    let tasks = runtime()?;
    drop(tasks.block_on(bind_port(args))?);
    let model = source::open(named.map(|named| named.model.as_str()), mmproj)?;
    let text = ServedText::new(&model.text_files()?)?;
    let name = named.and_then(|named| named.name.as_ref()).or(args.server.name.as_ref());
    server_options.model_id = name.cloned().unwrap_or_else(|| named::of(&model));
    server_options.prefix_store = prefix_store(args, &model, None)?;
    let options = server_plan::plan_server(args, &Subject::of(&model), server_plan::Models::One)?.options;
    let text = with_image_preprocessor(text, args.memory.image_pixels(), &model, options.vision)?;
    listen(args, tasks, text, server_options, options, |device| {
        let session = Session::load(device, &model, options)?;
        session::close(model);
        Ok(session)
    })
}

/// Serves a shape with random weights, and with a stand-in for the tokenizer.
fn serve_shape(args: &ServeOptions, shape: &ShapeArgs) -> Result<()> {
    let subject = shape.subject(args.memory.drafts.is_some_and(|drafts| drafts > 0))?;
    let text = ServedText::new(&TextFiles::of_bytes(subject.config.vocab)?)?;
    let mut server_options = server_options(args)?;
    server_options.model_id = args.server.name.clone().unwrap_or_else(|| subject.name.clone());
    if let Some(folder) = &args.requests.prefix_cache_dir {
        let model = format!("{:?} {}{}", args.engine.options().compute, subject.json, shape.flags());
        server_options.prefix_store = Some(PrefixStore { folder: folder.clone(), model });
    }
    let options = server_plan::plan_server(args, &subject, server_plan::Models::One)?.options;
    tracing::warn!(
        "the weights of {} are random: answers mean nothing, and texts are read and written in bytes",
        subject.name
    );
    listen(args, runtime()?, text, server_options, options, |device| {
        let session = Session::start(subject.on(device), options)?;
        session::forget();
        Ok(session)
    })
}

/// Takes the port, loads the one model and serves it.
fn listen(
    args: &ServeOptions,
    tasks: Runtime,
    text: ServedText,
    server_options: ServerOptions,
    options: EngineOptions,
    load: impl FnOnce(&DeviceArgs) -> Result<Session>,
) -> Result<()> {
    tasks.block_on(async {
        let listener = bind_port(args).await?;
        let mut session = load(&device(args))?;
        session.make_ready()?;
        tracing::info!(
            "{} for {} sequences of up to {} tokens, of which {} are keys and values",
            human_bytes(session.planned.total()),
            options.sequences,
            options.context,
            human_bytes(session.planned.get(Category::Kv)),
        );
        for plan in &session.devices {
            tracing::info!("{} of them on {}", human_bytes(plan.planned.total()), plan.name);
        }
        if let Some(driver) = session.memory().driver {
            tracing::info!("the driver has {}", driver.to_line());
        }
        if let Some(vision) = options.vision {
            let [tower, kept] = [Category::Vision, Category::Features].map(|of| session.planned.get(of));
            tracing::info!(
                "{} for pictures, and {} of host memory for the features of {} that are kept at a time",
                human_bytes(tower),
                human_bytes(kept),
                vision.pictures
            );
        }
        let requests = human_bytes(server_options.request_memory);
        tracing::info!("up to {requests} more are used for requests: bodies, texts and their copies");
        if args.memory.overcommit {
            let swap = human_bytes(session.planned.get(Category::Swap));
            tracing::info!("--overcommit: {swap} of host memory hold parked sequences");
        }
        let address = listener.local_addr()?;
        warn_if_open(address, &server_options);
        tracing::info!("{} is served at http://{address}", server_options.model_id);
        run_server(Server::new(session.engine, text, server_options)?, listener, args).await
    })
}

/// Serves until a signal, or until a node is lost.
async fn run_server(server: Server, listener: TcpListener, args: &ServeOptions) -> Result<()> {
    let nodes = &args.device.split.nodes;
    let drain = node::signal_or_loss(nodes);
    let _serving = nodes.signals.as_ref().map(Signals::serving);
    Ok(server.run(listener, drain, second_signal()).await?)
}

async fn second_signal() {
    wait_for_signal().await;
    wait_for_signal().await;
}

/// The text side of a model that is shown pictures of at most this many pixels, if any are planned for.
fn with_image_preprocessor(
    text: ServedText,
    pixels: usize,
    model: &ModelFiles,
    vision: Option<VisionOptions>,
) -> Result<ServedText> {
    let Some(VisionOptions { pictures, .. }) = vision else { return Ok(text) };
    let preprocessor = vision::image_preprocessor(model, &text.tokenizer, pixels, pictures)?;
    Ok(text.with_preprocessor(preprocessor))
}

/// Where a model's prefixes outlive the server: in a folder of its own where there are several.
fn prefix_store(args: &ServeOptions, model: &ModelFiles, own: Option<&str>) -> Result<Option<PrefixStore>> {
    let Some(folder) = &args.requests.prefix_cache_dir else { return Ok(None) };
    let folder = own.map_or_else(|| folder.clone(), |own| folder.join(own));
    let options = args.engine.options();
    // Prefixes of another form of keys, values or states are of no use.
    let mut model =
        format!("{} {:?} {}", model.identity(options.compute)?, options.kv_format(), options.state);
    match args.device.options().determinism {
        Determinism::Off => {}
        // Sums have an order of their own.
        Determinism::Steps => model += " deterministic",
        Determinism::Devices => model += " deterministic devices",
    }
    Ok(Some(PrefixStore { folder, model }))
}

/// The options that do not depend on the model.
fn server_options(args: &ServeOptions) -> Result<ServerOptions> {
    // Answers are run row by row and prompts in chunks, which sum in different orders.
    let exact = args.requests.exact_prefix_reuse || args.device.is_deterministic();
    let mut options = ServerOptions {
        batch: BatchOptions {
            step_tokens: args.requests.step_tokens,
            queue_limit: args.requests.queue,
            queue_timeout: Duration::from_secs(args.requests.queue_timeout),
            reuse_prefixes: !args.memory.no_prefix_reuse,
            reuse_generated: !args.memory.no_prefix_reuse && !exact,
            speculation: args.drafts.options(args.memory.drafts)?,
        },
        max_tokens_default: args.requests.max_tokens,
        deadline: Duration::from_secs(args.requests.deadline),
        body_bytes_max: args.requests.body_limit as usize,
        keys: args.access.keys()?,
        hosts: args.access.hosts(&args.server.host),
        cors_origins: args.access.cors.clone(),
        pictures: args.access.pictures()?,
        request_memory: args.requests.request_memory,
        give_back: session::forget,
        grammar_time: Duration::from_secs(args.requests.grammar_timeout),
        ..ServerOptions::default()
    };
    args.patience.apply(&mut options);
    Ok(options)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        serve: ServeArgs,
    }

    #[test]
    fn answers_are_reused_unless_bits_must_not_depend_on_it() {
        let reuses = |flags: &[&str]| {
            let cli = Cli::try_parse_from(["keel"].iter().chain(flags)).unwrap_or_else(|e| panic!("{e}"));
            server_options(&cli.serve.options).expect("right").batch.reuse_generated
        };
        assert!(reuses(&[]));
        for flag in
            ["--deterministic", "--deterministic=devices", "--exact-prefix-reuse", "--no-prefix-reuse"]
        {
            assert!(!reuses(&[flag]), "{flag}");
        }
    }
}
