//! `keel config`: the values in force, and their origins.

use anyhow::Result;
use clap::{Arg, Args, Command};
use serde_json::{Value, json};

use crate::config::{Config, globals, words};
use crate::failure::usage;
use crate::output;

/// Show the configuration in use, and where each value comes from: the environment, the file or the program.
///
/// The file is $XDG_CONFIG_HOME/keel/config.toml (usually ~/.config/keel/config.toml), or the one that --config or
/// KEEL_CONFIG names. Its keys are the long names of options. Keys at the top apply to all commands that can use them,
/// keys in a table such as `[serve]` to one command. Options on the command line and environment variables that are not
/// empty take precedence.
#[derive(Debug, Args)]
pub struct ConfigArgs {
    /// Show all options of this command. Without it, show the options of all commands that the file or the environment
    /// sets.
    #[arg(value_name = "COMMAND")]
    command: Vec<String>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// The value of an option if the command line does not set it.
struct Setting {
    command: String,
    option: String,
    value: Option<String>,
    source: &'static str,
}

/// Runs the command.
pub fn run(args: &ConfigArgs, config: &Config, root: &Command) -> Result<()> {
    let mut settings = Vec::new();
    if args.command.is_empty() {
        collect(config, root, root, &mut Vec::new(), &mut settings);
        settings.retain(|setting| setting.source != DEFAULT);
    } else {
        let mut command = root;
        for name in &args.command {
            let missing = || usage(format!("there is no command {}", args.command.join(" ")));
            command = command.find_subcommand(name).ok_or_else(missing)?;
        }
        own(config, root, command, &args.command, &mut settings);
    }
    let file = config.path.as_ref().map(|path| path.display().to_string());
    if args.json {
        let settings: Vec<Value> = settings.iter().map(Setting::to_json).collect();
        return output::json(&json!({"file": file, "is_there": config.is_there, "settings": settings}));
    }
    let state = if config.is_there { "" } else { " (not there)" };
    output::line(&format!("file  {}{state}\n", file.unwrap_or("none".into())))?;
    if settings.is_empty() {
        output::line(
            "nothing is changed: all options are as the program has them (keel config COMMAND lists them)",
        )?;
    }
    settings.iter().try_for_each(|setting| output::line(&setting.to_line()))
}

const DEFAULT: &str = "default";

fn collect(
    config: &Config,
    root: &Command,
    command: &Command,
    path: &mut Vec<String>,
    settings: &mut Vec<Setting>,
) {
    own(config, root, command, path, settings);
    for sub in command.get_subcommands() {
        path.push(sub.get_name().to_string());
        collect(config, root, sub, path, settings);
        path.pop();
    }
}

/// Collects the options of one command, and those of all commands for which it has a value of its own.
fn own(config: &Config, root: &Command, command: &Command, path: &[String], settings: &mut Vec<Setting>) {
    let hidden = ["help", "version", "config"];
    let of_all = config.own_globals(path, globals(root)).map(|(arg, _)| arg);
    let options = command.get_arguments().chain(of_all);
    let options = options.filter(|arg| !hidden.contains(&arg.get_id().as_str()));
    for (arg, option) in options.filter_map(|arg| Some((arg, arg.get_long()?))) {
        let (value, source) = value_of(config, path, arg);
        let value = if arg.is_hide_env_values_set() { value.map(|_| "(hidden)".into()) } else { value };
        settings.push(Setting { command: path.join(" "), option: option.into(), value, source });
    }
}

fn value_of(config: &Config, path: &[String], arg: &Arg) -> (Option<String>, &'static str) {
    let variable = arg.get_env().and_then(std::env::var_os).filter(|value| !value.is_empty());
    if let Some(value) = variable {
        return (Some(value.to_string_lossy().into_owned()), "environment");
    }
    if let Some(value) = config.value(path, arg) {
        return (words(value).map(|words| words.join(", ")), "file");
    }
    let defaults: Vec<String> =
        arg.get_default_values().iter().map(|value| value.to_string_lossy().into_owned()).collect();
    ((!defaults.is_empty()).then(|| defaults.join(", ")), DEFAULT)
}

impl Setting {
    fn to_line(&self) -> String {
        let name = format!("keel {} --{}", self.command, self.option);
        let name = name.replace("keel  ", "keel ");
        format!("{name:<44} {:<24} {}", self.value.as_deref().unwrap_or("-"), self.source)
    }

    fn to_json(&self) -> Value {
        json!({"command": self.command, "option": self.option, "value": self.value, "source": self.source})
    }
}
