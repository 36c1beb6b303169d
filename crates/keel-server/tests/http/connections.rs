//! Many connections at once: 256 are kept open and idle, and 32 stream. Clients that leave.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;

use crate::common::{Running, completion, cpu, engine_options, read, send, wait_for};
use keel_engine::EngineOptions;
use keel_server::ServerOptions;
use serde_json::json;

const IDLE: usize = 256;
const STREAMS: usize = 32;

/// Sends a request on a connection and leaves it open.
fn ask_and_keep(connection: &mut BufReader<TcpStream>) -> String {
    connection
        .get_mut()
        .write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        .expect("the server reads");
    let (mut line, mut length) = (String::new(), 0);
    connection.read_line(&mut line).expect("a status line");
    assert!(line.starts_with("HTTP/1.1 200"), "{line}");
    while line.trim_end() != "" {
        line.clear();
        connection.read_line(&mut line).expect("a header");
        if let Some((name, value)) = line.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            length = value.trim().parse().expect("a number");
        }
    }
    let mut body = vec![0; length];
    connection.read_exact(&mut body).expect("the body");
    String::from_utf8(body).expect("UTF-8")
}

#[test]
fn streams_run_with_idle_connections() {
    let engine = EngineOptions { sequences: STREAMS, ..engine_options() };
    let server =
        Running::on(cpu(), engine, ServerOptions { model_id: "demo".into(), ..ServerOptions::default() });
    let connect = |_| BufReader::new(TcpStream::connect(server.address).expect("the server listens"));
    let mut idle: Vec<_> = (0..IDLE).map(connect).collect();
    let healthy: Vec<String> = idle.iter_mut().map(ask_and_keep).collect();
    assert!(!healthy[0].is_empty());

    let body = |i: usize| {
        json!({"prompt": format!("Story {}.", i % 2), "max_tokens": 20, "temperature": 0, "ignore_eos": true,
            "stream": true, "stream_options": {"include_usage": true}})
    };
    let post = |i| send(server.address, "POST", "/v1/completions", &[], body(i).to_string().as_bytes());
    let streams: Vec<TcpStream> = (0..STREAMS).map(post).collect();
    let mut texts: Vec<String> = Vec::new();
    for stream in streams {
        let reply = read(stream);
        assert_eq!(reply.status, 200, "{}", reply.body);
        let events = reply.events();
        let usage = events.iter().rev().find_map(|e| e["usage"]["completion_tokens"].as_u64());
        assert_eq!(usage, Some(20));
        texts.push(events.iter().filter_map(|e| e["choices"][0]["text"].as_str()).collect());
    }
    assert!(
        texts[0] != texts[1] && texts.iter().enumerate().all(|(i, text)| *text == texts[i % 2]),
        "{texts:?}"
    );
    // The connections are still the same. If the server had closed one, this request would fail.
    for connection in &mut idle {
        ask_and_keep(connection);
    }
    drop(idle);
    server.assert_all_is_back();
}

/// A request ends with its client, also if the client has sent bytes after it: a line break after the body, or another
/// request.
#[test]
fn a_client_that_leaves_ends_its_request_whatever_follows_it() {
    const ANSWERS: usize = 8;
    let server = Running::start();
    let mut body = completion(1500);
    body["n"] = json!(ANSWERS);
    let body = body.to_string();
    let length = body.len();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json";
    for (i, rest) in ["", "\r\n", "GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"].into_iter().enumerate() {
        let mut client = TcpStream::connect(server.address).expect("the server listens");
        let request = format!("{head}\r\ncontent-length: {length}\r\n\r\n{body}{rest}");
        client.write_all(request.as_bytes()).expect("sent");
        wait_for("all answers run", || server.model.engine.status().running.len() == ANSWERS);
        drop(client);
        server.wait_until_idle();
        // Answers that came to their end would be counted as `length`.
        let count = format!("keel_requests_finished_total{{reason=\"cancelled\"}} {}\n", (i + 1) * ANSWERS);
        wait_for("all answers are counted as cancelled", || server.get("/metrics").body.contains(&count));
    }
    server.assert_all_is_back();
}
