//! Downloads from a local hub.

#![cfg(feature = "hub")]

#[path = "../common/mod.rs"]
mod common;
mod gguf;

use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use common::hub::{Asked, COMMIT, Hub, Manners, command_with_hub, keel_with_hub, sha256};
use common::{arg, fixture, json, stderr};
use serde_json::Value;
use tempfile::TempDir;

const WEIGHTS: &str = "model.safetensors";
/// Port 9 of this machine has no listener that speaks HTTP.
const NO_RANK: &str = "http://127.0.0.1:9";
const HOW: [&str; 7] = ["--ids", "1,2,3", "--max-tokens", "4", "--temperature", "0", "--json"];

/// The files of a fixture, and other files that must not be downloaded.
fn files_of(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let read =
        |name: &str| (name.to_string(), std::fs::read(folder.join(name)).expect("the fixture is complete"));
    let other = |name: &str| (name.to_string(), vec![7; 20_000]);
    vec![
        other("README.md"),
        read("config.json"),
        read(WEIGHTS),
        other("onnx/config.json"),
        other("pytorch_model.bin"),
    ]
}

/// A hub with a fixture, a home folder for the cache, and the tokens that the fixture generates from its own folder.
fn hub_with_fixture(manners: Manners) -> (Hub, TempDir, Value) {
    let folder = fixture("qwen3_5");
    let want = json(&[&["generate", "--model", arg(&folder)], &HOW[..]].concat())["tokens"].clone();
    let home = tempfile::tempdir().expect("a temporary folder");
    (Hub::start(files_of(&folder), manners), home, want)
}

fn generate(hub: &Hub, home: &Path, model: &str, variables: &[(&str, &str)]) -> Output {
    hub.keel(home, &[&["generate", "--model", model], &HOW[..]].concat(), variables)
}

fn tokens(output: &Output) -> Value {
    assert!(output.status.success(), "{}", stderr(output));
    serde_json::from_slice::<Value>(&output.stdout).expect("JSON")["tokens"].clone()
}

/// The requested files, each once.
fn files_asked(asked: &[Asked]) -> Vec<String> {
    let prefix = format!("/owner/name/resolve/{COMMIT}/");
    let mut files: Vec<String> =
        asked.iter().filter_map(|asked| asked.path.strip_prefix(&prefix).map(str::to_string)).collect();
    files.sort();
    files.dedup();
    files
}

/// Asserts a failure with one line that contains `reason`.
fn refused(output: &Output, reason: &str) {
    let message = stderr(output);
    let last = message.lines().last().unwrap_or_default();
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(last.starts_with("keel: ") && last.contains(reason), "expected {reason:?}: {message}");
    assert!(!message.contains("panicked"), "{message}");
}

/// The folder of the model's contents.
fn blobs(home: &Path) -> PathBuf {
    home.join("hub/models--owner--name/blobs")
}

fn count_in(folder: &Path) -> usize {
    std::fs::read_dir(folder).map_or(0, Iterator::count)
}

#[test]
fn a_hub_name_is_downloaded_once_and_then_nobody_is_asked() {
    let (hub, home, want) = hub_with_fixture(Manners::default());
    let first = generate(&hub, home.path(), "owner/name", &[]);
    assert_eq!(tokens(&first), want);
    assert_eq!(
        files_asked(&hub.take_asked()),
        ["config.json", WEIGHTS],
        "what is not used is not downloaded"
    );
    assert!(!stderr(&first).contains('\r'), "no bar where nobody watches: {}", stderr(&first));
    assert_eq!(tokens(&generate(&hub, home.path(), "owner/name", &[])), want);
    assert_eq!(hub.take_asked(), [], "a model that is there needs no hub");
    let named = [&["generate", "--model", "owner/name"], &HOW[..]].concat();
    assert_eq!(tokens(&keel_with_hub(NO_RANK, home.path(), &named, &[("HF_HUB_OFFLINE", "1")])), want);
}

