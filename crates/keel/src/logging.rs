//! Logging to standard error.

use clap::ValueEnum;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::layer;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// How a server writes its lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Time, level, and the request that a line is about.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// Starts logging. By default the program's own lines are shown; `-v` adds those of libraries. RUST_LOG overrides both.
/// `server` is the form of a server's lines, which include the time in either form.
pub fn begin(is_verbose: bool, is_quiet: bool, server: Option<LogFormat>) {
    let default = match (is_verbose, is_quiet, server) {
        (true, _, Some(_)) => "info,keel=debug",
        (true, _, None) => "info",
        (false, true, _) => "warn",
        (false, false, _) => "warn,keel=info",
    };
    let asked = std::env::var("RUST_LOG").ok().filter(|filter| !filter.is_empty());
    let filter = asked.as_deref().map_or(Ok(EnvFilter::new(default)), |filter| filter.parse::<EnvFilter>());
    let (filter, problem) = match filter {
        Ok(filter) => (filter, None),
        Err(problem) => (EnvFilter::new(default), Some(problem)),
    };
    let all = tracing_subscriber::registry().with(filter);
    // No colours, whatever features other crates give the formatter: lines go to files and supervisors, too.
    let lines = || layer().with_writer(std::io::stderr).with_target(false).with_ansi(false);
    match server {
        None => all.with(lines().without_time()).init(),
        Some(LogFormat::Text) => all.with(lines()).init(),
        Some(LogFormat::Json) => all.with(lines().json()).init(),
    }
    if let Some(problem) = problem {
        tracing::warn!("RUST_LOG is not used: {problem}");
    }
}
