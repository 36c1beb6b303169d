//! Many connections at once: 256 are kept open and idle, and 32 stream.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;

use crate::common::{Running, cpu, engine_options, read, send};
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
