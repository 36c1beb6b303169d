//! A fault of one client does not affect the others.

use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use crate::common::{Running, completion, cpu, demo, engine_options, read, send, wait_for};
use keel_array::{
    Array, ArrayError, Backend, Category, DType, DeviceMemory, Launch, Runtime, RuntimeOptions,
};
use keel_engine::{Engine, EngineOptions};
use keel_models::loading::CheckpointParameters;
use keel_server::{ServerError, ServerOptions};
use keel_testkit::intercepted::{InterceptedBackend, Interceptor};
use keel_weights::Checkpoint;
use serde_json::json;

/// Launches fail while the counter is above zero. Each failure decrements it.
#[derive(Default)]
struct Failing {
    launches: AtomicUsize,
    /// Whether the backend reports that no kernel of the launch has run.
    tells: AtomicBool,
    /// Whether a failure says that the device is lost.
    is_lost: AtomicBool,
}

impl Interceptor for Failing {
    fn launch(&self, backend: &dyn Backend, launch: &Launch<'_>) -> Result<(), ArrayError> {
        let failing = self.launches.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1));
        if failing.is_ok() {
            if self.tells.load(Ordering::SeqCst) {
                launch.note_done(0);
            }
            let reason = "injected".to_string();
            if self.is_lost.load(Ordering::SeqCst) {
                return Err(ArrayError::DeviceLost { op: "launch".into(), reason });
            }
            return Err(ArrayError::Allocation { category: Category::Workspace, requested: 1, reason });
        }
        backend.launch(launch)
    }
}

/// Three clients whose answers have begun.
fn three_answers(server: &Running) -> Vec<TcpStream> {
    let body = completion(1500).to_string();
    let clients: Vec<TcpStream> =
        (0..3).map(|_| send(server.address, "POST", "/v1/completions", &[], body.as_bytes())).collect();
    wait_for("they run", || {
        let running = server.model.engine.status().running;
        running.len() == 3 && running.iter().all(|r| r.generated_tokens > 0)
    });
    clients
}

#[test]
fn a_fault_that_stays_fails_its_requests_and_no_later_one() {
    let failing = Arc::new(Failing::default());
    let server = Running::on(
        InterceptedBackend::new(cpu(), Arc::clone(&failing)),
        engine_options(),
        ServerOptions::default(),
    );
    let good = server.ask("/v1/completions", &completion(20));
    for _ in 0..3 {
        let clients = three_answers(&server);
        failing.launches.store(usize::MAX, Ordering::SeqCst);
        for client in clients {
            let reply = read(client);
            assert_eq!(reply.status, 500, "{}", reply.body);
            assert_eq!(reply.header("x-should-retry"), None, "the fault may pass");
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
    let server = Running::on(
        InterceptedBackend::new(cpu(), Arc::clone(&failing)),
        engine_options(),
        ServerOptions::default(),
    );
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

/// A device that is lost answers no request again, and no other takes its place. So the server ends with the cause, and
/// a supervisor starts it again.
#[test]
fn a_lost_device_ends_the_server() {
    let failing = Arc::new(Failing::default());
    failing.is_lost.store(true, Ordering::SeqCst);
    let server = Running::on(
        InterceptedBackend::new(cpu(), Arc::clone(&failing)),
        engine_options(),
        ServerOptions::default(),
    );
    server.ask("/v1/completions", &completion(20));
    assert_eq!(server.get("/health").status, 200);
    let clients = three_answers(&server);
    failing.launches.store(usize::MAX, Ordering::SeqCst);
    for client in clients {
        let reply = read(client);
        assert!(matches!(reply.status, 500 | 503), "{}: {}", reply.status, reply.body);
    }
    wait_for("the engine stops", || server.model.engine.is_stopped());
    // No signal has come.
    let error = server.outcome().expect_err("its engine has failed");
    let ServerError::EngineLost { source: Some(cause) } = &error else { panic!("{error:?}") };
    assert!(cause.to_string().contains("launch: injected; the device can no longer be used"), "{cause}");
    assert_eq!(error.reply().code, "engine_stopped");
}

#[test]
fn a_client_that_reads_nothing_delays_nobody() {
    let server = Running::start();
    let mut body = completion(1500);
    body["stream"] = json!(true);
    let deaf: Vec<TcpStream> = (0..4)
        .map(|_| send(server.address, "POST", "/v1/completions", &[], body.to_string().as_bytes()))
        .collect();
    wait_for("they run", || server.model.engine.status().running.len() == 4);
    for _ in 0..5 {
        server.ask("/v1/completions", &completion(10));
    }
    server.wait_until_idle();
    drop(deaf);
    server.assert_all_is_back();
}

/// While it is set, all allocations fail.
#[derive(Default)]
struct NoMemory(AtomicBool);

impl NoMemory {
    fn check(&self) -> Result<(), String> {
        if self.0.load(Ordering::SeqCst) { Err("injected".into()) } else { Ok(()) }
    }
}

impl Interceptor for NoMemory {
    fn allocate(&self, backend: &dyn Backend, bytes: usize) -> Result<Box<dyn DeviceMemory>, String> {
        self.check()?;
        backend.allocate(bytes)
    }

    fn allocate_lasting(&self, backend: &dyn Backend, bytes: usize) -> Result<Box<dyn DeviceMemory>, String> {
        self.check()?;
        backend.allocate_lasting(bytes)
    }
}

#[test]
fn a_server_that_has_started_needs_no_more_memory() {
    let full = Arc::new(NoMemory::default());
    let crowded = EngineOptions { pool_pages: Some(5), swap_bytes: 64 << 20, ..engine_options() };
    let server =
        Running::on(InterceptedBackend::new(cpu(), Arc::clone(&full)), crowded, ServerOptions::default());
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
    assert_eq!(server.model.engine.leaks(), 0);
    drop(other);
    server.ask("/v1/completions", &completion(3));
    wait_for("the bytes are missed", || server.model.engine.leaks() == 1);
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
