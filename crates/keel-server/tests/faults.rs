//! A fault of one client does not affect the others.

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use common::{Running, cpu, demo, engine_options, read, request, send, wait_for};
use keel_array::{
    Array, ArrayError, Backend, Category, DType, DeviceMemory, Launch, Runtime, RuntimeOptions,
};
use keel_engine::{Engine, EngineOptions};
use keel_models::loading::CheckpointParameters;
use keel_server::{PrefixStore, ServerOptions};
use keel_testkit::disturbed::{Disturbance, Disturbed};
use keel_weights::Checkpoint;
use serde_json::{Value, json};

/// Launches fail while the counter is above zero. Each failure decrements it.
#[derive(Default)]
struct Failing {
    launches: AtomicUsize,
    /// Whether the backend reports that no kernel of the launch has run.
    tells: AtomicBool,
}

impl Disturbance for Failing {
    fn launch(&self, backend: &dyn Backend, launch: &Launch<'_>) -> Result<(), ArrayError> {
        let failing = self.launches.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1));
        if failing.is_ok() {
            if self.tells.load(Ordering::SeqCst) {
                launch.note_done(0);
            }
            let reason = "injected".to_string();
            return Err(ArrayError::Allocation { category: Category::Workspace, requested: 1, reason });
        }
        backend.launch(launch)
    }
}

fn completion(max_tokens: usize) -> Value {
    json!({"prompt": "Once upon a time", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true})
}

/// Three clients whose answers have begun.
fn three_answers(server: &Running) -> Vec<TcpStream> {
    let body = completion(1500).to_string();
    let clients: Vec<TcpStream> =
        (0..3).map(|_| send(server.address, "POST", "/v1/completions", &[], body.as_bytes())).collect();
    wait_for("they run", || {
        let running = server.app.engine.status().running;
        running.len() == 3 && running.iter().all(|r| r.generated_tokens > 0)
    });
    clients
}

#[test]
fn a_fault_that_stays_fails_its_requests_and_no_later_one() {
    let failing = Arc::new(Failing::default());
    let server =
        Running::on(Disturbed::new(cpu(), Arc::clone(&failing)), engine_options(), ServerOptions::default());
    let good = server.ask("/v1/completions", &completion(20));
    for _ in 0..3 {
        let clients = three_answers(&server);
        failing.launches.store(usize::MAX, Ordering::SeqCst);
        for client in clients {
            let reply = read(client);
            assert_eq!(reply.status, 500, "{}", reply.body);
            assert!(!reply.body.contains("injected"), "details are for the log: {}", reply.body);
        }
        failing.launches.store(0, Ordering::SeqCst);
        let again = server.ask("/v1/completions", &completion(20));
        assert_eq!(again["choices"], good["choices"], "what failed has left nothing behind");
    }
    server.assert_all_is_back();
}

#[test]
fn a_fault_that_passes_fails_nobody() {
    let failing = Arc::new(Failing::default());
    failing.tells.store(true, Ordering::SeqCst);
    let server =
        Running::on(Disturbed::new(cpu(), Arc::clone(&failing)), engine_options(), ServerOptions::default());
    let good = server.ask("/v1/completions", &completion(1500));
    let clients = three_answers(&server);
    failing.launches.store(1, Ordering::SeqCst);
    for client in clients {
        let reply = read(client);
        assert_eq!((reply.status, &reply.json()["choices"]), (200, &good["choices"]), "{}", reply.body);
    }
    let metrics = server.get("/metrics").body;
    assert!(metrics.contains("keel_failed_steps_total 1\n"), "{metrics}");
    for kind in ["trace", "compile", "load", "capture", "allocate"] {
        let count = format!("keel_late_work_total{{kind=\"{kind}\"}} 0\n");
        assert!(metrics.contains(&count), "{kind}: {metrics}");
    }
    server.assert_all_is_back();
}

#[test]
fn a_client_that_reads_nothing_delays_nobody() {
    let server = Running::start();
    let mut body = completion(1500);
    body["stream"] = json!(true);
    let deaf: Vec<TcpStream> = (0..4)
        .map(|_| send(server.address, "POST", "/v1/completions", &[], body.to_string().as_bytes()))
        .collect();
    wait_for("they run", || server.app.engine.status().running.len() == 4);
    for _ in 0..5 {
        server.ask("/v1/completions", &completion(10));
    }
    server.wait_until_idle();
    drop(deaf);
    server.assert_all_is_back();
}

