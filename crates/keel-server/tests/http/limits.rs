//! Keys, limits, queues and the shutdown of a server.

use std::io::Read;
use std::net::TcpStream;
use std::time::Duration;

use crate::common::{Running, engine_options, read, request, send, wait_for};
use keel_engine::EngineOptions;
use keel_engine::batch::BatchOptions;
use keel_server::{PrefixStore, ServerOptions};
use serde_json::{Value, json};

fn long(stream: bool) -> Value {
    json!({"prompt": "Once", "max_tokens": 1500, "ignore_eos": true, "temperature": 0, "stream": stream})
}

#[test]
fn bodies_beyond_the_limit_are_refused() {
    let options = ServerOptions { body_bytes_max: 1000, ..ServerOptions::default() };
    let server = Running::with(engine_options(), options);
    let reply = server.post("/v1/completions", &json!({"prompt": "x".repeat(2000)}));
    assert_eq!((reply.status, reply.json()["error"]["code"].as_str()), (413, Some("body_too_large")));
}

#[test]
fn heads_images_and_grammars_are_bounded() {
    let server = Running::start();
    let names: Vec<String> = (0..150).map(|i| format!("x-{i}")).collect();
    let headers: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "1")).collect();
    assert_eq!(request(server.address, "GET", "/v1/models", &headers, b"").status, 431);
    let image = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}});
    let grammar = json!({"type": "grammar", "grammar": "a".repeat(257 << 10)});
    let wrong = [
        (json!({"messages": [{"role": "user", "content": [image]}]}), "reads only text"),
        (
            json!({"messages": [{"role": "user", "content": "x"}], "response_format": grammar}),
            "at most 262144",
        ),
    ];
    for (body, reason) in wrong {
        let reply = server.post("/v1/chat/completions", &body);
        assert!(reply.status == 400 && reply.body.contains(reason), "{} {}", reply.status, reply.body);
    }
}

/// A server for one request at a time, and one running request.
fn occupied(batch: BatchOptions) -> (Running, TcpStream) {
    let engine = EngineOptions { sequences: 1, ..engine_options() };
    let server = Running::with(engine, ServerOptions { batch, ..ServerOptions::default() });
    let first = post(&server, &long(true));
    wait_for("it runs", || server.model.engine.status().running.len() == 1);
    (server, first)
}

fn post(server: &Running, body: &Value) -> TcpStream {
    send(server.address, "POST", "/v1/completions", &[], body.to_string().as_bytes())
}

#[test]
fn a_full_queue_is_429() {
    let (server, first) = occupied(BatchOptions { queue_limit: 1, ..BatchOptions::default() });
    let second = post(&server, &long(true));
    wait_for("it waits", || server.model.engine.status().waiting == 1);
    let third = read(post(&server, &long(true)));
    assert_eq!((third.status, third.header("retry-after")), (429, Some("1")), "{}", third.body);
    assert_eq!(third.header("x-should-retry"), None);
    drop((first, second));
    server.assert_all_is_back();
    let metrics = server.get("/metrics").body;
    assert!(metrics.contains("keel_requests_refused_total{reason=\"queue_full\"} 1"), "{metrics}");
}

/// A list of texts is one request, so it does not fill the queue itself. Its later texts wait for room there.
#[test]
fn a_list_of_texts_fits_into_a_short_queue() {
    let (server, first) = occupied(BatchOptions { queue_limit: 2, ..BatchOptions::default() });
    let waiting = || server.model.engine.status().waiting;
    let embed = |texts: usize| {
        let body = json!({"input": vec!["Once upon a time"; texts]}).to_string();
        send(server.address, "POST", "/v1/embeddings", &[], body.as_bytes())
    };
    let other = post(&server, &json!({"prompt": "Once", "max_tokens": 5}));
    wait_for("it waits", || waiting() == 1);
    let texts = embed(12);
    wait_for("its first text waits, too", || waiting() == 2);
    assert_eq!(read(embed(2)).status, 429, "the first text finds the queue full");
    drop(first);
    assert_eq!(read(other).status, 200);
    let answer = read(texts);
    assert_eq!((answer.status, answer.json()["data"].as_array().map(Vec::len)), (200, Some(12)));
    server.assert_all_is_back();
}

