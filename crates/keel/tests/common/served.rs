//! Servers as processes, and their answers.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

/// Starts a server on a free port with these options. Returns its process and address.
pub fn start_with(flags: &[&str]) -> (Child, String) {
    ready(Command::new(env!("CARGO_BIN_EXE_keel")).args(["serve", "--port", "0"]).args(flags))
}

/// Starts a server with a command. Returns its process and address.
pub fn ready(command: &mut Command) -> (Child, String) {
    let mut child = command.env("KEEL_DEVICE", "cpu").stderr(Stdio::piped()).spawn().expect("keel starts");
    let mut reader = BufReader::new(child.stderr.take().expect("piped"));
    let address_of = |line: String| Some(line.split_once("is served at http://")?.1.trim_end().to_string());
    let address = reader.by_ref().lines().map_while(Result::ok).find_map(address_of);
    // The server's further messages must be read, or its pipe fills.
    std::thread::spawn(move || std::io::copy(&mut reader, &mut std::io::sink()));
    let Some(address) = address else {
        panic!("it ended before it was ready: {}", child.wait().expect("it ends"));
    };
    (child, address)
}

/// Connects and sends.
pub fn send(address: &str, request: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).expect("it listens");
    stream.write_all(request.as_bytes()).expect("sent");
    stream
}

/// Sends a signal such as `-TERM`.
pub fn signal(child: &Child, name: &str) {
    let killed = Command::new("kill").args([name, &child.id().to_string()]).status().expect("kill runs");
    assert!(killed.success());
}

/// The server's metrics.
pub fn metrics(address: &str) -> String {
    let mut stream = send(address, "GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("metrics");
    text
}

/// Bytes per category of one kind, from the server's metrics.
pub fn ledger(address: &str, kind: &str) -> BTreeMap<String, u64> {
    let text = metrics(address);
    let entry = |line: &str| {
        let rest = line.strip_prefix("keel_memory_bytes{")?;
        let (labels, bytes) = rest.split_once("} ")?;
        let of = |key: &str| Some(labels.split_once(&format!("{key}=\""))?.1.split_once('"')?.0.to_string());
        (of("kind")? == kind).then_some((of("category")?, bytes.trim().parse().ok()?))
    };
    text.lines().filter_map(entry).collect()
}

/// Posts a body and returns the whole response.
pub fn post(address: &str, path: &str, body: &str) -> String {
    let head = "host: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n";
    let length = body.len();
    let request = format!("POST {path} HTTP/1.1\r\n{head}content-length: {length}\r\n\r\n{body}");
    let (mut stream, mut text) = (send(address, &request), String::new());
    stream.read_to_string(&mut text).expect("an answer");
    text
}

/// The numbers that `keel plan` prints: bytes by category as the ledger has them, and the bound of requests, which the
/// ledger does not have.
pub fn planned(flags: &[&str]) -> (BTreeMap<String, u64>, Option<u64>) {
    let plan = super::json(&[&["plan", "--json"], flags].concat());
    let mut plan: BTreeMap<String, u64> = serde_json::from_value(plan).expect("bytes by category");
    let requests = plan.remove("requests");
    (plan, requests)
}