#[test]
fn a_download_that_breaks_off_goes_on_where_it_was() {
    let manners = Manners { cut_after: Some(700_000), ..Manners::default() };
    let (hub, home, want) = hub_with_fixture(manners);
    assert_eq!(tokens(&generate(&hub, home.path(), "owner/name", &[])), want);
    let parts: Vec<Option<usize>> = hub
        .take_asked()
        .iter()
        .filter(|asked| asked.path.ends_with(WEIGHTS))
        .map(|asked| asked.start)
        .collect();
    assert!(parts.len() > 1, "the fixture is larger than one part");
    let starts: Vec<Option<usize>> =
        (0..parts.len()).map(|part| Some(part * 700_000).filter(|start| *start > 0)).collect();
    assert_eq!(parts, starts, "each byte comes once");
}

#[test]
fn what_an_ended_process_has_downloaded_is_kept() {
    let (hub, home, want) = hub_with_fixture(Manners::default());
    let folder = fixture("qwen3_5");
    let weights = std::fs::read(folder.join(WEIGHTS)).expect("there");
    let half = weights.len() / 2;
    std::fs::create_dir_all(blobs(home.path())).expect("writable");
    let partial = blobs(home.path()).join(format!("{}.incomplete", sha256(&weights)));
    std::fs::write(&partial, &weights[..half]).expect("writable");
    assert_eq!(tokens(&generate(&hub, home.path(), "owner/name", &[])), want);
    let asked = hub.take_asked();
    let starts: Vec<_> = asked.iter().filter(|a| a.path.ends_with(WEIGHTS)).map(|a| a.start).collect();
    assert_eq!(starts, [Some(half)]);
    assert!(!partial.exists());
}

#[test]
fn what_is_not_what_the_hub_says_is_refused_and_removed() {
    let (hub, home, want) = hub_with_fixture(Manners { lies: true, ..Manners::default() });
    refused(&hub.keel(home.path(), &["pull", "owner/name"], &[]), "SHA-256");
    assert_eq!(count_in(&blobs(home.path())), 1, "config.json alone is left");
    refused(&generate(&hub, home.path(), "owner/name", &[]), "model.safetensors has the SHA-256");
    // A partial file with wrong bytes is detected, too, and the next try starts from the beginning.
    hub.behave(Manners::default());
    let weights = std::fs::read(fixture("qwen3_5").join(WEIGHTS)).expect("there");
    let partial = blobs(home.path()).join(format!("{}.incomplete", sha256(&weights)));
    std::fs::write(&partial, vec![1; weights.len() / 2]).expect("writable");
    refused(&generate(&hub, home.path(), "owner/name", &[]), "SHA-256");
    assert_eq!(tokens(&generate(&hub, home.path(), "owner/name", &[])), want);
}

#[test]
fn offline_what_is_there_runs_and_nothing_is_asked() {
    let (hub, home, want) = hub_with_fixture(Manners::default());
    let offline = [("HF_HUB_OFFLINE", "1")];
    refused(&generate(&hub, home.path(), "owner/name", &offline), "HF_HUB_OFFLINE forbids");
    refused(&hub.keel(home.path(), &["pull", "owner/name"], &offline), "HF_HUB_OFFLINE forbids");
    assert_eq!(hub.take_asked(), []);
    assert_eq!(tokens(&generate(&hub, home.path(), "owner/name", &[])), want);
    hub.take_asked();
    assert_eq!(tokens(&generate(&hub, home.path(), "owner/name", &offline)), want);
    let pulled = hub.keel(home.path(), &["pull", "owner/name", "--json"], &offline);
    assert!(stderr(&pulled).contains("the hub is not asked for a newer version"), "{}", stderr(&pulled));
    let pulled: Value = serde_json::from_slice(&pulled.stdout).expect("JSON");
    assert_eq!((&pulled["revision"], &pulled["downloaded_bytes"]), (&COMMIT.into(), &0.into()));
    assert_eq!(hub.take_asked(), []);
}

