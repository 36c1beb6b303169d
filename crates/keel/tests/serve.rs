//! `keel serve` as a process: it starts without an argument, drains at SIGTERM and says why it cannot start.

#![cfg(unix)]

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};

use common::{keel_with_input, stderr};

/// A server on a free port, and its address.
fn start() -> (Child, String) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_keel"))
        .env("KEEL_DEVICE", "cpu")
        .args(["serve", "--port", "0"])
        .stderr(Stdio::piped())
        .spawn()
        .expect("keel starts");
    let mut reader = BufReader::new(child.stderr.take().expect("piped"));
    let address_of = |line: String| Some(line.split_once("is served at http://")?.1.trim_end().to_string());
    let address = reader.by_ref().lines().map_while(Result::ok).find_map(address_of);
    // What else it says must find a reader.
    std::thread::spawn(move || std::io::copy(&mut reader, &mut std::io::sink()));
    let Some(address) = address else {
        panic!("it ended before it was ready: {}", child.wait().expect("it ends"));
    };
    (child, address)
}

fn send(address: &str, request: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).expect("it listens");
    stream.write_all(request.as_bytes()).expect("sent");
    stream
}

fn signal(child: &Child, name: &str) {
    let killed = Command::new("kill").args([name, &child.id().to_string()]).status().expect("kill runs");
    assert!(killed.success());
}

#[test]
fn sigterm_lets_a_running_answer_end() {
    let (mut child, address) = start();
    let body = r#"{"prompt": "Once", "max_tokens": 200, "ignore_eos": true, "stream": true}"#;
    let head = format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
    let mut stream = send(&address, &format!("{head}{body}"));
    let mut text = vec![0; 400];
    stream.read_exact(&mut text).expect("it streams");
    signal(&child, "-TERM");
    stream.read_to_end(&mut text).expect("it ends");
    let text = String::from_utf8_lossy(&text).into_owned();
    assert!(text.starts_with("HTTP/1.1 200") && text.contains("[DONE]"), "{text}");
    assert!(child.wait().expect("it ends").success());
}

#[test]
fn a_second_signal_does_not_wait() {
    let (mut child, address) = start();
    let body = r#"{"prompt": "Once", "max_tokens": 3000, "ignore_eos": true, "stream": true}"#;
    let head = format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
    let mut stream = send(&address, &format!("{head}{body}"));
    let mut text = vec![0; 400];
    stream.read_exact(&mut text).expect("it streams");
    signal(&child, "-TERM");
    std::thread::sleep(std::time::Duration::from_millis(100));
    signal(&child, "-TERM");
    assert!(child.wait().expect("it ends").success());
    let mut rest = String::new();
    let _ = stream.read_to_string(&mut rest);
    assert!(!rest.contains("[DONE]"), "it was cut off");
}

#[test]
fn a_port_in_use_is_an_error_of_one_line() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = taken.local_addr().expect("it is bound").port().to_string();
    let output = keel_with_input(&["serve", "--port", &port], "");
    assert_eq!(output.status.code(), Some(1));
    let message = stderr(&output);
    assert!(
        message.contains("cannot listen on 127.0.0.1") && message.trim_end().lines().count() == 1,
        "{message}"
    );
}
