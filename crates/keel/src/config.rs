//! The configuration file: defaults of options, for all commands or for one command.
//!
//! A key is the long name of an option. At the top of the file it applies to every command that has the option. In a
//! table named after a command, it applies to that command (`[bench.serve]` for `keel bench serve`). The command line
//! and the environment take precedence, also over options of the file that exclude theirs.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};
use toml::{Table, Value};

use crate::input;

/// Names a file to use instead of the usual one. An empty value means no file.
const VARIABLE: &str = "KEEL_CONFIG";

/// A configuration file's contents; empty if there is no file.
#[derive(Debug, Default)]
pub struct Config {
    /// The path of the file, whether or not it exists.
    pub path: Option<PathBuf>,
    /// Whether the file exists.
    pub is_there: bool,
    table: Table,
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
        Ok(Config { path: Some(path), is_there: true, table })
    }

    fn parse(text: &str) -> Result<Table> {
        Ok(text.parse::<Table>()?)
    }

    /// Makes the file's values the defaults of the options.
    ///
    /// # Errors
    /// A key is not an option, or a value does not suit its option.
    pub fn apply(&self, command: Command) -> Result<Command> {
        let place = || self.path.as_deref().unwrap_or(Path::new("")).display().to_string();
        check(&self.table, &command, &mut Vec::new()).with_context(place)?;
        Ok(self.fill(command, &mut Vec::new()))
    }

    fn fill(&self, command: Command, path: &mut Vec<String>) -> Command {
        let here = path.clone();
        let command = command.mut_args(|arg| match self.value(&here, &arg) {
            Some(value) => with_default(arg, value),
            None => arg,
        });
        command.mut_subcommands(|sub| {
            path.push(sub.get_name().to_string());
            let sub = self.fill(sub, path);
            path.pop();
            sub
        })
    }

    /// The file for `keel plan` of a server: values of `[serve]` apply, too, unless `[plan]` sets them.
    pub fn for_plan_of_server(&self, command: &Command) -> Config {
        let mut table = self.table.clone();
        let serve = table.get("serve").and_then(Value::as_table).cloned().unwrap_or_default();
        let own = table.entry("plan").or_insert_with(|| Value::Table(Table::new())).as_table_mut();
        if let (Some(own), Some(plan)) = (own, command.find_subcommand("plan")) {
            for (key, value) in serve {
                let Some(arg) = plan.get_arguments().find(|arg| names(&key, arg)) else { continue };
                // A plan is of one model.
                let is_taken = !value.is_array() || matches!(arg.get_action(), ArgAction::Append);
                if is_taken && entry(own, arg).is_none() {
                    own.insert(key, value);
                }
            }
        }
        Config { path: self.path.clone(), is_there: self.is_there, table }
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
        let mut without =
            Config { path: self.path.clone(), is_there: self.is_there, table: self.table.clone() };
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
        let mut found = entry(&self.table, arg);
        let mut table = &self.table;
        for name in path {
            let Some(inner) = table.get(name).and_then(Value::as_table) else { break };
            table = inner;
            found = entry(table, arg).or(found);
        }
        found
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

fn entry<'t>(table: &'t Table, arg: &Arg) -> Option<&'t Value> {
    let is_fixed = ["config", "help", "version"].contains(&arg.get_id().as_str());
    if is_fixed {
        return None;
    }
    table.iter().find(|(key, value)| !value.is_table() && names(key, arg)).map(|(_, value)| value)
}

/// Refuses keys that no command reads.
fn check(table: &Table, command: &Command, path: &mut Vec<String>) -> Result<()> {
    let whose = if path.is_empty() { "any command".to_string() } else { format!("keel {}", path.join(" ")) };
    for (key, value) in table {
        if let Some(inner) = value.as_table() {
            let Some(sub) = command.find_subcommand(key) else {
                bail!("[{key}]: {whose} has no such command; tables are named after commands");
            };
            path.push(key.clone());
            check(inner, sub, path)?;
            path.pop();
            continue;
        }
        let Some(arg) = find(command, key) else {
            bail!("{key}: {whose} has no option --{}", key.replace('_', "-"))
        };
        if is_flag(&arg) && !value.is_bool() {
            bail!("{key}: expected true or false");
        }
        if words(value).is_none() {
            bail!("{key}: expected a text, a number, true or false, or a list of these");
        }
    }
    Ok(())
}