#[test]
fn many_idle_connections_and_many_streams() {
    let server = Running::start();
    let idle: Vec<TcpStream> = (0..256)
        .map(|_| {
            let mut stream = TcpStream::connect(server.address).expect("accepted");
            stream.write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n").expect("sent");
            let mut start = [0; 12];
            stream.read_exact(&mut start).expect("answered");
            assert_eq!(&start, b"HTTP/1.1 200");
            stream
        })
        .collect();
    let mut body = completion(30);
    body["stream"] = json!(true);
    let streams: Vec<TcpStream> = (0..32)
        .map(|_| send(server.address, "POST", "/v1/completions", &[], body.to_string().as_bytes()))
        .collect();
    let texts: Vec<String> = streams
        .into_iter()
        .map(|s| {
            read(s)
                .events()
                .iter()
                .filter_map(|e| e["choices"][0]["text"].as_str().map(String::from))
                .collect()
        })
        .collect();
    assert!(texts[0].len() > 20 && texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    drop(idle);
    server.assert_all_is_back();
}

/// While it is set, all allocations fail.
#[derive(Default)]
struct NoMemory(AtomicBool);

impl Disturbance for NoMemory {
    fn allocate(&self, backend: &dyn Backend, bytes: usize) -> Result<Box<dyn DeviceMemory>, String> {
        if self.0.load(Ordering::SeqCst) {
            return Err("injected".into());
        }
        backend.allocate(bytes)
    }
}

#[test]
fn a_server_that_has_started_needs_no_more_memory() {
    let full = Arc::new(NoMemory::default());
    let crowded = EngineOptions { pool_pages: Some(5), swap_bytes: 64 << 20, ..engine_options() };
    let server = Running::on(Disturbed::new(cpu(), Arc::clone(&full)), crowded, ServerOptions::default());
    full.0.store(true, Ordering::SeqCst);
    let mut many = completion(40);
    many["n"] = json!(5);
    let schema = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}});
    let asked = [
        completion(300),
        many,
        json!({"prompt": "The dog ran. ".repeat(60), "max_tokens": 20, "temperature": 0.8, "logprobs": 3}),
        json!({"prompt": "x", "max_tokens": 10, "response_format": schema}),
    ];
    for body in &asked {
        server.ask("/v1/completions", body);
    }
    server.assert_all_is_back();
}

/// Something else has bytes on the device when the engine is made, and gives them back while it serves.
#[test]
fn bytes_that_are_missing_when_nothing_runs_are_counted() {
    let runtime = Runtime::new(cpu(), RuntimeOptions::default());
    let other = Array::persistent(&runtime, Category::User, [1024], DType::F32).expect("there is memory");
    let make = move || {
        let checkpoint = Checkpoint::open(&demo()).expect("the model opens");
        let parameters = CheckpointParameters(&checkpoint);
        let loaded = Engine::load(&runtime, &parameters, checkpoint.config(), engine_options(), &|_| ());
        loaded.expect("the model loads")
    };
    let server = Running::made(&demo(), make, ServerOptions::default());
    server.ask("/v1/completions", &completion(3));
    server.wait_until_idle();
    assert_eq!(server.app.engine.losses(), 0);
    drop(other);
    server.ask("/v1/completions", &completion(3));
    wait_for("the bytes are missed", || server.app.engine.losses() == 1);
    assert!(server.get("/metrics").body.contains("keel_idle_losses_total 1\n"));
}

/// Error of the wall clock in seconds, for the next test.
static JUMP: AtomicI64 = AtomicI64::new(0);

fn jumping_clock() -> SystemTime {
    let jump = JUMP.load(Ordering::SeqCst);
    let span = Duration::from_secs(jump.unsigned_abs());
    let now = SystemTime::now();
    if jump < 0 { now.checked_sub(span).unwrap_or(SystemTime::UNIX_EPOCH) } else { now + span }
}

