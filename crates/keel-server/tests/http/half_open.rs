//! Connections that send too little, too slowly or nothing. They do not stay, do not keep others out, and do not delay
//! the shutdown.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::common::{OWN_TASKS, Reply, Running, engine_options, read, send, wait_for};
use keel_server::{PrefixStore, ServerOptions};
use serde_json::json;

const SHORT: Duration = Duration::from_millis(300);
/// Generous, because a loaded machine is slow.
const SOON: Duration = Duration::from_secs(20);
/// Nothing that a test waits for takes as long.
const NEVER: Duration = Duration::from_secs(600);

const HEALTH: &str = "GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n";
const HALF_BODY: &str = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
                         content-length: 1000\r\n\r\n{\"prompt\": ";

fn connect(server: &Running, said: &str) -> TcpStream {
    let mut stream = TcpStream::connect(server.address).expect("it listens");
    stream.set_read_timeout(Some(SOON)).expect("a time");
    stream.write_all(said.as_bytes()).expect("sent");
    stream
}

/// Waits until the server closes the connection.
fn assert_closed(mut stream: TcpStream, what: &str) {
    let start = Instant::now();
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
        Err(error) => panic!("{what}: still open after {:?}: {error}", start.elapsed()),
    }
}

fn impatient() -> ServerOptions {
    ServerOptions {
        head_timeout: SHORT,
        body_timeout: SHORT,
        idle_timeout: SHORT,
        write_timeout: SHORT,
        ..ServerOptions::default()
    }
}

#[test]
fn what_takes_too_long_is_closed() {
    let server = Running::with(engine_options(), impatient());
    let cases = [
        ("nothing", ""),
        ("half a line", "GET /hea"),
        ("half a head", "GET /health HTTP/1.1\r\nhost: localhost\r\n"),
        ("half a body", HALF_BODY),
        ("a request and then nothing", HEALTH),
        ("a request and half of another", &format!("{HEALTH}GET /")),
    ];
    let open = cases.map(|(what, said)| (what, connect(&server, said)));
    for (what, stream) in open {
        assert_closed(stream, what);
    }
    server.assert_all_is_back();
}