#[test]
fn the_token_goes_to_the_hub_and_to_nobody_else() {
    let manners = Manners { token: Some("hf_secret"), redirects: true, ..Manners::default() };
    let (hub, home, want) = hub_with_fixture(manners);
    let without = generate(&hub, home.path(), "owner/name", &[]);
    refused(&without, "set HF_TOKEN");
    let wrong = generate(&hub, home.path(), "owner/name", &[("HF_TOKEN", "hf_other")]);
    refused(&wrong, "set HF_TOKEN");
    assert!(!stderr(&wrong).contains("hf_other"), "a token is nobody's to read");
    hub.take_asked();
    assert_eq!(tokens(&generate(&hub, home.path(), "owner/name", &[("HF_TOKEN", "hf_secret")])), want);
    let asked = hub.take_asked();
    let (elsewhere, at_hub): (Vec<&Asked>, Vec<&Asked>) =
        asked.iter().partition(|asked| asked.path.starts_with("/elsewhere/"));
    assert_eq!((elsewhere.len(), elsewhere[0].token.as_deref()), (1, None), "{asked:?}");
    assert!(at_hub.iter().all(|asked| asked.token.as_deref() == Some("hf_secret")), "{asked:?}");
}

#[test]
fn a_revision_is_pinned() {
    let (hub, home, want) = hub_with_fixture(Manners::default());
    assert_eq!(tokens(&generate(&hub, home.path(), "owner/name@refs/pr/1", &[])), want);
    assert!(
        hub.take_asked()[0].path.contains("/revision/refs%2Fpr%2F1?"),
        "a branch with slashes is one word"
    );
    let by_commit = format!("owner/name@{COMMIT}");
    assert_eq!(tokens(&generate(&hub, home.path(), &by_commit, &[])), want);
    assert_eq!(hub.take_asked(), [], "the same commit is there already");
    // Another branch needs another request. Here it has the same files.
    assert_eq!(tokens(&generate(&hub, home.path(), "owner/name@v1.0", &[])), want);
    assert_eq!(files_asked(&hub.take_asked()), [""; 0]);
}

/// A download can take hours, so a server that cannot start says so first.
#[test]
fn a_server_without_its_port_or_its_keys_downloads_nothing() {
    let hub = Hub::start(files_of(&fixture("qwen3_5")), Manners::default());
    let home = tempfile::tempdir().expect("a temporary folder");
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = taken.local_addr().expect("bound").port().to_string();
    let one = ["serve", "--model", "owner/name"];
    let two = ["serve", "--model", "a=owner/name", "--model", "b=owner/name"];
    for models in [&one[..], &two[..]] {
        let serve = |flags: &[&str]| hub.keel(home.path(), &[models, flags].concat(), &[]);
        refused(&serve(&["--port", &port]), &format!("cannot listen on 127.0.0.1:{port}"));
        refused(&serve(&["--port", "0", "--api-key-file", "no/such/file"]), "cannot read no/such/file");
    }
    assert_eq!(hub.take_asked(), []);
    assert!(!blobs(home.path()).exists());
}

/// A port that listens during a download would look ready, and its clients would wait for hours.
#[test]
fn a_server_does_not_listen_while_it_downloads() {
    let one = ["serve", "--model", "owner/name"];
    let two = ["serve", "--model", "a=owner/name", "--model", "b=owner/name"];
    for models in [&one[..], &two[..]] {
        let manners = Manners { holds_back: Some(WEIGHTS), ..Manners::default() };
        let hub = Hub::start(files_of(&fixture("qwen3_5")), manners);
        let home = tempfile::tempdir().expect("a temporary folder");
        let free = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = free.local_addr().expect("bound");
        drop(free);
        let port = address.port().to_string();
        let args = [models, &["--port", &port]].concat();
        let mut server = command_with_hub(&hub.endpoint, home.path(), &args)
            .stderr(Stdio::null())
            .spawn()
            .expect("keel starts");
        let start = Instant::now();
        while !hub.take_asked().iter().any(|asked| asked.path.ends_with(WEIGHTS)) {
            assert!(start.elapsed() < Duration::from_secs(60), "it has not asked for the weights");
            std::thread::sleep(Duration::from_millis(5));
        }
        let connection = TcpStream::connect(address);
        let ended = server.try_wait().expect("its state is known");
        server.kill().expect("it is there");
        server.wait().expect("it ends");
        hub.behave(Manners::default());
        assert!(ended.is_none(), "it waits for the weights: {ended:?}");
        assert!(connection.is_err(), "nothing would answer at {address}");
    }
}

