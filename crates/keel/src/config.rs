//! The configuration file: defaults of options, for all commands or for one command.
//!
//! A key is the long name of an option. At the top of the file it applies to every command that has the option. In a
//! table named after a command, it applies to that command (`[bench.serve]` for `keel bench serve`), which also takes
//! the options of all commands. The command line and the environment take precedence, also over options of the file
//! that exclude theirs. A value at the top that a command cannot use does not apply to it. One that no command can use
//! is an error.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};
use toml::{Table, Value};

use crate::failure::usage;
use crate::input;

/// Names a file to use instead of the usual one. An empty value means no file.
const VARIABLE: &str = "KEEL_CONFIG";

/// Options of a plan on which only a server's memory depends. At the top of the file they are for servers, and so for
/// plans of servers.
const OF_A_SERVER: [&str; 14] = [
    "memory-limit",
    "sequences",
    "kv-cache",
    "overcommit",
    "swap",
    "prefix-states",
    "images",
    "image-pixels",
    "no-prefix-reuse",
    "on-demand",
    "drafts",
    "pooling",
    "step-tokens",
    "request-memory",
];
/// Options that a plan of a server refuses.
const OF_A_RUN: [&str; 4] = ["batch", "limit", "speculate", "speculate-optimistic"];
/// Options of processes that share a model. Other commands refuse them.
const NODES: [&str; 2] = ["nodes", "node"];
const RUN_BY_NODES: [&str; 4] = ["serve", "generate", "chat", "bench"];

/// A configuration file's contents; empty if there is no file.
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// The path of the file, whether or not it exists.
    pub path: Option<PathBuf>,
    /// Whether the file exists.
    pub is_there: bool,
    table: Table,
    /// Whether `keel plan` plans a server.
    plans_a_server: bool,
}

impl Config {
    /// Reads the file that `--config` or the variable names, else the usual file if it exists.
    ///
    /// # Errors
    /// A named file cannot be read, or the file is not TOML.
    pub fn find(args: impl Iterator<Item = OsString>) -> Result<Config> {
        let named = named(args).or_else(|| std::env::var_os(VARIABLE)).map(PathBuf::from);
        let is_none = |path: &PathBuf| path.as_os_str().is_empty() || path == Path::new("/dev/null");
        if named.as_ref().is_some_and(is_none) {
            return Ok(Config::default());
        }
        let is_named = named.is_some();
        let Some(path) = named.or_else(usual) else { return Ok(Config::default()) };
        if !is_named && !path.exists() {
            return Ok(Config { path: Some(path), ..Config::default() });
        }
        let text = input::text_of(&path, input::SETTINGS_BYTES_MAX)?;
        let table =
            Config::parse(&text).with_context(|| format!("{} is no configuration", path.display()))?;
        Ok(Config { path: Some(path), is_there: true, table, ..Config::default() })
    }

    fn parse(text: &str) -> Result<Table> {
        Ok(text.parse::<Table>()?)
    }

    /// Makes the file's values the defaults of the options. Variables of the environment that are empty do not count.
    ///
    /// # Errors
    /// A key is not an option, or a value does not suit its option.
    pub fn apply(&self, command: Command) -> Result<Command> {
        let place = || self.path.as_deref().unwrap_or(Path::new("")).display().to_string();
        let globals: Vec<Arg> = globals(&command).cloned().collect();
        check(&self.table, &command, &globals, &mut Vec::new()).with_context(place)?;
        Ok(self.fill(command, &globals, &mut Vec::new()))
    }

    fn fill(&self, command: Command, globals: &[Arg], path: &mut Vec<String>) -> Command {
        let here = path.clone();
        let mut command = command.mut_args(|arg| match self.value(&here, &arg) {
            Some(value) => with_default(without_empty_variable(arg), value),
            None => without_empty_variable(arg),
        });
        for (global, value) in self.own_globals(&here, globals.iter()) {
            command = command.arg(with_default(global.clone(), value));
        }
        command.mut_subcommands(|sub| {
            path.push(sub.get_name().to_string());
            let sub = self.fill(sub, globals, path);
            path.pop();
            sub
        })
    }

