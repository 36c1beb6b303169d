//! The configuration file.

mod common;

use std::path::Path;
use std::process::{Command, Output};

use common::stderr;
use serde_json::Value;

/// Runs keel with a configuration file at its usual path.
fn keel(home: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_keel"))
        .args(args)
        .env_remove("KEEL_CONFIG")
        .env("XDG_CONFIG_HOME", home)
        .env("KEEL_DEVICE", "cpu")
        .output()
        .expect("keel runs")
}

fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", stderr(output));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

fn written(text: &str) -> tempfile::TempDir {
    let home = tempfile::tempdir().expect("a temporary folder");
    std::fs::create_dir(home.path().join("keel")).expect("made");
    std::fs::write(home.path().join("keel/config.toml"), text).expect("written");
    home
}

#[test]
fn a_plan_of_a_server_follows_the_servers_table() {
    let home = written("[serve]\nsequences = 3\nkv-cache = '3M'\ncontext = 1024\nport = 7\n");
    let plan = |home: &Path, args: &[&str]| json(&keel(home, &[&["plan", "--json"], args].concat()));
    let empty = written("");
    let options = ["--sequences", "3", "--kv-cache", "3M", "--context", "1024"];
    assert_eq!(plan(home.path(), &["--serve"]), plan(empty.path(), &[&["--serve"], &options[..]].concat()));
    assert_eq!(plan(home.path(), &[]), plan(empty.path(), &[]), "the table is not for other plans");
}

/// A plan is of a server also if an option says so on which only a server's memory depends.
#[test]
fn a_plan_with_options_of_a_server_follows_the_servers_table() {
    let home = written("[serve]\nkv-cache = '3M'\ncontext = 1024\n");
    let plan = |home: &Path, args: &[&str]| json(&keel(home, &[&["plan", "--json"], args].concat()));
    let options = ["--sequences", "4", "--kv-cache", "3M", "--context", "1024"];
    assert_eq!(plan(home.path(), &["--sequences", "4"]), plan(written("").path(), &options));
}

#[test]
fn what_a_command_cannot_use_at_the_top_does_not_make_it_fail() {
    let empty = written("");
    let home = written(
        "memory-limit = '2G'\nlimit = '4G'\nspeculate = 'off'\nsequences = 3\ndevices = ['cpu:0', 'cpu:1']\nnodes = 'a:1,b:1'\n\
         model = ['a', 'b']\n[chat]\nmodel = 'c'\n",
    );
    let run = |home: &Path, args: &[&str]| json(&keel(home, &[args, &["--json"]].concat()));
    assert_eq!(run(home.path(), &["inspect"]), run(empty.path(), &["inspect"]));
    assert_eq!(run(home.path(), &["fit", "--limit", "90M"])["limit"], 90_000_000);
    let two = ["--devices", "cpu:0,cpu:1"];
    let options = [&["plan", "--sequences", "3", "--memory-limit", "2G"], &two[..]].concat();
    assert_eq!(run(home.path(), &["plan", "--serve"]), run(empty.path(), &options));
    let file = written("memory-limit = '2G'\nsequences = 3\n");
    assert_eq!(run(file.path(), &["plan", "--batch", "2"]), run(empty.path(), &["plan", "--batch", "2"]));
    // `images` is a flag of `chat` and a number of `serve`; `prompt` is a text of `generate` and a number of `bench`.
    let file = written("images = 2\nprompt = 'hello'\n");
    assert_eq!(
        run(file.path(), &["config", "chat"])["settings"],
        run(empty.path(), &["config", "chat"])["settings"]
    );
    // The number reaches the plan of a server, whose built-in model reads only text.
    let plan = keel(file.path(), &["plan", "--serve"]);
    assert!(stderr(&plan).contains("--images: this model reads only text"), "{}", stderr(&plan));
    let bench = keel(file.path(), &["bench", "--model", "/nowhere/at/all"]);
    assert!(
        bench.status.code() == Some(1) && stderr(&bench).contains("/nowhere/at/all"),
        "{}",
        stderr(&bench)
    );
    let flag = written("images = true\n");
    assert_eq!(run(flag.path(), &["plan", "--serve"]), run(empty.path(), &["plan", "--serve"]));
    // In a command's own table it is a mistake.
    let own = keel(written("[fit]\nmemory-limit = '2G'\n").path(), &["fit"]);
    assert_eq!(own.status.code(), Some(2), "{}", stderr(&own));
}

#[test]
fn options_of_all_commands_are_taken_in_the_table_of_one() {
    let home = written("[inspect]\nverbose = true\n");
    assert!(keel(home.path(), &["inspect", "--json"]).status.success());
    let shown = json(&keel(home.path(), &["config", "--json"]));
    let settings = shown["settings"].as_array().expect("a list").iter();
    let verbose: Vec<_> = settings.filter(|setting| setting["option"] == "verbose").collect();
    assert!(verbose.len() == 1 && verbose[0]["command"] == "inspect", "{shown}");
    let refused = keel(written("[inspect]\nconfig = 'x'\n").path(), &["inspect"]);
    assert!(stderr(&refused).contains("keel inspect has no option --config"), "{}", stderr(&refused));
}

#[test]
fn an_empty_variable_counts_as_not_given() {
    let home = written("device = 'cuda:7'\n");
    let plan = |device: &str, args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_keel"));
        command.env_remove("KEEL_CONFIG").env("XDG_CONFIG_HOME", home.path()).env("KEEL_DEVICE", device);
        json(&command.args(["plan", "--json"]).args(args).output().expect("keel runs"))
    };
    assert_eq!(plan("", &[]), plan("cpu", &["--device", "cuda:7"]), "the file's device");
    assert_eq!(plan("", &["--device", "cpu"]), plan("cpu", &[]));
}