#[test]
fn models_are_pulled_listed_and_removed() {
    let (hub, home, _) = hub_with_fixture(Manners::default());
    let run = |args: &[&str]| {
        let output = hub.keel(home.path(), args, &[]);
        assert!(output.status.success(), "{args:?}: {}", stderr(&output));
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    let parsed = |args: &[&str]| serde_json::from_str::<Value>(&run(args)).expect("JSON");
    assert!(run(&["list"]).starts_with("no models in "));
    let pulled = parsed(&["pull", "owner/name", "--json"]);
    assert_eq!(pulled["revision"], COMMIT);
    let list = parsed(&["list", "--json"]);
    assert_eq!(
        (list[0]["name"].as_str(), list[0]["complete"].as_bool()),
        (Some("owner/name"), Some(true)),
        "{list}"
    );
    assert_eq!(list[0]["bytes"], pulled["downloaded_bytes"]);
    hub.take_asked();
    assert!(run(&["pull", "owner/name"]).starts_with("owner/name: nothing new"));
    assert_eq!(files_asked(&hub.take_asked()), [""; 0]);
    assert!(run(&["list"]).contains("owner/name"));
    let partial = std::fs::File::create(blobs(home.path()).join("abc.incomplete")).expect("writable");
    partial.lock().expect("no other process has it");
    refused(&hub.keel(home.path(), &["rm", "owner/name"], &[]), "files of owner/name are being downloaded");
    assert_eq!(parsed(&["list", "--json"])[0]["complete"], true);
    drop(partial);
    assert!(run(&["rm", "owner/name"]).contains("owner/name is removed"));
    assert_eq!(parsed(&["list", "--json"]), Value::Array(Vec::new()));
    assert!(!blobs(home.path()).exists());
    refused(&hub.keel(home.path(), &["rm", "owner/name"], &[]), "keel list shows what is");
}

#[test]
fn names_that_are_none_ask_nobody() {
    let home = tempfile::tempdir().expect("a temporary folder");
    let hub = Hub::start(Vec::new(), Manners::default());
    for name in ["name", "a/b/c", "../x", "owner/name@", "owner/name@../../x", "owner/name:../x", "o/n@a//b"]
    {
        let output = hub.keel(home.path(), &["pull", name], &[]);
        assert_eq!(output.status.code(), Some(1), "{name}");
        assert_eq!(stderr(&output).lines().count(), 1, "{name}: {}", stderr(&output));
    }
    assert_eq!(hub.take_asked(), []);
    assert!(
        hub.keel(home.path(), &["rm", "owner/name"], &[("HF_ENDPOINT", "nonsense")]).status.code() == Some(1)
    );
}

#[test]
fn a_model_that_the_hub_does_not_have_is_one_line() {
    let home = tempfile::tempdir().expect("a temporary folder");
    let hub = Hub::start(Vec::new(), Manners::default());
    for (endpoint, reason) in
        [(hub.endpoint.as_str(), "it has no such model"), (NO_RANK, "HTTPS_PROXY names a proxy, HF_ENDPOINT")]
    {
        let named = ["generate", "--model", "owner/other", "--ids", "1"];
        let output = keel_with_hub(endpoint, home.path(), &named, &[]);
        let message = stderr(&output);
        assert_eq!((output.status.code(), message.lines().count()), (Some(1), 1), "{message}");
        let start = "keel: --model owner/other: there is no such file or folder here: cannot download owner/other from";
        assert!(message.starts_with(start) && message.contains(reason), "{message}");
    }
    let empty = hub.keel(home.path(), &["pull", "owner/name"], &[]);
    refused(&empty, "there is nothing that keel runs");
}
