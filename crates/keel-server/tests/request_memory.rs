//! Bodies, texts and their copies stay within the memory of requests, for any input. The test counts the heap.

mod common;
#[path = "request_memory/grammars.rs"]
mod grammars;

use std::alloc::System;
use std::io::Write;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use common::{Running, engine_options, read, send, wait_for};
use keel_server::ServerOptions;
use serde_json::json;
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static HEAP: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const MB: usize = 1_000_000;
const BUDGET: usize = 64 << 20;
/// Heap of the tests' clients and of the server's own bookkeeping: 5% of the budget. Bodies are made before counting.
const SLACK: usize = BUDGET / 20;

fn heap_bytes() -> usize {
    let stats = HEAP.stats();
    stats.bytes_allocated.saturating_sub(stats.bytes_deallocated)
}

/// Measures the peak of the heap above its initial size.
struct Watch {
    ends: Arc<AtomicBool>,
    thread: JoinHandle<usize>,
}

impl Watch {
    fn begin() -> Watch {
        let ends = Arc::new(AtomicBool::new(false));
        let (end, before) = (Arc::clone(&ends), heap_bytes());
        let thread = std::thread::spawn(move || {
            let most = AtomicUsize::new(0);
            while !end.load(Ordering::Acquire) {
                most.fetch_max(heap_bytes().saturating_sub(before), Ordering::Relaxed);
                std::thread::sleep(Duration::from_micros(100));
            }
            most.into_inner()
        });
        Watch { ends, thread }
    }

    fn end(self) -> usize {
        self.ends.store(true, Ordering::Release);
        self.thread.join().expect("it counts")
    }
}

fn server(budget: usize) -> Running {
    Running::with(
        engine_options(),
        ServerOptions { request_memory: budget as u64, ..ServerOptions::default() },
    )
}

fn post(server: &Running, path: &str, body: &str) -> TcpStream {
    send(server.address, "POST", path, &[], body.as_bytes())
}

fn assert_bounded(what: &str, server: &Running, watch: Watch) {
    let most = watch.end();
    println!(
        "{what}: {} MB on the heap, {} MB charged at most",
        most / MB,
        server.model.memory.peak() as usize / MB
    );
    assert!(most <= BUDGET + SLACK, "{what}: {most} bytes on the heap");
    wait_for("all is given back", || server.model.memory.used() == 0);
}

/// This is one test, because the heap of concurrent tests would be counted, too.
#[test]
fn requests_stay_within_their_memory() {
    grammars::states_count_what_they_take();
    what_is_charged_is_what_is_taken();
    grammars::grammars_without_room_are_refused();
    a_streamed_response_is_charged();
    what_a_response_repeats_is_charged();
    buffers_of_the_network_are_charged();
    large_texts_at_once();
    unfinished_bodies();
    abandoned_prompts();
    large_bodies_of_many_values();
    answers_without_room_are_refused();
    a_stream_that_is_refused_has_run_no_prompt();
    the_least_memory_has_room_for_a_request();
    half_heads_and_unfinished_bodies();
}