#[test]
fn a_clock_that_jumps_changes_the_date_and_nothing_else() {
    const HOURS: i64 = 3600;
    const BEFORE_1970: i64 = -100 * 366 * 24 * HOURS;
    let options = ServerOptions { wall_clock: jumping_clock, ..ServerOptions::default() };
    let server = Running::with(engine_options(), options);
    let mut body = completion(60);
    body["prompt"] = json!("The little dog ran over the hill. ".repeat(20));
    let first = server.ask("/v1/completions", &body);
    let start = first["created"].as_i64().expect("a date");
    for jump in [5 * HOURS, -5 * HOURS, BEFORE_1970] {
        JUMP.store(0, Ordering::SeqCst);
        let mut long = completion(400);
        long["stream"] = json!(true);
        let running = send(server.address, "POST", "/v1/completions", &[], long.to_string().as_bytes());
        // The request has begun when the head of its response arrives.
        running.peek(&mut [0]).expect("answered");
        JUMP.store(jump, Ordering::SeqCst);
        let again = server.ask("/v1/completions", &body);
        assert_eq!(again["choices"], first["choices"]);
        let cached = again["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
        assert!(cached > Some(0), "what was remembered still is: {again}");
        let created = again["created"].as_i64().expect("a date");
        if jump == BEFORE_1970 {
            assert_eq!(created, 0);
        } else {
            let off = created - start - jump;
            assert!((0..HOURS).contains(&off), "{off} s from where the clock jumped to");
        }
        let texts = read(running).events().len();
        assert!(texts > 10, "a request that runs meanwhile ends as it would have");
    }
    server.assert_all_is_back();
}

/// A request whose text is worth saving.
#[cfg(target_os = "linux")]
fn long_request() -> Value {
    let mut body = completion(12);
    body["prompt"] = json!("The little dog ran over the hill. ".repeat(30));
    body
}

/// The choices of an answer of a server that saves its prefixes in `folder` when it ends.
#[cfg(target_os = "linux")]
fn served_and_saved(folder: &std::path::Path) -> Value {
    let store = PrefixStore { folder: folder.into(), model: "m".into() };
    let mut server = Running::with(
        engine_options(),
        ServerOptions { prefix_store: Some(store), ..ServerOptions::default() },
    );
    let answer = server.ask("/v1/completions", &long_request());
    server.drain();
    server.join();
    answer["choices"].clone()
}

/// The files of a folder.
#[cfg(target_os = "linux")]
fn files_in(folder: &std::path::Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(folder).expect("there").map(|entry| entry.expect("readable").path());
    entries.filter(|path| !path.is_dir()).collect()
}

/// A limit on the size of files stands in for a disk that is full while a text is written. It holds for a process, so a
/// child runs the server.
#[cfg(target_os = "linux")]
#[test]
fn a_disk_that_is_full_in_the_middle_of_a_text_stops_nothing_and_leaves_no_half_file() {
    const FOLDER: &str = "KEEL_TEST_FULL_DISK";
    if let Some(folder) = std::env::var_os(FOLDER) {
        println!("\nchoices {}", served_and_saved(folder.as_ref()));
        return;
    }
    let dir = tempfile::tempdir().expect("a temporary folder");
    let name = "a_disk_that_is_full_in_the_middle_of_a_text_stops_nothing_and_leaves_no_half_file";
    let child = std::process::Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 64; exec \"$0\" \"$@\""])
        .arg(std::env::current_exe().expect("this program"))
        .args(["--exact", name, "--nocapture"])
        .env(FOLDER, dir.path())
        .output()
        .expect("sh runs");
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success(), "{said}{}", String::from_utf8_lossy(&child.stderr));
    assert!(files_in(dir.path()).is_empty(), "{:?}", files_in(dir.path()));
    let choices = said.lines().find_map(|line| line.strip_prefix("choices ")).expect("an answer");
    let with_room = served_and_saved(dir.path());
    assert_eq!(serde_json::from_str::<Value>(choices).expect("JSON"), with_room);
    let text = std::fs::metadata(dir.path().join("0.safetensors")).expect("with room it is saved");
    assert!(text.len() > 64 * 1024, "the limit was met within the text, not at its end");
}

#[cfg(target_os = "linux")]
#[test]
fn an_index_that_cannot_be_made_stops_nothing_and_leaves_no_text() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    // Folders stand in place of every partial file that this process may write for the index.
    let in_the_way: Vec<_> = (0..1000)
        .map(|i| dir.path().join(format!(".index.json.{}-{i}.partial", std::process::id())))
        .collect();
    in_the_way.iter().for_each(|path| std::fs::create_dir(path).expect("made"));
    let choices = served_and_saved(dir.path());
    assert!(files_in(dir.path()).is_empty(), "{:?}", files_in(dir.path()));
    in_the_way.iter().for_each(|path| std::fs::remove_dir(path).expect("removed"));
    assert_eq!(served_and_saved(dir.path()), choices);
    assert!(dir.path().join("index.json").exists(), "with room it is saved");
}

#[test]
fn a_prefix_folder_that_cannot_be_written_stops_nothing() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let file = dir.path().join("file");
    std::fs::write(&file, "in the way").expect("written");
    let store = PrefixStore { folder: file, model: "m".into() };
    let options = ServerOptions { prefix_store: Some(store), ..ServerOptions::default() };
    let mut server = Running::with(engine_options(), options);
    server.ask("/v1/completions", &completion(5));
    server.drain();
    server.join();
}