#[test]
fn a_head_that_comes_byte_by_byte_has_no_more_time() {
    let server = Running::with(engine_options(), impatient());
    let mut stream = connect(&server, "GET /health HTTP/1.1\r\nx: ");
    let start = Instant::now();
    while stream.write_all(b"y").is_ok() {
        assert!(start.elapsed() < SOON, "it may go on for ever");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_client_that_reads_nothing_is_let_go() {
    let server = Running::with(engine_options(), impatient());
    let body = json!({"prompt": "Once", "max_tokens": 1500, "ignore_eos": true, "stream": true, "logprobs": 20, "n": 8});
    let stream = send(server.address, "POST", "/v1/completions", &[], body.to_string().as_bytes());
    wait_for("they run", || !server.model.engine.status().running.is_empty());
    server.wait_until_idle();
    // The answer is larger than the system's buffers, so it cannot have been sent completely.
    wait_for("its task has ended", || server.tasks() <= OWN_TASKS);
    drop(stream);
    server.assert_all_is_back();
}

#[test]
fn half_open_connections_make_room_for_others() {
    let server =
        Running::with(engine_options(), ServerOptions { connections_max: 8, ..ServerOptions::default() });
    let half_open: Vec<TcpStream> =
        (0..100).map(|i| connect(&server, ["", "GET /hea", HALF_BODY, HEALTH][i % 4])).collect();
    for _ in 0..20 {
        assert_eq!(server.get("/health").status, 200);
    }
    drop(half_open);
    // One that is still open could make room in place of a connection that has not said anything yet.
    wait_for("all are closed", || server.tasks() <= OWN_TASKS);
    let long = json!({"prompt": "Once", "max_tokens": 1500, "ignore_eos": true, "stream": true}).to_string();
    let running: Vec<TcpStream> =
        (0..8).map(|_| send(server.address, "POST", "/v1/completions", &[], long.as_bytes())).collect();
    wait_for("they run", || server.model.engine.status().running.len() == 8);
    let reply = server.get("/health");
    assert_eq!((reply.status, reply.header("retry-after")), (503, Some("1")), "none can make room");
    assert_eq!(server.model.engine.status().running.len(), 8, "those that run are left alone");
    drop(running);
    server.assert_all_is_back();
}

#[test]
fn half_open_connections_do_not_keep_a_server_alive() {
    let patient =
        ServerOptions { grace: NEVER, head_timeout: NEVER, idle_timeout: NEVER, ..ServerOptions::default() };
    let mut server = Running::with(engine_options(), patient);
    let half_open: Vec<TcpStream> =
        ["", "GET /hea", HEALTH].iter().map(|said| connect(&server, said)).collect();
    std::thread::sleep(Duration::from_millis(100));
    let start = Instant::now();
    server.drain();
    server.join();
    assert!(start.elapsed() < NEVER / 4, "{:?}", start.elapsed());
    drop(half_open);
}

/// Sends a body a while after the server has begun to wait for it.
fn with_a_late_body(server: &Running) -> Reply {
    let body = json!({"prompt": "Once", "max_tokens": 1}).to_string();
    let head =
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nexpect: 100-continue\r\n";
    let length = body.len();
    let head = format!("{head}content-type: application/json\r\ncontent-length: {length}\r\n\r\n");
    let mut stream = connect(server, &head);
    let mut goes_on = [0; b"HTTP/1.1 100 Continue\r\n\r\n".len()];
    stream.read_exact(&mut goes_on).expect("the server has read the head");
    std::thread::sleep(SHORT);
    stream.write_all(body.as_bytes()).expect("sent");
    read(stream)
}

/// A request arrives with its head.
#[test]
fn the_time_of_a_request_includes_its_body() {
    let server = Running::start();
    let reply = with_a_late_body(&server);
    assert_eq!(reply.status, 200, "{}", reply.body);
    for name in ["keel_time_to_first_token_seconds_sum", "keel_request_seconds_sum"] {
        let seconds = || {
            let metrics = server.get("/metrics").body;
            let sum = metrics.lines().find_map(|line| line.strip_prefix(name)).expect("it is there");
            sum.trim().parse::<f64>().expect("a number")
        };
        // The end of a request is counted a moment after its answer has arrived.
        wait_for("it is counted", || seconds() > 0.0);
        assert!(seconds() >= SHORT.as_secs_f64(), "{name}: {} s", seconds());
    }
    let server =
        Running::with(engine_options(), ServerOptions { deadline: SHORT, ..ServerOptions::default() });
    let reply = with_a_late_body(&server);
    assert_eq!((reply.status, reply.json()["error"]["code"].as_str()), (504, Some("deadline_exceeded")));
}

/// The times of connections hold during a drain, too.
#[test]
fn half_a_body_does_not_keep_a_server_alive() {
    let options = ServerOptions { grace: NEVER, body_timeout: SHORT, ..ServerOptions::default() };
    let mut server = Running::with(engine_options(), options);
    let half_body = connect(&server, HALF_BODY);
    std::thread::sleep(Duration::from_millis(100));
    server.drain();
    assert_closed(half_body, "half a body during a drain");
    server.join();
}

#[test]
fn a_drain_ends_by_itself() {
    let mut server =
        Running::with(engine_options(), ServerOptions { grace: SHORT, ..ServerOptions::default() });
    let half_body = connect(&server, HALF_BODY);
    let long =
        json!({"prompt": "Once", "max_tokens": 2000, "ignore_eos": true, "stream": true, "n": 8}).to_string();
    let running = send(server.address, "POST", "/v1/completions", &[], long.as_bytes());
    wait_for("it runs", || server.model.engine.status().running.len() == 8);
    let start = Instant::now();
    server.drain();
    server.join();
    assert!(start.elapsed() < 3 * SOON, "{:?}", start.elapsed());
    assert!(!read(running).body.contains("[DONE]"), "it was cut off");
    drop(half_body);
}

#[test]
fn prefixes_are_saved_before_the_wait() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let store = PrefixStore { folder: folder.path().join("prefixes"), model: "m".into() };
    let options = ServerOptions { prefix_store: Some(store), grace: NEVER, ..ServerOptions::default() };
    let mut server = Running::with(engine_options(), options);
    server.ask("/v1/completions", &json!({"prompt": "The little dog ran. ".repeat(30), "max_tokens": 4}));
    let half_body = connect(&server, HALF_BODY);
    std::thread::sleep(Duration::from_millis(100));
    server.drain();
    wait_for("they are saved", || folder.path().join("prefixes/index.json").exists());
    assert!(server.tasks() > 0, "a body is still awaited");
    drop(half_body);
    server.join();
}
