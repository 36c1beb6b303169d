//! The program in isolation: a copy in an empty folder, without any other files, runs the built-in model.

#![cfg(unix)]

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use common::{json, stderr};
use serde_json::Value;

/// An empty folder with a copy of the program. No file of the build folder is near it. The only environment variable is
/// `HOME`, an empty folder inside.
struct Alone {
    folder: tempfile::TempDir,
}

impl Alone {
    fn new() -> Alone {
        let folder = tempfile::tempdir().expect("a temporary folder");
        std::fs::create_dir(folder.path().join("home")).expect("writable");
        // A process of its own copies it. If this one did, a child that another test starts meanwhile would hold the
        // copy open for writing for a moment, and the system would refuse to run it.
        let program = folder.path().join("keel");
        let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_keel")).arg(program).status();
        assert!(copied.expect("there is cp").success());
        Alone { folder }
    }

    fn home(&self) -> PathBuf {
        self.folder.path().join("home")
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(self.folder.path().join("keel"));
        command.args(args).env_clear().env("HOME", self.home()).current_dir(self.folder.path());
        command.stdin(Stdio::null());
        command
    }

    fn json(&self, args: &[&str]) -> Value {
        let output: Output = self.command(args).output().expect("it starts");
        assert!(output.status.success(), "keel {}: {}", args.join(" "), stderr(&output));
        serde_json::from_slice(&output.stdout).expect("JSON")
    }
}

fn files_below(folder: &Path) -> usize {
    std::fs::read_dir(folder).expect("it is there").count()
}

#[test]
fn the_binary_generates_what_it_planned() {
    let alone = Alone::new();
    let plan = alone.json(&["plan", "--context", "64", "--json"]);
    let how = ["--raw", "--max-tokens", "24", "--temperature", "0", "--json"];
    let report = alone.json(&[&["generate", "Once upon a time"], &how[..]].concat());
    for kind in ["planned", "allocated", "peak"] {
        assert_eq!(report["memory"][kind], plan, "{kind}");
    }
    // The same model from its folder on disk gives the same text and uses the same memory.
    let folder = common::demo();
    let from_disk = ["generate", "Once upon a time", "--model", common::arg(&folder)];
    let from_disk = json(&[&from_disk[..], &how].concat());
    assert_eq!(report["text"], from_disk["text"]);
    assert_eq!(report["memory"]["planned"], from_disk["memory"]["planned"]);
    assert_eq!(alone.json(&["inspect", "--json"])["chat_template"], true);
    assert_eq!(files_below(&alone.home()), 0, "nothing is written without need");
}

/// A server process that is killed when the test ends.
struct Serving(Child);

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("it listens");
    write!(stream, "GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n").expect("sent");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).expect("answered");
    String::from_utf8_lossy(&answer).into_owned()
}

#[test]
fn the_binary_serves_the_model_and_the_page() {
    let alone = Alone::new();
    let mut child =
        alone.command(&["serve", "--port", "0"]).stderr(Stdio::piped()).spawn().expect("it starts");
    let mut reader = BufReader::new(child.stderr.take().expect("piped"));
    let serving = Serving(child);
    let address_of = |line: String| Some(line.split_once("is served at http://")?.1.trim_end().to_string());
    let address = reader.by_ref().lines().map_while(Result::ok).find_map(address_of).expect("it serves");
    std::thread::spawn(move || std::io::copy(&mut reader, &mut std::io::sink()));
    let page = get(&address, "/");
    assert!(page.starts_with("HTTP/1.1 200") && page.contains("<html"), "{page}");
    let models = get(&address, "/v1/models");
    assert!(models.contains("\"demo\""), "{models}");
    drop(serving);
}