/// A request is refused if not all of its answers fit into the queue, unless nothing else waits there.
#[test]
fn the_answers_of_a_request_enter_the_queue_together() {
    let (server, first) = occupied(BatchOptions { queue_limit: 2, ..BatchOptions::default() });
    let body = |n: usize| json!({"prompt": "Once", "max_tokens": 5, "n": n, "stream": true});
    let waiting = || server.model.engine.status().waiting;
    let refused = |body: &Value, already: usize| {
        let reply = read(post(&server, body));
        assert_eq!(reply.status, 429, "{}", reply.body);
        assert_eq!(waiting(), already, "none of its answers waits");
    };
    let one = post(&server, &body(1));
    wait_for("it waits", || waiting() == 1);
    refused(&body(2), 1);
    refused(&json!({"prompt": [[5], [5]], "max_tokens": 5}), 1);
    drop(one);
    wait_for("it is gone", || waiting() == 0);
    let many = post(&server, &body(3));
    wait_for("all wait", || waiting() == 3);
    refused(&body(1), 3);
    drop((first, many));
    server.assert_all_is_back();
}

/// How many tokens the prompts have that began to run.
fn prompt_tokens(server: &Running) -> u64 {
    let metrics = server.get("/metrics").body;
    let count = metrics.lines().find_map(|line| line.strip_prefix("keel_prompt_tokens_total "));
    count.and_then(|count| count.parse().ok()).expect("a counter")
}

/// No prompt runs for an answer that cannot come whole.
#[test]
fn all_prompts_of_a_request_run_or_none() {
    let server = Running::start();
    let prompts = json!([[5], vec![5; engine_options().context]]);
    let reply = server.post("/v1/completions", &json!({"prompt": prompts, "max_tokens": 1000}));
    assert_eq!(reply.status, 400, "{}", reply.body);
    assert_eq!(reply.json()["error"]["code"], "context_length_exceeded");
    let reply = server.post("/v1/completions", &json!({"prompt": vec![[5]; 9], "n": 16, "max_tokens": 1}));
    assert!(
        reply.status == 400 && reply.body.contains("144 answers, expected at most 128"),
        "{}",
        reply.body
    );
    assert_eq!(prompt_tokens(&server), 0);
    server.assert_all_is_back();
}

#[test]
fn a_long_wait_is_503() {
    // The first request has to be admitted within this time, too, also on a machine with other work.
    let queue_timeout = Duration::from_millis(500);
    let (server, first) = occupied(BatchOptions { queue_timeout, ..BatchOptions::default() });
    let second = read(post(&server, &long(true)));
    assert_eq!((second.status, second.header("retry-after")), (503, Some("5")), "{}", second.body);
    assert_eq!(second.header("x-should-retry"), None);
    drop(first);
    server.assert_all_is_back();
}

/// The texts and answers of one request wait for each other here, and not for other requests.
#[test]
fn a_request_does_not_fail_because_it_waits_for_itself() {
    const WAIT: Duration = Duration::from_millis(250);
    let engine = EngineOptions { sequences: 1, ..engine_options() };
    let batch = BatchOptions { queue_timeout: WAIT, ..BatchOptions::default() };
    let server = Running::with(engine, ServerOptions { batch, ..ServerOptions::default() });
    let several = json!({"prompt": ["Once", "Then"], "n": 2, "max_tokens": 400, "ignore_eos": true});
    let answer = server.ask("/v1/completions", &several);
    assert_eq!(answer["choices"].as_array().map(Vec::len), Some(4));
    let texts: Vec<Vec<u32>> =
        (0..12).map(|i| (0..2000).map(|j| 300 + (i * 7 + j) % 900).collect()).collect();
    let answer = server.ask("/v1/embeddings", &json!({"input": texts}));
    assert_eq!(answer["data"].as_array().map(Vec::len), Some(12));
    server.assert_all_is_back();
}

