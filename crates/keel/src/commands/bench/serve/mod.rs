//! `keel bench serve`: sends a load to a running server and reports how the server performs.
//!
//! The load is open: requests arrive at their times, whether or not earlier requests are answered. So the times show
//! when a server is too slow.

mod client;
mod events;
mod load;
mod report;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::failure::usage;
use crate::{input, output};
use client::{Answer, Client};
use load::{Lengths, Load, Planned};
use report::{Comparison, Report};

/// Send a load to a running server (keel's or another with OpenAI's API) and report throughput and latencies.
///
/// Every answer is streamed. Gaps between tokens are reported twice: all of them, and those that begin after the ramp.
/// With --concurrency N the ramp ends when N requests have a first token. With --check each answer is requested again,
/// alone, at temperature 0, and must be the same. If one is not, or a request fails, the exit code is 1.
#[derive(Debug, Args)]
pub struct BenchServeArgs {
    /// Address of the server.
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8080")]
    url: String,
    /// Name of the model to request. By default the first model that the server lists.
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Requests to send.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    requests: u32,
    /// Requests per second, at random moments. 0 sends as fast as --concurrency allows.
    #[arg(long, value_name = "R", default_value_t = 0.0)]
    rate: f64,
    /// Most requests in flight. With a rate, further requests wait, and their waiting time counts.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    concurrency: u32,
    /// Words of a prompt: N, or MIN-MAX.
    #[arg(long, value_name = "N", default_value = "100-300")]
    prompt: Lengths,
    /// Tokens of an answer: N, or MIN-MAX.
    #[arg(long = "gen", value_name = "N", default_value = "64")]
    generated: Lengths,
    /// Number of words that all prompts begin with.
    #[arg(long, value_name = "N", default_value_t = 0)]
    shared_prefix: usize,
    /// Read the requests from a file instead: a line of JSON with `prompt` and `max_tokens` for each.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["requests", "prompt", "generated", "shared_prefix"])]
    file: Option<PathBuf>,
    /// The same seed makes the same load.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Request every answer again, alone, and compare.
    #[arg(long)]
    check: bool,
    /// Key of the server.
    #[arg(long, value_name = "KEY", env = "KEEL_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &BenchServeArgs) -> Result<()> {
    if !(0.0..=1e6).contains(&args.rate) {
        return Err(usage(format!("--rate {}: expected 0 to 1000000", args.rate)));
    }
    let load = match &args.file {
        Some(path) => {
            let text = input::text_of(path, input::TEXTS_BYTES_MAX)?;
            Load::parse(&text, args.rate, args.seed)?
        }
        None => Load::random(
            args.requests as usize,
            args.prompt,
            args.generated,
            args.shared_prefix,
            args.rate,
            args.seed,
        ),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let report = runtime.block_on(measure(args, load))?;
    if args.json {
        output::json(&report.to_json())?
    } else {
        output::text(&report.to_text())?
    }
    report.check()
}

async fn measure(args: &BenchServeArgs, load: Load) -> Result<Report> {
    // An empty variable is no key.
    let key = args.api_key.clone().filter(|key| !key.is_empty());
    let mut client = Client::new(&args.url, key)?;
    let model = match &args.model {
        Some(name) => name.clone(),
        None => client.first_model().await?,
    };
    client.set_model(model);
    let client = Arc::new(client);
    let start = Instant::now();
    let answers = send_all(&client, &load, args.concurrency as usize).await?;
    let wall = start.elapsed();
    let memory = client.memory().await;
    let comparison = if args.check { Some(compare(&client, &load, &answers).await) } else { None };
    Ok(Report::new(answers, args.concurrency as usize, wall, memory, comparison))
}

/// Requests every answer again, alone, and compares.
async fn compare(client: &Client, load: &Load, answers: &[Result<Answer>]) -> Comparison {
    let mut comparison = Comparison::default();
    for (planned, answer) in load.requests.iter().zip(answers) {
        let Ok(answer) = answer else { continue };
        match client.ask(planned).await {
            Ok(again) => comparison.differing += usize::from(again.text != answer.text),
            Err(error) => comparison.failures.push(format!("{error:#}")),
        }
    }
    comparison
}

/// Sends every request at its time. Returns the answers in the order of the requests.
async fn send_all(client: &Arc<Client>, load: &Load, concurrency: usize) -> Result<Vec<Result<Answer>>> {
    let places = Arc::new(Semaphore::new(concurrency));
    let start = Instant::now();
    let mut tasks = Vec::new();
    for planned in &load.requests {
        let due = start + Duration::from_secs_f64(planned.at_s);
        let (client, places) = (Arc::clone(client), Arc::clone(&places));
        let planned = planned.clone();
        tasks.push(tokio::spawn(async move { send_one(&client, &places, &planned, due).await }));
    }
    let mut answers = Vec::new();
    for task in tasks {
        answers.push(task.await?);
    }
    Ok(answers)
}

async fn send_one(client: &Client, places: &Semaphore, planned: &Planned, due: Instant) -> Result<Answer> {
    tokio::time::sleep_until(due).await;
    let _place = places.acquire().await?;
    // Without a rate, a request arrives when it can be sent.
    let arrived = if planned.at_s > 0.0 { due } else { Instant::now() };
    let mut answer = client.ask(planned).await?;
    answer.waited(arrived);
    Ok(answer)
}