    /// The options of all commands for which the table of the command at `path` has another value than the file's top.
    pub fn own_globals<'a>(
        &'a self,
        path: &'a [String],
        globals: impl Iterator<Item = &'a Arg>,
    ) -> impl Iterator<Item = (&'a Arg, &'a Value)> {
        globals
            .filter_map(move |arg| Some((arg, self.value(path, arg)?)))
            .filter(move |(arg, value)| !path.is_empty() && self.value(&[], arg) != Some(value))
    }

    /// The file for `keel plan` of a server: values of `[serve]` apply, too, unless `[plan]` sets them.
    pub fn for_plan_of_server(&self, command: &Command) -> Config {
        let mut table = self.table.clone();
        let serve = table.get("serve").and_then(Value::as_table).cloned().unwrap_or_default();
        let own = table.entry("plan").or_insert_with(|| Value::Table(Table::new())).as_table_mut();
        if let (Some(own), Some(plan)) = (own, command.find_subcommand("plan")) {
            for (key, value) in serve {
                let Some(arg) = plan.get_arguments().find(|arg| names(&key, arg)) else { continue };
                // A plan is of one model, and is made in one process.
                let is_taken =
                    suits(&value, arg).is_ok() && !NODES.contains(&arg.get_long().unwrap_or_default());
                if is_taken && entry(own, arg).is_none() {
                    own.insert(key, value);
                }
            }
        }
        Config { table, plans_a_server: true, ..self.clone() }
    }

    /// The file without the values of options that exclude an option which the command line or the environment gives;
    /// `None` if there is no such value. `command` is built.
    pub fn without_conflicts(&self, command: &Command, matches: &ArgMatches) -> Option<Config> {
        let (mut command, mut matches, mut path) = (command, matches, Vec::new());
        while let Some((name, inner)) = matches.subcommand() {
            (command, matches) = (command.find_subcommand(name)?, inner);
            path.push(name.to_string());
        }
        let is_given = |arg: &Arg| {
            let source = matches.value_source(arg.get_id().as_str());
            matches!(source, Some(ValueSource::CommandLine | ValueSource::EnvVariable))
        };
        let excludes =
            |a: &Arg, b: &Arg| command.get_arg_conflicts_with(a).iter().any(|arg| arg.get_id() == b.get_id());
        let given: Vec<&Arg> = command.get_arguments().filter(|arg| is_given(arg)).collect();
        let loses = |arg: &&Arg| {
            let is_excluded = || given.iter().any(|other| excludes(arg, other) || excludes(other, arg));
            self.value(&path, arg).is_some() && !is_given(arg) && is_excluded()
        };
        let losers: Vec<&Arg> = command.get_arguments().filter(loses).collect();
        if losers.is_empty() {
            return None;
        }
        let mut without = self.clone();
        losers.iter().for_each(|arg| without.remove(&path, arg));
        Some(without)
    }

    /// Removes the values for an option of the command at `path`.
    fn remove(&mut self, path: &[String], arg: &Arg) {
        let mut table = &mut self.table;
        table.retain(|key, value| value.is_table() || !names(key, arg));
        for name in path {
            let Some(inner) = table.get_mut(name).and_then(Value::as_table_mut) else { break };
            table = inner;
            table.retain(|key, value| value.is_table() || !names(key, arg));
        }
    }

    /// The file's value for an option of the command at `path`. The innermost table that has it takes precedence.
    pub fn value(&self, path: &[String], arg: &Arg) -> Option<&Value> {
        let mut found = entry(&self.table, arg).filter(|value| self.is_taken_from_top(path, arg, value));
        let mut table = &self.table;
        for name in path {
            let Some(inner) = table.get(name).and_then(Value::as_table) else { break };
            table = inner;
            found = entry(table, arg).or(found);
        }
        found
    }

    /// Whether a value at the top of the file applies to an option of the command at `path`: the command would take it
    /// on the command line, and not do other work because of it.
    fn is_taken_from_top(&self, path: &[String], arg: &Arg, value: &Value) -> bool {
        let command = path.first().map(String::as_str).unwrap_or_default();
        let option = arg.get_long().unwrap_or_default();
        let is_refused_now = match command {
            "plan" if self.plans_a_server => OF_A_RUN.contains(&option),
            "plan" => OF_A_SERVER.contains(&option),
            _ => false,
        };
        !is_refused_now && !is_refused(command, option) && suits(value, arg).is_ok()
    }
}

/// Whether a command has an option, as one of a group that it shares with other commands, and always refuses it.
pub fn is_refused(command: &str, option: &str) -> bool {
    let is_for_others = NODES.contains(&option) && !RUN_BY_NODES.contains(&command);
    is_for_others
        || match command {
            "fit" => option == "memory-limit",
            "inspect" => ["memory-limit", "devices", "split"].contains(&option),
            _ => false,
        }
}

/// Whether an option takes this value.
fn suits(value: &Value, arg: &Arg) -> Result<(), String> {
    if is_flag(arg) {
        return if value.is_bool() { Ok(()) } else { Err("expected true or false".into()) };
    }
    if value.is_array() && !matches!(arg.get_action(), ArgAction::Append) {
        return Err("expected one value, not a list".into());
    }
    let words = words(value).unwrap_or_default();
    if words.is_empty() {
        return Ok(());
    }
    // The values are parsed alone: the options that this one excludes or requires do not matter here.
    let mut alone = Arg::new(arg.get_id().clone()).action(arg.get_action().clone()).num_args(1..=words.len());
    alone = alone.value_parser(arg.get_value_parser().clone()).required(true);
    alone = alone.value_names(arg.get_value_names().unwrap_or_default().iter().cloned());
    if let Some(delimiter) = arg.get_value_delimiter() {
        alone = alone.value_delimiter(delimiter);
    }
    let words = std::iter::once("--".to_string()).chain(words);
    let parsed = Command::new("keel").no_binary_name(true).arg(alone).try_get_matches_from(words);
    parsed.map(drop).map_err(|error| {
        let text = error.to_string();
        // Advice about the command follows after an empty line.
        let reason = text.split("\n\n").next().unwrap_or_default();
        reason.trim_start_matches("error: ").into()
    })
}

