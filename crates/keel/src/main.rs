//! `keel`: runs hybrid language models from the command line.
//!
//! Results go to standard output, progress and errors to standard error. Exit codes: 0 on success, 2 for wrong usage, 1
//! for every other failure. A failure prints one line that says what is wrong and what to do.

#![forbid(unsafe_code)]

mod args;
mod commands;
mod config;
mod failure;
mod fetch;
mod input;
mod logging;
mod output;
mod placed_model;
mod pooling;
mod progress;
mod renderer;
mod report;
mod server_plan;
mod session;
mod signals;
mod source;
mod speculation;
mod split_model;
mod vision;

use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser, Subcommand};

/// Run hybrid language models. Memory is known before the start, never exceeded, and all given back.
#[derive(Debug, Parser)]
#[command(name = "keel", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Log more on standard error.
    #[arg(short, long, global = true)]
    verbose: bool,
    /// The configuration file, instead of $XDG_CONFIG_HOME/keel/config.toml. An empty name means no file. See keel
    /// config.
    #[arg(long, global = true, value_name = "FILE", env = "KEEL_CONFIG")]
    config: Option<std::ffi::OsString>,
}

#[derive(Debug, Subcommand)]
enum Command {
    Generate(commands::generate::GenerateArgs),
    Chat(commands::chat::ChatArgs),
    Plan(commands::plan::PlanArgs),
    Fit(commands::fit::FitArgs),
    Inspect(commands::inspect::InspectArgs),
    Quantize(commands::quantize::QuantizeArgs),
    Logits(commands::logits::LogitsArgs),
    Eval(commands::eval::EvalArgs),
    Embed(commands::embed::EmbedArgs),
    Bench(commands::bench::BenchArgs),
    Serve(commands::serve::ServeArgs),
    #[cfg(feature = "hub")]
    Pull(commands::pull::PullArgs),
    #[cfg(feature = "hub")]
    List(commands::list::ListArgs),
    #[cfg(feature = "hub")]
    Rm(commands::rm::RmArgs),
    Config(commands::config::ConfigArgs),
    Doctor(commands::doctor::DoctorArgs),
    Completions(commands::completions::CompletionsArgs),
    #[command(hide = true)]
    Man(commands::completions::ManArgs),
}

/// The command line. The help of a command leaves out the options that it always refuses.
fn command_line() -> clap::Command {
    Cli::command().mut_subcommands(|sub| {
        let name = sub.get_name().to_string();
        sub.mut_args(|arg| {
            let is_refused = arg.get_long().is_some_and(|option| config::is_refused(&name, option));
            if is_refused { arg.hide(true) } else { arg }
        })
    })
}

fn main() -> ExitCode {
    failure::guard(|| {
        if renderer::is_asked_for() {
            return renderer::run();
        }
        renderer::set();
        let config = config::Config::find(std::env::args_os())?;
        let cli = parse(&config)?;
        let quiet = matches!(&cli.command, Command::Generate(args) if args.quiet);
        let server = match &cli.command {
            Command::Serve(args) => Some(args.log_format()),
            _ => None,
        };
        logging::begin(cli.verbose, quiet, server);
        match cli.command {
            Command::Generate(mut args) => {
                args.device.split.meet()?;
                commands::generate::run(&args)
            }
            Command::Chat(mut args) => {
                args.device.split.meet()?;
                commands::chat::run(&args)
            }
            Command::Plan(args) => commands::plan::run(&args, cli.verbose),
            Command::Fit(args) => commands::fit::run(&args),
            Command::Inspect(args) => commands::inspect::run(&args),
            Command::Quantize(args) => commands::quantize::run(&args),
            Command::Logits(args) => commands::logits::run(&args),
            Command::Eval(args) => commands::eval::run(&args),
            Command::Embed(args) => commands::embed::run(&args),
            Command::Bench(mut args) => {
                args.device.split.meet()?;
                commands::bench::run(&args)
            }
            Command::Serve(mut args) => commands::serve::run(&mut args),
            #[cfg(feature = "hub")]
            Command::Pull(args) => commands::pull::run(&args),
            #[cfg(feature = "hub")]
            Command::List(args) => commands::list::run(&args),
            #[cfg(feature = "hub")]
            Command::Rm(args) => commands::rm::run(&args),
            Command::Config(args) => commands::config::run(&args, &config, &command_line()),
            Command::Doctor(args) => commands::doctor::run(&args),
            Command::Completions(args) => commands::completions::run(&args, command_line()),
            Command::Man(args) => commands::completions::run_man(&args, command_line()),
        }
    })
}

/// Whether the command is `keel plan` of a server.
fn plans_a_server(matches: &ArgMatches) -> bool {
    let plan = matches.subcommand_matches("plan");
    let plan = plan.and_then(|plan| commands::plan::PlanArgs::from_arg_matches(plan).ok());
    plan.is_some_and(|plan| plan.is_of_a_server())
}

/// Parses the command line. Values of the configuration file apply where neither the command line nor the environment
/// sets an option or one that excludes it.
fn parse(config: &config::Config) -> anyhow::Result<Cli> {
    let parse = |config: &config::Config| anyhow::Ok(config.apply(command_line())?.try_get_matches());
    let mut matches = parse(config)?;
    let of_server;
    let mut config = config;
    if matches.as_ref().is_ok_and(plans_a_server) {
        of_server = config.for_plan_of_server(&command_line());
        config = &of_server;
        matches = parse(config)?;
    }
    let without = matches.as_ref().ok().filter(|_| config.is_there).and_then(|matches| {
        let mut command = command_line();
        command.build();
        config.without_conflicts(&command, matches)
    });
    if let Some(config) = without {
        matches = parse(&config)?;
    }
    let cli = matches.and_then(|matches| Cli::from_arg_matches(&matches));
    Ok(cli.unwrap_or_else(|error| {
        if let (ErrorKind::ValueValidation | ErrorKind::InvalidValue, true, Some(path)) =
            (error.kind(), config.is_there, &config.path)
        {
            output::aside(&format!("keel: values may come from {}: see keel config\n", path.display()));
        }
        error.exit()
    }))
}