/// The two exclude each other on the command line. The option that is given there counts.
#[test]
fn an_option_that_is_given_excludes_those_of_the_file() {
    let home = written("[generate]\nraw = true\ntemperature = 0\n[serve]\nshape = 'qwen3.5-0.8b'\n");
    let empty = written("[generate]\ntemperature = 0\n");
    let text = |home: &Path, extra: &[&str]| {
        let command = ["generate", "Hello there", "--json", "-n", "8"];
        json(&keel(home, &[&command[..], extra].concat()))["text"].clone()
    };
    assert_eq!(text(home.path(), &[]), text(empty.path(), &["--raw"]), "the file's value");
    assert_ne!(text(empty.path(), &["--chat"]), text(empty.path(), &["--raw"]));
    assert_eq!(text(home.path(), &["--chat"]), text(empty.path(), &["--chat"]));
    let served = keel(home.path(), &["serve", "--port", "0", "--model", "/nowhere/at/all"]);
    assert!(!served.status.success() && stderr(&served).contains("/nowhere/at/all"), "{}", stderr(&served));
}

/// The command line cannot take a flag of the file back.
#[test]
fn a_flag_of_the_file_gives_way_to_an_option_that_excludes_it() {
    let home = written("speculate-optimistic = true\n");
    let grammar = home.path().join("yes.lark");
    std::fs::write(&grammar, "start: \"yes\"\n").expect("written");
    for extra in [&["--grammar", common::arg(&grammar)][..], &["--one-by-one"]] {
        json(&keel(home.path(), &[&["generate", "Once", "-n", "4", "--json"][..], extra].concat()));
    }
}

#[test]
fn a_file_sets_options_and_the_command_line_and_the_environment_win() {
    let home = written(
        "temperature = 0\ndevice = 'cuda:7'\n[generate]\nmax-tokens = 5\nignore_eos = true\n[serve]\nport = 7\n",
    );
    let generate = |extra: &[&str]| {
        let command = ["generate", "Once upon a time", "--json"];
        json(&keel(home.path(), &[&command[..], extra].concat()))["tokens"].as_array().map(Vec::len)
    };
    assert_eq!(generate(&[]), Some(5), "and the device is that of the environment");
    assert_eq!(generate(&["-n", "3"]), Some(3));
    let other = home.path().join("other.toml");
    std::fs::write(&other, "max-tokens = 2\nignore-eos = true\n").expect("written");
    assert_eq!(generate(&["--config", other.to_str().expect("UTF-8")]), Some(2));
    // The usual ways to say that there is none: the file at the usual place counts no more.
    for none in ["", "/dev/null"] {
        assert_eq!(generate(&["-n", "4", "--config", none]), Some(4), "{none:?}");
    }
    let shown = json(&keel(home.path(), &["config", "--json", "--config", "/dev/null"]));
    let sources = shown["settings"].as_array().expect("a list").iter().map(|setting| &setting["source"]);
    assert!(shown["is_there"] == false && sources.clone().all(|source| source == "environment"), "{shown}");

    let shown = json(&keel(home.path(), &["config", "--json"]));
    let find = |shown: &Value, command: &str, option: &str| {
        let settings = shown["settings"].as_array().expect("a list").iter();
        let mut of = settings.filter(|s| s["command"] == command && s["option"] == option);
        of.next().map(|s| {
            (s["value"].as_str().unwrap_or("-").to_string(), s["source"].as_str().unwrap_or("").to_string())
        })
    };
    let pair = |value: &str, source: &str| Some((value.to_string(), source.to_string()));
    assert_eq!(find(&shown, "generate", "max-tokens"), pair("5", "file"));
    assert_eq!(find(&shown, "chat", "max-tokens"), None, "what is as the program has it is not listed");
    assert_eq!(find(&shown, "chat", "temperature"), pair("0", "file"));
    assert_eq!(find(&shown, "serve", "device"), pair("cpu", "environment"));
    assert_eq!(find(&shown, "serve", "port"), pair("7", "file"));
    let all = json(&keel(home.path(), &["config", "chat", "--json"]));
    assert_eq!(find(&all, "chat", "max-tokens"), pair("256", "default"));
}

#[test]
fn a_file_with_what_nobody_reads_is_refused() {
    let cases = [
        ("temprature = 0", "temprature: any command has no option --temprature"),
        ("[generate]\nport = 3", "keel generate has no option --port"),
        ("[sing]\na = 1", "[sing]"),
        ("config = 'x'", "config: any command has no option --config"),
        ("[generate]\nquiet = 'a lot'", "expected true or false"),
        ("a = ", "is no configuration"),
    ];
    for (text, reason) in cases {
        let home = written(text);
        let output = keel(home.path(), &["generate", "Once"]);
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{message}");
        assert!(message.contains("config.toml") && message.contains(reason), "{text}: {message}");
        assert_eq!(message.lines().count(), 1, "{message}");
    }
    let home = written("");
    let output = keel(home.path(), &["generate", "Once", "--config", "/nowhere/at/all.toml"]);
    assert!(stderr(&output).contains("cannot read /nowhere/at/all.toml"), "{}", stderr(&output));
    let refused = keel(written("images = 'a lot'").path(), &["generate", "Once"]);
    let message = stderr(&refused);
    assert!(refused.status.code() == Some(2) && message.lines().count() == 1, "{message}");
    assert!(message.contains("images: expected true or false; invalid value 'a lot' for '<N>'"), "{message}");
    let home = written("max-tokens = 'many'");
    let output = keel(home.path(), &["generate", "Once"]);
    assert!(
        output.status.code() == Some(2) && stderr(&output).contains("config.toml"),
        "{}",
        stderr(&output)
    );
}