/// The options that all commands have.
pub fn globals(root: &Command) -> impl Iterator<Item = &Arg> {
    root.get_arguments().filter(|arg| arg.is_global_set())
}

/// An option whose variable counts as not given if it is empty. A secret that is empty is a mistake, which its command
/// refuses. An empty name of the configuration file means no file.
fn without_empty_variable(arg: Arg) -> Arg {
    let is_kept = arg.is_hide_env_values_set() || arg.get_env().is_some_and(|name| name == VARIABLE);
    let is_empty = |name| std::env::var_os(name).is_some_and(|value| value.is_empty());
    match arg.get_env().is_some_and(is_empty) && !is_kept {
        true => arg.env(None::<&'static str>),
        false => arg,
    }
}

/// The file that `--config` names. The parser of the command line reads this option again later.
fn named(args: impl Iterator<Item = OsString>) -> Option<OsString> {
    let mut args = args.skip(1).take_while(|arg| arg != "--");
    while let Some(arg) = args.next() {
        if arg == "--config" {
            return args.next();
        }
        if let Some(file) = arg.to_str().and_then(|arg| arg.strip_prefix("--config=")) {
            return Some(file.into());
        }
    }
    None
}

/// The path of `keel/config.toml` in the configuration folder.
fn usual() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let folder = variable("XDG_CONFIG_HOME").or_else(|| Some(variable("HOME")?.join(".config")))?;
    Some(folder.join("keel/config.toml"))
}

/// Whether a key names an option, by its long name or an alias.
fn names(key: &str, arg: &Arg) -> bool {
    let key = key.replace('_', "-");
    let is_own = arg.get_long() == Some(key.as_str());
    is_own || arg.get_all_aliases().unwrap_or_default().contains(&key.as_str())
}

/// Whether the file has no say about an option.
fn is_fixed(arg: &Arg) -> bool {
    ["config", "help", "version"].contains(&arg.get_id().as_str())
}

fn entry<'t>(table: &'t Table, arg: &Arg) -> Option<&'t Value> {
    if is_fixed(arg) {
        return None;
    }
    table.iter().find(|(key, value)| !value.is_table() && names(key, arg)).map(|(_, value)| value)
}

/// Refuses keys that no command reads, and values at the top that no command can use.
fn check(table: &Table, command: &Command, globals: &[Arg], path: &mut Vec<String>) -> Result<()> {
    let whose = if path.is_empty() { "any command".to_string() } else { format!("keel {}", path.join(" ")) };
    for (key, value) in table {
        if let Some(inner) = value.as_table() {
            let Some(sub) = command.find_subcommand(key) else {
                bail!("[{key}]: {whose} has no such command; tables are named after commands");
            };
            path.push(key.clone());
            check(inner, sub, globals, path)?;
            path.pop();
            continue;
        }
        let mut args = all_args(command);
        args.extend(globals);
        args.retain(|arg| names(key, arg) && !is_fixed(arg));
        if args.is_empty() {
            bail!("{key}: {whose} has no option --{}", key.replace('_', "-"));
        }
        if args.iter().all(|arg| is_flag(arg)) && !value.is_bool() {
            bail!("{key}: expected true or false");
        }
        if words(value).is_none() {
            bail!("{key}: expected a text, a number, true or false, or a list of these");
        }
        // In the table of a command its parser refuses the value.
        let reasons: Option<BTreeSet<String>> = args.iter().map(|arg| suits(value, arg).err()).collect();
        if let Some(reasons) = reasons.filter(|_| path.is_empty()) {
            let reasons: Vec<String> = reasons.into_iter().collect();
            return Err(usage(format!("{key}: {}", reasons.join("; "))));
        }
    }
    Ok(())
}

/// The options of a command and of its subcommands.
fn all_args(command: &Command) -> Vec<&Arg> {
    command.get_arguments().chain(command.get_subcommands().flat_map(all_args)).collect()
}

fn is_flag(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::SetTrue)
}

/// A value in the form that the command line would have.
pub fn words(value: &Value) -> Option<Vec<String>> {
    Some(match value {
        Value::String(text) => vec![text.clone()],
        Value::Integer(number) => vec![number.to_string()],
        Value::Float(number) => vec![number.to_string()],
        Value::Boolean(is_true) => vec![is_true.to_string()],
        Value::Array(items) => {
            let items: Option<Vec<Vec<String>>> = items.iter().map(words).collect();
            items?.concat()
        }
        Value::Datetime(_) | Value::Table(_) => return None,
    })
}

/// Sets the option's default. The strings are leaked, because the parser needs them for the lifetime of the program.
fn with_default(arg: Arg, value: &Value) -> Arg {
    let words = words(value).unwrap_or_default();
    let words: Vec<&'static str> = words.into_iter().map(|word| &*Box::leak(word.into_boxed_str())).collect();
    arg.default_values(words)
}

#[cfg(test)]
mod tests;