/// Finds an option of a command or of its subcommands.
fn find(command: &Command, key: &str) -> Option<Arg> {
    let own = command.get_arguments().find(|arg| names(key, arg)).cloned();
    own.or_else(|| command.get_subcommands().find_map(|sub| find(sub, key)))
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
mod tests {
    use super::*;

    fn command() -> Command {
        let context =
            || Arg::new("context").long("context").alias("ctx").value_parser(clap::value_parser!(u32));
        let quiet = Arg::new("quiet").long("quiet").action(ArgAction::SetTrue);
        let stop = Arg::new("stop").long("stop").action(ArgAction::Append);
        let inner = Command::new("serve").arg(Arg::new("rate").long("rate"));
        let generate = Command::new("generate").args([context(), quiet, stop]);
        Command::new("keel")
            .subcommand(generate)
            .subcommand(Command::new("bench").arg(context()).subcommand(inner))
    }

    fn config(text: &str) -> Config {
        Config { table: Config::parse(text).expect("TOML"), ..Config::default() }
    }

    /// The parser knows each option that another one excludes. It panics at others when it is asked.
    #[test]
    fn excluded_options_exist() {
        fn check(command: &Command) -> usize {
            let own = command.get_arguments().map(|arg| command.get_arg_conflicts_with(arg).len());
            own.sum::<usize>() + command.get_subcommands().map(check).sum::<usize>()
        }
        let mut command = <crate::Cli as clap::CommandFactory>::command();
        command.build();
        assert!(check(&command) > 30);
    }

    #[test]
    fn an_option_that_is_given_excludes_those_of_the_file_that_it_conflicts_with() {
        let one = || Arg::new("one").long("one").conflicts_with("two");
        let two = || Arg::new("two").long("two");
        let of = |name: &'static str| Command::new(name).args([one(), two()]);
        let command = || {
            let mut command =
                Command::new("keel").subcommand(of("a")).subcommand(of("b").subcommand(of("c")));
            command.build();
            command
        };
        let config = config("one = '1'\n[b]\ntwo = '2'\n[b.c]\none = '3'");
        let left = |args: &[&str]| {
            let matches = config.apply(command()).expect("known").try_get_matches_from(args).expect("parsed");
            config.without_conflicts(&command(), &matches).map(|config| format!("{:?}", config.table))
        };
        assert_eq!(left(&["keel", "a"]), None);
        assert_eq!(left(&["keel", "a", "--one", "x"]), None);
        assert_eq!(
            left(&["keel", "a", "--two", "x"]).expect("one").matches("\"one\"").count(),
            1,
            "that of b.c"
        );
        assert_eq!(left(&["keel", "b", "--one", "x"]).expect("two").matches("\"two\"").count(), 0);
        assert_eq!(left(&["keel", "b", "c", "--two", "x"]).expect("one").matches("\"one\"").count(), 0);
    }

    #[test]
    fn the_nearest_table_decides_and_the_command_line_wins() {
        let config = config(
            "ctx = 1\n[generate]\ncontext = 2\nquiet = true\nstop = ['a', 'b']\n[bench.serve]\nrate = 0.5",
        );
        let command = config.apply(command()).expect("all keys are known");
        let of = |args: &[&str]| {
            let matches = command.clone().try_get_matches_from(args).unwrap_or_else(|e| panic!("{e}"));
            matches.subcommand().expect("one").1.clone()
        };
        let generate = of(&["keel", "generate"]);
        assert_eq!(generate.get_one("context"), Some(&2u32));
        assert!(generate.get_flag("quiet"));
        assert_eq!(generate.get_many::<String>("stop").expect("two").count(), 2);
        assert_eq!(
            of(&["keel", "generate", "--context", "7", "--stop", "c"]).get_one("context"),
            Some(&7u32)
        );
        assert_eq!(of(&["keel", "bench"]).get_one("context"), Some(&1u32));
        let serve = of(&["keel", "bench", "serve"]).subcommand().expect("one").1.clone();
        assert_eq!(serve.get_one::<String>("rate").map(String::as_str), Some("0.5"));
    }

    #[test]
    fn a_plan_of_a_server_reads_what_is_for_the_server() {
        let sequences = || Arg::new("sequences").long("sequences");
        let context = || Arg::new("context").long("context").alias("ctx");
        let model = || Arg::new("model").long("model");
        let serve = Command::new("serve").args([sequences(), context(), model().action(ArgAction::Append)]);
        let plan = Command::new("plan").args([sequences(), context(), model()]);
        let command = Command::new("keel").subcommand(plan).subcommand(serve);
        let file =
            config("ctx = 1\n[serve]\nsequences = 3\nctx = 2\nmodel = ['a', 'b']\n[plan]\ncontext = 7");
        let of = |config: &Config, option: &str| {
            let command = config.apply(command.clone()).expect("all keys are known");
            let matches = command.try_get_matches_from(["keel", "plan"]).expect("right");
            matches.subcommand().expect("one").1.get_one::<String>(option).cloned()
        };
        assert_eq!((of(&file, "sequences"), of(&file, "context")), (None, Some("7".into())));
        let of_server = file.for_plan_of_server(&command);
        assert_eq!(
            (of(&of_server, "sequences"), of(&of_server, "context")),
            (Some("3".into()), Some("7".into()))
        );
        assert_eq!(of(&of_server, "model"), None, "a plan is of one model");
        let bare = config("[serve]\nctx = 2").for_plan_of_server(&command);
        assert_eq!(of(&bare, "context"), Some("2".into()));
    }

    #[test]
    fn what_nobody_reads_is_refused() {
        let refused = |text: &str| format!("{:#}", config(text).apply(command()).expect_err("refused"));
        assert!(refused("contxt = 1").contains("contxt: any command has no option --contxt"));
        assert!(refused("[generate]\nrate = 1").contains("keel generate has no option --rate"));
        assert!(refused("[sing]\na = 1").contains("[sing]"));
        assert!(refused("quiet = 'yes'").contains("expected true or false"));
        assert!(refused("context = 1979-05-27").contains("expected a text"));
    }
}