fn what_is_charged_is_what_is_taken() {
    let mut wrong = Vec::new();
    let shapes = large_bodies().into_iter().chain(answers_and_copies()).chain(grammars::large_grammars());
    // The peak of charges never falls, so each shape gets its own server.
    for (status, what, path, body) in shapes {
        let options = ServerOptions { request_memory: 1 << 40, ..ServerOptions::default() };
        let server = Running::with(engine_options(), options);
        // This request creates everything that is created only once.
        read(post(&server, path, "{}"));
        let watch = Watch::begin();
        let reply = read(post(&server, path, &body));
        // The client also holds the answer, in a buffer that grows by doubling.
        let most = watch.end().saturating_sub(3 * reply.body.len());
        let charged = server.model.memory.peak() as usize;
        println!(
            "{what}: {} KB on the heap, {} KB charged, status {}",
            most / 1000,
            charged / 1000,
            reply.status
        );
        if what == "listed tokens" && charged > 3 * most {
            wrong.push(format!("{what}: {charged} bytes charged for {most} bytes on the heap"));
        }
        if reply.status != status {
            wrong.push(format!("{what}: status {}, expected {status}: {:.200}", reply.status, reply.body));
        }
        if most > charged + (2 << 20) {
            wrong.push(format!("{what}: {most} bytes on the heap, {charged} charged"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}

/// Requests whose bodies are large: status, name of the content, path and body.
fn large_bodies() -> Vec<(u16, &'static str, &'static str, String)> {
    let words = "The little dog ran over the hill and far away. ";
    let text = |text: &str| json!({"text": text.repeat(MB / text.len())}).to_string();
    let values = |value: &str, items: usize| vec![value; items].join(",");
    // Status 400: the prompt is longer than the context, or has too many parts, which shows after it was read.
    vec![
        (200, "words", "/tokenize", text(words)),
        (200, "spaces", "/tokenize", text(" ")),
        (200, "digits", "/tokenize", text("1 2")),
        (200, "marks", "/tokenize", text("!a.b,")),
        (200, "one word", "/tokenize", text("a")),
        (200, "pictures", "/tokenize", text("\u{1f600}\u{e9}")),
        (400, "ids", "/v1/completions", format!("{{\"prompt\": [{}]}}", values("1", 200_000))),
        (400, "lists of ids", "/v1/completions", format!("{{\"prompt\": [{}]}}", values("[1]", 100_000))),
        (200, "ids to text", "/detokenize", format!("{{\"tokens\": [{}]}}", values("100", 200_000))),
        (
            400,
            "a conversation",
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": words.repeat(10_000)}]}).to_string(),
        ),
        (
            400,
            "many messages",
            "/v1/chat/completions",
            format!("{{\"messages\": [{}]}}", values(r#"{"role":"user","content":"a"}"#, 20_000)),
        ),
        (
            400,
            "many items",
            "/v1/responses",
            format!("{{\"input\": [{}]}}", values(r#"{"role":"user","content":"a"}"#, 20_000)),
        ),
        (400, "empty items", "/v1/responses", format!("{{\"input\": [{}]}}", values("{}", 100_000))),
        (
            200,
            "unknown fields",
            "/v1/responses",
            format!("{{\"input\": \"a\", \"x\": [{}]}}", values("[]", 100_000)),
        ),
        (
            400,
            "many blocks",
            "/v1/messages",
            format!(
                "{{\"max_tokens\": 1, \"messages\": [{{\"role\": \"user\", \"content\": [{}]}}]}}",
                values(r#"{"type":"text","text":"a"}"#, 30_000)
            ),
        ),
    ]
}

/// Requests whose answers, or the copies that each answer holds, are larger than their bodies.
fn answers_and_copies() -> Vec<(u16, &'static str, &'static str, String)> {
    let chat = json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 150, "ignore_eos": true,
        "logprobs": true, "top_logprobs": 20, "n": 4});
    let listed = json!({"prompt": "Once", "max_tokens": 150, "ignore_eos": true, "logprobs": 20, "n": 8});
    let stops: Vec<String> = (0..64).map(|i| format!("{i}").repeat(2000)).collect();
    let stops = json!({"prompt": "Once", "max_tokens": 1, "n": 16, "stop": stops});
    let fields: Vec<String> = (0..2000).map(|i| format!("field {i}")).collect();
    let schema = json!({"type": "json_schema", "json_schema": {"schema": {"enum": fields}}});
    let copied = json!({"prompt": vec!["a"; 64], "max_tokens": 1, "response_format": schema});
    let biases: serde_json::Map<_, _> = (0..4000).map(|id| (id.to_string(), json!(1))).collect();
    let biases = json!({"prompt": vec!["a"; 64], "max_tokens": 1, "logit_bias": biases});
    let echo = json!({"prompt": "The little dog ran. ".repeat(200), "max_tokens": 1, "n": 16, "echo": true});
    // Each document's prompt repeats the query. The last one is too long, which shows after the others were made.
    let mut documents = vec!["a".to_string(); 2047];
    documents.push("The little dog ran. ".repeat(2000));
    let documents = json!({"query": "The little dog ran. ".repeat(300), "documents": documents});
    let completions = [
        ("listed tokens", listed),
        ("stop strings of many answers", stops),
        ("a schema of many prompts", copied),
        ("biases of many prompts", biases),
        ("a prompt that many answers repeat", echo),
    ];
    let completions = completions.map(|(what, body)| (200, what, "/v1/completions", body.to_string()));
    completions
        .into_iter()
        .chain([(200, "a chat's listed tokens", "/v1/chat/completions", chat.to_string())])
        .chain([(400, "a query that many documents repeat", "/v1/rerank", documents.to_string())])
        .collect()
}

/// A response repeats its tools, also those that it may not call. They are charged while it runs.
fn what_a_response_repeats_is_charged() {
    let server = Arc::new(server(BUDGET));
    let tool = json!({"type": "function", "name": "f", "parameters": {}, "description": "b".repeat(MB)});
    let body = json!({"input": "Once", "max_output_tokens": 400, "tools": [tool], "tool_choice": "none",
        "temperature": 2, "top_k": 0, "top_p": 1, "seed": 1});
    let asking = {
        let server = Arc::clone(&server);
        std::thread::spawn(move || server.post("/v1/responses", &body).status)
    };
    wait_for("it runs", || !server.model.engine.status().running.is_empty());
    let used = server.model.memory.used() as usize;
    assert_eq!(asking.join().expect("it is answered"), 200);
    assert!(used > 3 * MB, "{used} bytes are charged for three times {MB}");
    wait_for("all is given back", || server.model.memory.used() == 0);
}

/// The parts of a stream that are kept until its end are charged.
fn a_streamed_response_is_charged() {
    let server = server(BUDGET);
    let ask = |tokens: usize, seed: usize| {
        let body = json!({"input": "Once", "stream": true, "max_output_tokens": tokens,
            "temperature": 2, "top_k": 0, "top_p": 1, "seed": seed});
        let reply = server.post("/v1/responses", &body);
        assert_eq!(reply.status, 200, "{}", reply.body);
        wait_for("all is given back", || server.model.memory.used() == 0);
        let done = reply
            .body
            .lines()
            .find(|line| line.starts_with("data: ") && line.contains("output_text.done"))
            .expect("a text");
        let done: serde_json::Value = serde_json::from_str(&done["data: ".len()..]).expect("JSON");
        (done["text"].as_str().expect("a text").len() as u64, server.model.memory.peak())
    };
    let (few, before) = ask(1, 0);
    // Some texts end early.
    let (many, after) = (0..10).map(|seed| ask(1500, seed)).max().expect("ten");
    assert!(many > few + 2000, "{many} bytes");
    // The text, in the item and in two events of the end.
    assert!(after - before >= 3 * (many - few), "{} bytes charged for {many} bytes of text", after - before);
}

/// Answers that outgrow the memory end with the numbers, and leave nothing. Nothing else runs, so a later try is
/// useless.
fn answers_without_room_are_refused() {
    let server = server(2 << 20);
    for answers in [1, 8, 8, 8] {
        let body =
            json!({"prompt": "Once", "max_tokens": 1500, "ignore_eos": true, "logprobs": 20, "n": answers});
        let reply = server.post("/v1/completions", &body);
        assert_eq!(reply.status, 413, "{answers} answers: {}", reply.body);
        assert!(reply.body.contains("--request-memory"), "{}", reply.body);
        wait_for("all is given back", || server.model.memory.used() == 0);
    }
    let small = json!({"prompt": "Once", "max_tokens": 1});
    assert_eq!(server.post("/v1/completions", &small).status, 200);
    let finished =
        |reason: &str| counter(&server, &format!("requests_finished_total{{reason=\"{reason}\"}}"));
    assert_eq!((finished("request_too_large"), finished("cancelled")), (1 + 3 * 8, 0), "all their answers");
}

/// A counter of the server's metrics; 0 if it is not listed.
fn counter(server: &Running, name: &str) -> usize {
    let text = server.get("/metrics").body;
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("keel_{name} ")));
    line.map_or(0, |count| count.parse().expect("a whole number"))
}

/// A request for many answers with a long stop string, which each answer copies. The memory for its events is taken
/// before its prompt runs: no length of the string is refused later.
fn a_stream_that_is_refused_has_run_no_prompt() {
    let server = server(keel_server::REQUEST_MEMORY_MIN as usize);
    let (mut fits, mut exceeds) = (0, 4096);
    let mut refused_after = None;
    while exceeds - fits > 8 {
        let length = (fits + exceeds) / 2;
        let body =
            json!({"prompt": "Once", "max_tokens": 1, "n": 16, "stream": true, "stop": "x".repeat(length)});
        let before = counter(&server, "prompt_tokens_total");
        let reply = server.post("/v1/completions", &body);
        wait_for("all is given back", || server.model.memory.used() == 0);
        let has_run = counter(&server, "prompt_tokens_total") > before;
        match reply.status {
            200 => fits = length,
            _ => exceeds = length,
        }
        if reply.status != 200 && has_run {
            refused_after = Some((length, reply));
        }
    }
    assert!(fits > 0 && exceeds < 4096, "some lengths fit, others do not");
    assert!(refused_after.is_none(), "{refused_after:?}");
}

/// With less than the least memory a server would refuse everything, so it does not start.
fn the_least_memory_has_room_for_a_request() {
    let server = server(keel_server::REQUEST_MEMORY_MIN as usize);
    for stream in [false, true] {
        let body =
            json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20, "stream": stream});
        let reply = server.post("/v1/chat/completions", &body);
        assert_eq!(reply.status, 200, "{}", reply.body);
    }
}

/// Heads of requests are within the memory of requests, too, also when bodies take all that is left for them.
fn half_heads_and_unfinished_bodies() {
    let server = server(BUDGET);
    let (line, begun) = (format!("GET /health HTTP/1.1\r\nx: {}", "y".repeat(16_000)), vec![b' '; 2 * MB]);
    let watch = Watch::begin();
    let mut open = Vec::new();
    for i in 0..400 {
        let mut stream =
            if i < 300 { TcpStream::connect(server.address).expect("it listens") } else { announce(&server) };
        stream.set_write_timeout(Some(Duration::from_millis(200))).expect("a time");
        let _ = stream.write_all(if i < 300 { line.as_bytes() } else { &begun });
        open.push(stream);
    }
    wait_for("the heads have come", || server.model.memory.used() > 0);
    std::thread::sleep(Duration::from_millis(500));
    drop(open);
    assert_bounded("300 half heads and 100 unfinished bodies", &server, watch);
}

/// A body that has only been announced holds the buffers of its connection.
fn buffers_of_the_network_are_charged() {
    let server = server(BUDGET);
    let announced: Vec<TcpStream> = (0..10).map(|_| announce(&server)).collect();
    wait_for("the buffers are charged", || server.model.memory.used() == 10 * (32 << 10));
    drop(announced);
    wait_for("all is given back", || server.model.memory.used() == 0);
}

/// Announces a body of 8 MB.
fn announce(server: &Running) -> TcpStream {
    let mut stream = TcpStream::connect(server.address).expect("it listens");
    let head = format!(
        "POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        8 * MB
    );
    stream.write_all(head.as_bytes()).expect("sent");
    stream
}

fn large_texts_at_once() {
    let body = json!({"text": "The little dog ran. ".repeat(8 * MB / 20)}).to_string();
    let server = server(BUDGET);
    let watch = Watch::begin();
    let clients: Vec<TcpStream> = (0..8).map(|_| post(&server, "/tokenize", &body)).collect();
    for client in clients {
        let reply = read(client);
        assert!(matches!(reply.status, 413 | 503), "{} {}", reply.status, reply.body);
    }
    assert_bounded("8 texts of 8 MB", &server, watch);
    let reply =
        read(post(&server, "/tokenize", &json!({"text": "The little dog ran. ".repeat(10_000)}).to_string()));
    assert_eq!(reply.status, 200, "what fits is answered");
}

fn unfinished_bodies() {
    let server = server(BUDGET);
    let begun = vec![b' '; 2 * MB];
    let watch = Watch::begin();
    let open: Vec<TcpStream> = (0..100)
        .map(|_| {
            let mut stream = announce(&server);
            stream.set_write_timeout(Some(Duration::from_millis(200))).expect("a time");
            // The server may refuse the body meanwhile.
            let _ = stream.write_all(&begun);
            stream
        })
        .collect();
    let small = json!({"prompt": "Once", "max_tokens": 1});
    assert_eq!(server.post("/v1/completions", &small).status, 200, "small requests have room left");
    drop(open);
    assert_bounded("100 unfinished bodies", &server, watch);
}

fn abandoned_prompts() {
    let server = server(1 << 30);
    let prompt = json!({"prompt": "a1 b2 ".repeat(8 * MB / 6), "max_tokens": 1}).to_string();
    let text = json!({"text": "a1 b2 ".repeat(8 * MB / 6)}).to_string();
    for _ in 0..8 {
        drop(post(&server, "/v1/completions", &prompt));
        drop(post(&server, "/tokenize", &text));
    }
    let start = Instant::now();
    assert_eq!(server.post("/v1/completions", &json!({"prompt": "Once", "max_tokens": 1})).status, 200);
    let waited = start.elapsed();
    println!("after abandoned prompts one token took {waited:?}");
    assert!(waited < Duration::from_secs(4), "{waited:?}");
    let refused = read(post(&server, "/v1/completions", &prompt));
    assert_eq!(refused.json()["error"]["code"], "context_length_exceeded", "{}", refused.body);
    wait_for("all is given back", || server.model.memory.used() == 0);
}

fn large_bodies_of_many_values() {
    let items = vec!["{}"; 7 * MB / 3].join(",");
    let body = format!("{{\"input\": [{items}]}}");
    let server = server(BUDGET);
    let watch = Watch::begin();
    let clients: Vec<TcpStream> = (0..4).map(|_| post(&server, "/v1/responses", &body)).collect();
    for client in clients {
        let reply = read(client);
        assert!(matches!(reply.status, 413 | 503), "{} {}", reply.status, reply.body);
    }
    assert_bounded("7 MB to /v1/responses", &server, watch);
}
