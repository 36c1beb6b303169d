//! Chat templates that try to fill memory or to run forever, when a model is opened and when it is used.

#![cfg(target_os = "linux")]

mod common;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::arg;
use common::hostile::{children, ends_soon, peak_kb};

/// Each doubles a value 40 times or more: few steps, but up to 2^40 bytes, elements or comparisons.
const DOUBLING: [(&str, &str); 8] = [
    (
        "a string",
        "{% set n = namespace(s='xxxxxxxx') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    ),
    (
        "a sum of strings",
        "{% set n = namespace(s='xxxxxxxx') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    ),
    (
        "a list",
        "{% set n = namespace(l=[1]) %}{% for i in range(99) %}{% set n.l = (n.l + n.l)|list %}{% endfor %}",
    ),
    (
        "a list of itself",
        "{% set n = namespace(l=[1]) %}{% for i in range(50) %}{% set n.l = [n.l, n.l] %}{% endfor %}{{ n.l }}",
    ),
    (
        "lists to compare",
        "{% set n = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}\
         {% set n.b = [n.b, n.b] %}{% endfor %}{{ n.a == n.b }}",
    ),
    (
        "a captured text",
        "{% set n = namespace(s='xxxxxxxx') %}{% for i in range(99) %}{% set s %}{{ n.s }}{{ n.s }}{% endset %}{% set n.s = s %}{% endfor %}",
    ),
    (
        "letters",
        "{% set n = namespace(s='aaaaaaaa') %}{% for i in range(99) %}{% set n.s = n.s|replace('a', n.s) %}{% endfor %}",
    ),
    (
        "constants",
        "{{ ('x' * 90000000) ~ ('y' * 90000000) ~ ('z' * 90000000) ~ ('x' * 90000000) ~ ('y' * 90000000) ~ ('z' * 90000000) }}",
    ),
];

/// The built-in model with another chat template.
fn folder_with(template: &str) -> tempfile::TempDir {
    let demo = common::demo();
    let folder = tempfile::tempdir().expect("a temporary folder");
    for file in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(demo.join(file), folder.path().join(file)).expect("the model is there");
    }
    fs::write(folder.path().join("chat_template.jinja"), template).expect("writable");
    folder
}

#[test]
fn a_template_that_doubles_anything_is_refused_when_the_model_is_opened() {
    for (what, template) in DOUBLING {
        let folder = folder_with(template);
        let message = ends_soon(&["generate", "hello", "--model", arg(folder.path()), "--max-tokens", "1"]);
        assert!(message.contains("chat template \"default\": "), "{what}: {message}");
    }
}

/// A server process that is killed when the test ends.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn serve(folder: &Path) -> (Server, String) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_keel"))
        .args(["serve", "--port", "0", "--model", arg(folder)])
        .env("KEEL_DEVICE", "cpu")
        .env("KEEL_CONFIG", "")
        .stderr(Stdio::piped())
        .spawn()
        .expect("keel starts");
    let mut lines = BufReader::new(child.stderr.take().expect("piped"));
    let server = Server(child);
    let mut line = String::new();
    while !line.contains("is served at http://") {
        line.clear();
        assert!(lines.read_line(&mut line).expect("UTF-8") > 0, "the server ended");
    }
    let address = line.trim().rsplit("http://").next().expect("an address").to_string();
    // The server's later messages must be read, or its pipe fills.
    std::thread::spawn(move || std::io::copy(&mut lines, &mut std::io::sink()));
    (server, address)
}

/// Head and body of the answer to a chat with one message.
fn chat(address: &str, text: &str) -> String {
    let body =
        format!("{{\"messages\": [{{\"role\": \"user\", \"content\": \"{text}\"}}], \"max_tokens\": 1}}");
    let mut stream = TcpStream::connect(address).expect("it listens");
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n";
    write!(stream, "{head}content-length: {}\r\n\r\n{body}", body.len()).expect("it reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("UTF-8");
    answer
}

/// The template is harmless until a message contains a certain word.
#[test]
fn a_template_that_doubles_at_a_request_fails_that_request_alone() {
    for (what, template) in DOUBLING.iter().take(7) {
        let folder = folder_with(&format!(
            "{{% if messages[0].content == 'attack' %}}{template}{{% endif %}}{{{{ messages[0].content }}}}"
        ));
        let (server, address) = serve(folder.path());
        assert!(chat(&address, "hello").starts_with("HTTP/1.1 200"), "{what}");
        for _ in 0..2 {
            let start = Instant::now();
            let answer = chat(&address, "attack");
            assert!(
                answer.starts_with("HTTP/1.1 400") && answer.contains("chat template"),
                "{what}: {answer}"
            );
            // The template has 3 s. The rest is for a core with other work.
            assert!(start.elapsed() < Duration::from_secs(20), "{what}: {:?}", start.elapsed());
        }
        assert!(chat(&address, "hello").starts_with("HTTP/1.1 200"), "{what}");
        assert!(peak_kb(server.0.id()) < 500 << 10, "{what}: {} kB", peak_kb(server.0.id()));
        assert!(children(server.0.id()).len() <= 3, "{what}");
    }
}
