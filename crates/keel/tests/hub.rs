//! Downloads, from a hub of our own. Run with `cargo test --release -p keel --features hub --test hub`.

#![cfg(feature = "hub")]

mod common;

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};

use common::{fixture, json, stderr};
use serde_json::Value;

const REVISION: &str = "0123456789abcdef0123456789abcdef01234567";

/// A hub with one model, `owner/name`, for as long as the process lives.
struct Hub {
    endpoint: String,
    /// Files of the model that were asked for.
    asked: Arc<Mutex<Vec<String>>>,
}

impl Hub {
    fn start(folder: PathBuf) -> Hub {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let endpoint = format!("http://{}", listener.local_addr().expect("bound"));
        let asked = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&asked);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                // A client that hangs up is no concern of the hub.
                let _ = answer(stream, &folder, &log);
            }
        });
        Hub { endpoint, asked }
    }
}

/// Answers one request: the model's list of files, or a range of one of them.
fn answer(mut stream: TcpStream, folder: &Path, asked: &Mutex<Vec<String>>) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let request = lines.next().unwrap_or(Ok(String::new()))?;
    let path = request.split(' ').nth(1).unwrap_or_default().to_string();
    let mut range = None;
    for line in lines {
        let line = line?.to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(bytes) = line.strip_prefix("range: bytes=") {
            let (first, last) = bytes.split_once('-').expect("a range");
            range = Some((first.parse::<usize>().expect("a number"), last.parse::<usize>().ok()));
        }
    }
    let mut respond = |status: &str, headers: &str, body: &[u8]| {
        let length = body.len();
        write!(
            stream,
            "HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n"
        )?;
        stream.write_all(body)
    };
    if path.starts_with("/api/models/owner/name") {
        let names = ["README.md", "config.json", "model.safetensors", "onnx/config.json"];
        let siblings: Vec<Value> = names.iter().map(|name| serde_json::json!({"rfilename": name})).collect();
        let info = serde_json::json!({"siblings": siblings, "sha": REVISION}).to_string();
        return respond("200 OK", "Content-Type: application/json\r\n", info.as_bytes());
    }
    let Some(file) = path.strip_prefix("/owner/name/resolve/main/") else {
        return respond("404 Not Found", "", b"");
    };
    asked.lock().unwrap_or_else(|e| e.into_inner()).push(file.into());
    let bytes = std::fs::read(folder.join(file))?;
    let (first, last) = range.unwrap_or((0, None));
    let last = last.unwrap_or(usize::MAX).min(bytes.len() - 1);
    let headers = format!(
        "ETag: \"{}-etag\"\r\nx-repo-commit: {REVISION}\r\nContent-Range: bytes {first}-{last}/{}\r\n",
        file.replace('.', "-"),
        bytes.len()
    );
    respond("206 Partial Content", &headers, &bytes[first..=last])
}

/// Continues three ids with a model of the hub.
fn generate(model: &str, endpoint: &str, home: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_keel"))
        .args([
            "generate",
            "--model",
            model,
            "--ids",
            "1,2,3",
            "--max-tokens",
            "4",
            "--temperature",
            "0",
            "--json",
        ])
        .env("HF_ENDPOINT", endpoint)
        .env("HF_HOME", home)
        .output()
        .expect("keel starts")
}

fn tokens(output: &Output) -> Value {
    assert!(output.status.success(), "{}", stderr(output));
    serde_json::from_slice::<Value>(&output.stdout).expect("JSON")["tokens"].clone()
}

#[test]
fn a_hub_name_is_downloaded_once_and_then_taken_from_the_cache() {
    let Some(folder) = fixture("qwen3_5") else { return };
    let home = tempfile::tempdir().expect("a temporary folder");
    let flags = ["--ids", "1,2,3", "--max-tokens", "4", "--temperature", "0", "--json"];
    let want = json(&[&["generate", "--model", common::arg(&folder)], &flags[..]].concat())["tokens"].clone();
    let hub = Hub::start(folder);
    let asked = || {
        let mut asked = hub.asked.lock().expect("no thread panicked").clone();
        asked.sort();
        asked.dedup();
        asked
    };
    let first = generate("owner/name", &hub.endpoint, home.path());
    assert_eq!(tokens(&first), want);
    assert_eq!(asked(), ["config.json", "model.safetensors"], "what is not used is not downloaded");
    assert!(!stderr(&first).contains('\r'), "no bar where nobody watches: {}", stderr(&first));
    hub.asked.lock().expect("no thread panicked").clear();
    assert_eq!(tokens(&generate("owner/name", &hub.endpoint, home.path())), want);
    assert_eq!(asked(), [""; 0], "everything is there already");
    // Nobody listens on port 9 of this machine, or it does not speak HTTP.
    let offline = generate("owner/name", "http://127.0.0.1:9", home.path());
    assert_eq!(tokens(&offline), want, "what was downloaded before needs no hub");
}

#[test]
fn a_model_that_the_hub_does_not_have_is_one_line() {
    let home = tempfile::tempdir().expect("a temporary folder");
    let hub = Hub::start(home.path().into());
    for endpoint in [&hub.endpoint, "http://127.0.0.1:9"] {
        let output = generate("owner/other", endpoint, home.path());
        let message = stderr(&output);
        assert_eq!((output.status.code(), message.lines().count()), (Some(1), 1), "{message}");
        assert!(message.starts_with("keel: cannot download owner/other from the hub"), "{message}");
    }
}