#[test]
fn prefixes_outlive_a_server() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let start = || {
        let store = PrefixStore { folder: dir.path().join("prefixes"), model: "m".into() };
        Running::with(
            engine_options(),
            ServerOptions { prefix_store: Some(store), ..ServerOptions::default() },
        )
    };
    let mut body = completion(12);
    body["prompt"] = json!("The little dog ran over the hill. ".repeat(30));
    let mut first = start();
    let before = first.ask("/v1/completions", &body);
    first.drain();
    first.join();
    let second = start();
    let after = second.ask("/v1/completions", &body);
    assert_eq!(before["choices"], after["choices"]);
    let cached = after["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a number");
    assert!(cached >= 128, "{after}");
    second.assert_all_is_back();
}

/// Almost valid bodies, made from valid ones by replacing, removing and nesting.
fn distort(body: &Value, random: &mut impl FnMut(usize) -> usize) -> Value {
    let odd = [
        json!(null),
        json!(-1),
        json!(1e308),
        json!(""),
        json!("\u{0}\u{ffff}"),
        json!([]),
        json!({}),
        json!(true),
        json!([[[[{}]]]]),
        json!(u64::MAX),
        json!({"type": "x"}),
        json!(["a", 1, null]),
        json!(0.5),
    ];
    match body {
        Value::Object(fields) => {
            let chosen = random(fields.len().max(1));
            let change = |(i, (key, value)): (usize, (&String, &Value))| {
                if i != chosen {
                    return Some((key.clone(), value.clone()));
                }
                match random(3) {
                    0 => None,
                    1 => Some((key.clone(), odd[random(odd.len())].clone())),
                    _ => Some((key.clone(), distort(value, random))),
                }
            };
            fields.iter().enumerate().filter_map(change).collect()
        }
        Value::Array(items) if !items.is_empty() => {
            let chosen = random(items.len());
            let change = |(i, item)| if i == chosen { distort(item, random) } else { item.clone() };
            items.iter().enumerate().map(change).collect()
        }
        _ => odd[random(odd.len())].clone(),
    }
}

#[test]
fn distorted_bodies_are_refused_or_answered() {
    let server = Running::with(
        engine_options(),
        ServerOptions { model_id: "demo".into(), max_tokens_default: 4, ..ServerOptions::default() },
    );
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object",
        "properties": {"a": {"type": "integer"}}}}});
    let bodies = [
        (
            "/v1/completions",
            json!({"prompt": "a", "max_tokens": 3, "temperature": 1, "stop": ["x"], "logprobs": 1,
            "n": 1, "logit_bias": {"5": 1}, "echo": true, "seed": 3}),
        ),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": null, "tool_calls": [{"id": "1", "type": "function", "function":
            {"name": "f", "arguments": "{}"}}]}, {"role": "tool", "tool_call_id": "1", "content": "x"}],
            "max_tokens": 3, "tools": [tool], "tool_choice": "auto", "response_format": {"type": "json_schema",
            "json_schema": {"schema": {"type": "object", "properties": {"b": {"enum": [1, 2]}}}}}}),
        ),
        (
            "/v1/responses",
            json!({"input": [{"role": "user", "content": "a"}], "max_output_tokens": 3,
            "text": {"format": {"type": "json_object"}}, "tools": [{"type": "function", "name": "f"}]}),
        ),
        (
            "/v1/messages",
            json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
            "max_tokens": 3, "system": [{"type": "text", "text": "s"}], "tools": [{"name": "f",
            "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"}, "stop_sequences": ["x"]}),
        ),
        ("/tokenize", json!({"text": "a", "add_special_tokens": true})),
        ("/detokenize", json!({"tokens": [1, 2, 4_000_000_000u32]})),
    ];
    let mut seed = 11u64;
    let mut random = |below: usize| {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (seed >> 33) as usize % below
    };
    for round in 0..240 {
        let (path, body) = &bodies[round % bodies.len()];
        let mut wrong = body.clone();
        for _ in 0..=random(2) {
            wrong = distort(&wrong, &mut random);
        }
        let reply = server.post(path, &wrong);
        assert!(reply.status < 500, "{path} {wrong}: {} {}", reply.status, reply.body);
    }
    for bytes in [&b"{"[..], b"\xff\xfe", b"[1", b"", b"{\"messages\": [", &[b'['; 5000]] {
        assert_eq!(request(server.address, "POST", "/v1/chat/completions", &[], bytes).status, 400);
    }
    std::thread::sleep(Duration::from_millis(10));
    server.assert_all_is_back();
}
