use super::*;

fn command() -> Command {
    let context = || Arg::new("context").long("context").alias("ctx").value_parser(clap::value_parser!(u32));
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
        let mut command = Command::new("keel").subcommand(of("a")).subcommand(of("b").subcommand(of("c")));
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
    assert_eq!(left(&["keel", "a", "--two", "x"]).expect("one").matches("\"one\"").count(), 1, "that of b.c");
    assert_eq!(left(&["keel", "b", "--one", "x"]).expect("two").matches("\"two\"").count(), 0);
    assert_eq!(left(&["keel", "b", "c", "--two", "x"]).expect("one").matches("\"one\"").count(), 0);
}

/// A name that no option has would leave out nothing.
#[test]
fn options_that_are_left_out_exist() {
    let root = <crate::Cli as clap::CommandFactory>::command();
    let has = |command: &str, option: &str| {
        let command = root.find_subcommand(command).expect("a command");
        command.get_arguments().any(|arg| arg.get_long() == Some(option))
    };
    let of_plan = OF_A_SERVER.iter().chain(&OF_A_RUN).chain(&NODES);
    of_plan.for_each(|option| assert!(has("plan", option), "{option}"));
    RUN_BY_NODES.iter().for_each(|command| assert!(has(command, "nodes"), "{command}"));
    ["memory-limit", "devices", "split"].iter().for_each(|option| assert!(has("inspect", option)));
}

#[test]
fn a_command_takes_options_of_all_commands_in_its_table() {
    let root = || command().arg(Arg::new("loud").long("loud").global(true).action(ArgAction::SetTrue));
    let is_loud = |text: &str, args: &[&str]| {
        let command = config(text).apply(root()).expect("all keys are known");
        command.try_get_matches_from(args).expect("right").get_flag("loud")
    };
    let file = "[bench.serve]\nloud = true\n[generate]\nloud = true";
    assert!(is_loud(file, &["keel", "generate"]) && is_loud(file, &["keel", "bench", "serve"]));
    assert!(!is_loud(file, &["keel", "bench"]));
    let file = "loud = true\n[generate]\nloud = false";
    assert!(is_loud(file, &["keel", "bench"]) && !is_loud(file, &["keel", "generate"]));
    assert!(is_loud(file, &["keel", "--loud", "generate"]));
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
    assert_eq!(of(&["keel", "generate", "--context", "7", "--stop", "c"]).get_one("context"), Some(&7u32));
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
    let file = config("ctx = 1\n[serve]\nsequences = 3\nctx = 2\nmodel = ['a', 'b']\n[plan]\ncontext = 7");
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
    assert!(refused("context = 'much'").contains("context: invalid value 'much' for '<context>'"));
    assert!(refused("context = [1, 2]").contains("context: expected one value, not a list"));
}
