//! A server saves its prefixes and restores them. A folder that is full or cannot be written stops nothing.

use crate::common::{Running, completion, engine_options};
use keel_server::{PrefixStore, ServerOptions};
use serde_json::{Value, json};

/// A request whose text is worth saving.
#[cfg(target_os = "linux")]
fn long_request() -> Value {
    let mut body = completion(12);
    body["prompt"] = json!("The little dog ran over the hill. ".repeat(30));
    body
}

/// The choices of an answer of a server that saves its prefixes in `folder` when it ends.
#[cfg(target_os = "linux")]
fn served_and_saved(folder: &std::path::Path) -> Value {
    let store = PrefixStore { folder: folder.into(), model: "m".into() };
    let mut server = Running::with(
        engine_options(),
        ServerOptions { prefix_store: Some(store), ..ServerOptions::default() },
    );
    let answer = server.ask("/v1/completions", &long_request());
    server.drain();
    server.join();
    answer["choices"].clone()
}

/// The files of a folder.
#[cfg(target_os = "linux")]
fn files_in(folder: &std::path::Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(folder).expect("there").map(|entry| entry.expect("readable").path());
    entries.filter(|path| !path.is_dir()).collect()
}

/// A limit on the size of files stands in for a disk that is full while a text is written. It holds for a process, so a
/// child runs the server.
#[cfg(target_os = "linux")]
#[test]
fn a_disk_that_is_full_in_the_middle_of_a_text_stops_nothing_and_leaves_no_half_file() {
    const FOLDER: &str = "KEEL_TEST_FULL_DISK";
    if let Some(folder) = std::env::var_os(FOLDER) {
        println!("\nchoices {}", served_and_saved(folder.as_ref()));
        return;
    }
    let dir = tempfile::tempdir().expect("a temporary folder");
    let this = std::thread::current();
    let name = this.name().expect("the harness names it");
    let child = std::process::Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 64; exec \"$0\" \"$@\""])
        .arg(std::env::current_exe().expect("this program"))
        .args(["--exact", name, "--nocapture"])
        .env(FOLDER, dir.path())
        .output()
        .expect("sh runs");
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success(), "{said}{}", String::from_utf8_lossy(&child.stderr));
    assert!(files_in(dir.path()).is_empty(), "{:?}", files_in(dir.path()));
    let choices = said.lines().find_map(|line| line.strip_prefix("choices ")).expect("an answer");
    let with_room = served_and_saved(dir.path());
    assert_eq!(serde_json::from_str::<Value>(choices).expect("JSON"), with_room);
    let text = std::fs::metadata(dir.path().join("0.safetensors")).expect("with room it is saved");
    assert!(text.len() > 64 * 1024, "the limit was met within the text, not at its end");
}

#[cfg(target_os = "linux")]
#[test]
fn an_index_that_cannot_be_made_stops_nothing_and_leaves_no_text() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    // Folders stand in place of every partial file that this process may write for the index.
    let in_the_way: Vec<_> = (0..1000)
        .map(|i| dir.path().join(format!(".index.json.{}-{i}.partial", std::process::id())))
        .collect();
    in_the_way.iter().for_each(|path| std::fs::create_dir(path).expect("made"));
    let choices = served_and_saved(dir.path());
    assert!(files_in(dir.path()).is_empty(), "{:?}", files_in(dir.path()));
    in_the_way.iter().for_each(|path| std::fs::remove_dir(path).expect("removed"));
    assert_eq!(served_and_saved(dir.path()), choices);
    assert!(dir.path().join("index.json").exists(), "with room it is saved");
}

#[test]
fn a_prefix_folder_that_cannot_be_written_stops_nothing() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let file = dir.path().join("file");
    std::fs::write(&file, "in the way").expect("written");
    let store = PrefixStore { folder: file, model: "m".into() };
    let options = ServerOptions { prefix_store: Some(store), ..ServerOptions::default() };
    let mut server = Running::with(engine_options(), options);
    server.ask("/v1/completions", &completion(5));
    server.drain();
    server.join();
}

#[test]
fn prefixes_outlive_a_server() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let start = || {
        let store = PrefixStore { folder: dir.path().join("prefixes"), model: "m".into() };
        Running::with(
            engine_options(),
            ServerOptions { prefix_store: Some(store), ..ServerOptions::default() },
        )
    };
    let mut body = completion(12);
    body["prompt"] = json!("The little dog ran over the hill. ".repeat(30));
    let mut first = start();
    let before = first.ask("/v1/completions", &body);
    first.drain();
    first.join();
    let second = start();
    let after = second.ask("/v1/completions", &body);
    assert_eq!(before["choices"], after["choices"]);
    let cached = after["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a number");
    assert!(cached >= 128, "{after}");
    second.assert_all_is_back();
}