#[test]
fn what_can_never_fit_is_400_with_the_numbers() {
    let engine = EngineOptions { pool_pages: Some(2), ..engine_options() };
    let server = Running::with(engine, ServerOptions::default());
    let reply = server.post("/v1/completions", &json!({"prompt": "Once", "max_tokens": 1000}));
    let error = reply.json()["error"].clone();
    assert_eq!((reply.status, error["code"].as_str()), (400, Some("memory_exceeded")));
    assert!(error["message"].as_str().is_some_and(|m| m.contains("bytes")), "{error}");
}

#[test]
fn a_deadline_ends_a_request() {
    // No machine draws 1,500 tokens in this time.
    let options = ServerOptions { deadline: Duration::from_millis(30), ..ServerOptions::default() };
    let server = Running::with(engine_options(), options);
    let reply = server.post("/v1/completions", &long(false));
    assert_eq!((reply.status, reply.json()["error"]["code"].as_str()), (504, Some("deadline_exceeded")));
    assert_eq!(reply.header("x-should-retry"), Some("false"), "a new try would take as long");
    let message =
        json!({"messages": [{"role": "user", "content": "Once"}], "max_tokens": 1500, "ignore_eos": true});
    let reply = server.post("/v1/messages", &message);
    assert_eq!((reply.status, reply.header("x-should-retry")), (504, Some("false")), "{}", reply.body);
    server.assert_all_is_back();
}

/// Where prompts run one after the other, those that follow the deadline do not begin.
#[test]
fn a_deadline_is_that_of_all_prompts_together() {
    let options = ServerOptions { deadline: Duration::from_millis(30), ..ServerOptions::default() };
    let server = Running::with(EngineOptions { sequences: 1, ..engine_options() }, options);
    let mut body = long(false);
    body["prompt"] = json!(vec![[5]; 20]);
    let reply = server.post("/v1/completions", &body);
    assert_eq!((reply.status, reply.json()["error"]["code"].as_str()), (504, Some("deadline_exceeded")));
    server.assert_all_is_back();
    let begun = prompt_tokens(&server);
    assert!(begun <= 3, "{begun} of 20 prompts");
}

/// Answers to one prompt, and to several.
#[test]
fn a_stream_begins_with_its_first_answer() {
    let server = Running::with(EngineOptions { sequences: 1, ..engine_options() }, ServerOptions::default());
    for (field, value) in [("n", json!(2)), ("prompt", json!([[5], [6]]))] {
        let mut body = long(true);
        body[field] = value;
        let mut stream = send(server.address, "POST", "/v1/completions", &[], body.to_string().as_bytes());
        stream.read_exact(&mut [0; 12]).expect("a status line");
        // The second answer starts when the first has ended, which takes many steps more.
        wait_for("the second answer waits", || server.model.engine.status().waiting == 1);
        drop(stream);
        server.assert_all_is_back();
    }
}

#[test]
fn draining_lets_running_requests_end_and_an_abort_does_not() {
    // Nothing is cut off, however slow the machine is.
    let patient = ServerOptions { grace: Duration::from_secs(600), ..ServerOptions::default() };
    let mut server = Running::with(engine_options(), patient);
    let body = json!({"prompt": "Once", "max_tokens": 300, "ignore_eos": true, "stream": true});
    let running = send(server.address, "POST", "/v1/completions", &[], body.to_string().as_bytes());
    wait_for("it runs", || server.model.engine.status().running.len() == 1);
    server.drain();
    let events = read(running).events();
    assert_eq!(events.last().expect("some")["choices"][0]["finish_reason"], "length");
    server.join();

    let mut server = Running::start();
    let running = send(server.address, "POST", "/v1/completions", &[], long(true).to_string().as_bytes());
    wait_for("it runs", || server.model.engine.status().running.len() == 1);
    server.drain();
    server.abort();
    server.join();
    assert!(!read(running).body.contains("[DONE]"), "it was cut off");
}

#[test]
fn what_outlasts_the_grace_is_told_to_come_again() {
    let impatient = ServerOptions { grace: Duration::from_millis(1), ..ServerOptions::default() };
    let mut server = Running::with(engine_options(), impatient);
    let running = send(server.address, "POST", "/v1/completions", &[], long(false).to_string().as_bytes());
    wait_for("it runs", || server.model.engine.status().running.len() == 1);
    server.drain();
    server.join();
    let reply = read(running);
    assert_eq!((reply.status, reply.json()["error"]["code"].as_str()), (503, Some("shutting_down")));
    assert!(reply.header("retry-after").is_some(), "{reply:?}");
}

#[test]
fn prefixes_are_saved_when_nothing_runs() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let index = folder.path().join("index.json");
    let store = PrefixStore { folder: folder.path().into(), model: "m".into() };
    let grace = Duration::from_secs(600);
    let mut server = Running::with(
        engine_options(),
        ServerOptions { prefix_store: Some(store), grace, ..ServerOptions::default() },
    );
    server.ask("/v1/completions", &json!({"prompt": "The little dog ran. ".repeat(30), "max_tokens": 4}));
    // The status still lists the request for a moment after its answer has arrived.
    server.wait_until_idle();
    let running = send(server.address, "POST", "/v1/completions", &[], long(true).to_string().as_bytes());
    let runs = |server: &Running| server.model.engine.status().running.len() == 1;
    wait_for("it runs", || runs(&server));
    server.drain();
    while runs(&server) {
        assert!(!index.exists() || !runs(&server), "an answer would wait for the disk");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(read(running).events().last().expect("some")["choices"][0]["finish_reason"], "length");
    server.join();
    assert!(index.exists());
}

#[test]
fn silent_streams_are_kept_open_by_comments() {
    let engine = EngineOptions { sequences: 2, ..engine_options() };
    let batch = BatchOptions { step_tokens: 64, ..BatchOptions::default() };
    let options = ServerOptions { ping: Duration::from_millis(1), batch, ..ServerOptions::default() };
    let server = Running::with(engine, options);
    let other = send(server.address, "POST", "/v1/completions", &[], long(true).to_string().as_bytes());
    wait_for("it runs", || server.model.engine.status().running.len() == 1);
    let prompt = "The little dog ran over the hill and far away. ".repeat(120);
    let reply = server.post("/v1/completions", &json!({"prompt": prompt, "max_tokens": 2, "stream": true}));
    assert!(reply.body.contains(": ping"), "{}", reply.body);
    drop(other);
}

#[test]
fn overcommitted_requests_are_parked_and_all_answered() {
    // Two of the four start. They need ten pages to end together, and one of them alone needs five.
    let crowded = EngineOptions { pool_pages: Some(7), swap_bytes: 64 << 20, ..engine_options() };
    // The two that wait have time, however slow the machine is.
    let batch = BatchOptions { queue_timeout: Duration::from_secs(600), ..BatchOptions::default() };
    let server = Running::with(crowded, ServerOptions { batch, ..ServerOptions::default() });
    let body = json!({
        "prompt": "Once upon a time", "max_tokens": 1200, "temperature": 0, "ignore_eos": true, "n": 4
    });
    let answer = server.ask("/v1/completions", &body);
    let texts: Vec<&Value> = (0..4).map(|i| &answer["choices"][i]["text"]).collect();
    assert!(texts[0].is_string() && texts.iter().all(|text| text == &texts[0]), "{answer}");
    assert_eq!(answer["usage"]["completion_tokens"], 4 * 1200);
    server.wait_until_idle();
    let metrics = server.get("/metrics").body;
    let value = |name: &str| -> f64 {
        let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {name} in {metrics}")).parse().expect("a number")
    };
    assert!(value("keel_parkings_total") >= 1.0);
    assert_eq!(value("keel_requests_parked"), 0.0);
    let [out, back] =
        ["out", "in"].map(|way| value(&format!("keel_swap_bytes_total{{direction=\"{way}\"}}")));
    assert!(out > 0.0 && out == back, "{out} out, {back} in");
    assert_eq!(server.get("/status").json()["parked"]["sequences"], 0);
    server.assert_all_is_back();
}
