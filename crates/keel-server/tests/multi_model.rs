//! Several models in one server. They are loaded on request, unloaded within one limit, and then leave nothing behind.

mod common;

use std::any::Any;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use common::{Reply, cpu, demo, engine, engine_options, read, request, send, wait_for};
use keel_array::{ArrayError, Backend, DeviceMemory, Launch};
use keel_server::{
    LoadOutput, Modalities, ModelManagerOptions, ServedModel, ServedText, Server, ServerError, ServerOptions,
    bind,
};
use keel_testkit::intercepted::{InterceptedBackend, Interceptor};
use keel_text::TextFiles;
use serde_json::{Value, json};
use tokio::sync::oneshot;

/// These tests measure bytes of the process, so they run one at a time.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    // As in `keel serve`.
    keel_cpu::process::heap::stay_small();
    TURN.lock().unwrap_or_else(|e| e.into_inner())
}

/// A server with copies of the built-in model.
struct Several {
    address: SocketAddr,
    loads: Arc<AtomicUsize>,
    drain: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<keel_server::Result<()>>>,
}

fn planned() -> u64 {
    engine(cpu(), engine_options()).runtime().ledger().active().total()
}

/// Whether the device of the first engine of `fragile` and `gone` is lost.
static IS_LOST: AtomicBool = AtomicBool::new(false);
/// Whether its memory is never freed.
static KEEPS_MEMORY: AtomicBool = AtomicBool::new(false);

struct Fragile;

struct FragileMemory(Box<dyn DeviceMemory>);

impl DeviceMemory for FragileMemory {
    fn as_any(&self) -> &dyn Any {
        self.0.as_any()
    }
}

impl Drop for FragileMemory {
    fn drop(&mut self) {
        while KEEPS_MEMORY.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Interceptor for Fragile {
    fn launch(&self, backend: &dyn Backend, launch: &Launch<'_>) -> Result<(), ArrayError> {
        if IS_LOST.load(Ordering::Acquire) {
            return Err(ArrayError::DeviceLost { op: "launch".into(), reason: "injected".into() });
        }
        backend.launch(launch)
    }

    fn allocate_lasting(&self, backend: &dyn Backend, bytes: usize) -> Result<Box<dyn DeviceMemory>, String> {
        Ok(Box::new(FragileMemory(backend.allocate_lasting(bytes)?)))
    }
}

fn offer(id: &str, bytes: u64, loads: &Arc<AtomicUsize>) -> ServedModel {
    let (loads, fails, is_gone) = (Arc::clone(loads), id == "broken", id == "gone");
    let is_fragile = is_gone || id == "fragile";
    let load = move || {
        let earlier = loads.fetch_add(1, Ordering::AcqRel);
        if fails || is_gone && earlier > 0 {
            return Err("its file has a hole".into());
        }
        let backend: Arc<dyn Backend> = match is_fragile && earlier == 0 {
            true => InterceptedBackend::new(cpu(), Arc::new(Fragile)),
            false => cpu(),
        };
        let text = ServedText::new(&TextFiles::read(&demo())?)?;
        Ok(LoadOutput { engine: engine(backend, engine_options()), text, prefix_store: None })
    };
    ServedModel {
        id: id.into(),
        bytes,
        tower_bytes: 0,
        context: engine_options().context,
        takes: Modalities::default(),
        load: Box::new(load),
    }
}

impl Several {
    fn start(names: &[&str], memory_limit: u64, keep_alive: Option<Duration>) -> Several {
        let rest = keel_cpu::process::heap::give_back_free;
        let models: Vec<(&str, u64)> = names.iter().map(|name| (*name, 0)).collect();
        Several::with_towers(
            &models,
            ModelManagerOptions { memory_limit, tower_limit: 0, keep_alive, trim_allocator: rest },
        )
    }

    /// The same with vision towers next to the models: names, and bytes of the towers.
    fn with_towers(models: &[(&str, u64)], fleet: ModelManagerOptions) -> Several {
        let (bytes, loads) = (planned(), Arc::new(AtomicUsize::new(0)));
        let offers: Vec<ServedModel> = models
            .iter()
            .map(|&(id, tower_bytes)| ServedModel { tower_bytes, ..offer(id, bytes, &loads) })
            .collect();
        let (sender, receiver) = mpsc::channel();
        let (drain, drained) = oneshot::channel();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
            runtime.expect("a runtime").block_on(async {
                let listener = bind("127.0.0.1:0").await.expect("a free port");
                sender.send(listener.local_addr().expect("it is bound")).expect("the test waits");
                let server = Server::of_several(offers, fleet, ServerOptions::default()).expect("starts");
                assert!(server.last_used().is_none(), "nothing is loaded before it is asked for");
                let drained = async { drop(drained.await) };
                server.run(listener, drained, std::future::pending()).await
            })
        });
        let address = receiver.recv().expect("the server starts");
        Several { address, loads, drain: Some(drain), thread: Some(thread) }
    }

    fn get(&self, path: &str) -> Reply {
        request(self.address, "GET", path, &[], b"")
    }

    fn complete(&self, model: &str, tokens: usize) -> Reply {
        let body =
            json!({"model": model, "prompt": "Once upon a time", "temperature": 0, "max_tokens": tokens});
        request(self.address, "POST", "/v1/completions", &[], body.to_string().as_bytes())
    }

    /// The text of an answer. It must be from the requested model.
    fn text(&self, model: &str) -> String {
        let reply = self.complete(model, 12);
        assert_eq!(reply.status, 200, "{}", reply.body);
        let answer = reply.json();
        assert_eq!(answer["model"], model);
        answer["choices"][0]["text"].as_str().expect("text").to_string()
    }

    /// Names of the loaded models.
    fn loaded(&self) -> Vec<String> {
        let models = self.get("/v1/models").json()["data"].clone();
        let models: Vec<Value> = serde_json::from_value(models).expect("a list");
        let loaded = models.iter().filter(|model| model["loaded"] == true);
        loaded.map(|model| model["id"].as_str().expect("a name").to_string()).collect()
    }

    fn loads(&self) -> usize {
        self.loads.load(Ordering::Acquire)
    }

    /// Sum of a metric over all of its labels.
    fn metric(&self, start: &str) -> f64 {
        let text = self.get("/metrics").body;
        let values =
            text.lines().filter(|line| line.starts_with(start)).filter_map(|line| line.split(' ').nth(1));
        values.map(|value| value.parse::<f64>().expect("a number")).sum()
    }

    fn allocated(&self) -> f64 {
        let text = self.get("/metrics").body;
        let lines = text
            .lines()
            .filter(|line| line.starts_with("keel_memory_bytes") && line.contains("kind=\"allocated\""));
        lines.map(|line| line.split(' ').nth(1).expect("a value").parse::<f64>().expect("a number")).sum()
    }
}

impl Drop for Several {
    fn drop(&mut self) {
        if let Some(drain) = self.drain.take() {
            let _ = drain.send(());
        }
        let Some(thread) = self.thread.take() else { return };
        assert!(matches!(thread.join(), Ok(Ok(()))) || std::thread::panicking(), "the server ends well");
    }
}

fn status(field: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").expect("Linux tells");
    let line = text.lines().find_map(|line| line.strip_prefix(field)).expect("it is there");
    line.trim_start_matches(':').trim().trim_end_matches(" kB").parse().expect("a number")
}

/// Two models fit by their own bytes, but one vision tower at a time fits next to them.
#[test]
fn towers_on_the_cpu_have_a_limit_of_their_own() {
    let _turn = alone();
    let fleet = ModelManagerOptions {
        memory_limit: u64::MAX,
        tower_limit: 150,
        keep_alive: None,
        trim_allocator: keel_cpu::process::heap::give_back_free,
    };
    let server = Several::with_towers(&[("a", 100), ("b", 100), ("plain", 0)], fleet);
    server.text("plain");
    server.text("a");
    assert_eq!(server.loaded(), ["a", "plain"]);
    server.text("b");
    assert_eq!(server.loaded(), ["b", "plain"], "both towers would take 200 of 150 bytes");
    assert_eq!(server.loads(), 3, "a model without a tower makes no room for one, however old it is");

    let offers = vec![ServedModel { tower_bytes: 151, ..offer("a", planned(), &Arc::default()) }];
    let refused = Server::of_several(offers, fleet, ServerOptions::default()).map(drop);
    let message = refused.expect_err("it never fits").to_string();
    assert!(
        message.contains("holds 151 bytes of its vision tower on the CPU, and the limit for all is 150"),
        "{message}"
    );
}

#[test]
fn a_request_picks_its_model_and_the_one_used_least_recently_makes_room() {
    let _turn = alone();
    let server = Several::start(&["a", "b", "c"], 2 * planned(), None);
    assert!(server.loaded().is_empty() && server.allocated() == 0.0);
    assert_eq!(server.get("/health").status, 200);
    assert_eq!(server.get("/status").json()["models"].as_array().expect("a list").len(), 3);
    let text = server.text("b");
    assert_eq!((server.loaded(), server.loads()), (vec!["b".into()], 1));
    assert_eq!(server.text("b"), text);
    assert_eq!(server.loads(), 1, "it stays");
    assert_eq!(server.text("a"), text, "they are copies");
    assert_eq!(server.allocated(), 2.0 * planned() as f64);
    server.text("b");
    server.text("c");
    assert_eq!(server.loaded(), ["b", "c"], "a was used least recently");
    assert_eq!(server.allocated(), 2.0 * planned() as f64, "the limit holds");
    // Without a name the first model answers.
    let body = json!({"prompt": "Once", "max_tokens": 1}).to_string();
    let reply = request(server.address, "POST", "/v1/completions", &[], body.as_bytes());
    assert_eq!((reply.status, &reply.json()["model"]), (200, &json!("a")));
    let unknown = server.complete("d", 1);
    let error = unknown.json()["error"].clone();
    assert_eq!((unknown.status, &error["code"]), (404, &json!("model_not_found")));
    assert!(error["message"].as_str().expect("text").contains(r#""a", "b", "c" are"#), "{error}");
    assert_eq!(server.get("/v1/models/c").json()["loaded"], true);
    assert_eq!(server.get("/v1/models/d").status, 404);
    // Counts are kept when a model is unloaded.
    assert_eq!(server.metric("keel_generated_tokens_total"), 5.0 * 12.0 + 1.0);
    assert_eq!(server.metric("keel_idle_losses_total"), 0.0);
}

#[test]
fn a_model_that_is_given_back_leaves_nothing() {
    let _turn = alone();
    let bytes = planned();
    let server = Several::start(&["a", "b"], 2 * bytes, Some(Duration::from_millis(200)));
    let rest = || {
        wait_for("nobody needs them", || server.loaded().is_empty());
        wait_for("they are gone", || server.allocated() == 0.0);
    };
    server.text("a");
    rest();
    let (resident, threads) = (status("VmRSS"), status("Threads"));
    for _ in 0..4 {
        server.text("a");
        server.text("b");
        assert!(server.allocated() > 0.0);
        rest();
    }
    assert_eq!(server.metric("keel_idle_losses_total"), 0.0, "the ledger of each was empty");
    assert!(server.loads() >= 9, "{} loads", server.loads());
    wait_for("threads have ended", || status("Threads") <= threads);
    let grown = (status("VmRSS").saturating_sub(resident)) << 10;
    assert!(grown < bytes / 2, "{grown} bytes more after 8 loads of {bytes}");
}

/// A model's memory is free when its thread has ended, even if another thread reads its counts at that moment.
#[test]
fn counts_that_are_read_meanwhile_keep_no_memory() {
    let _turn = alone();
    let server = Several::start(&["a", "b"], planned(), None);
    let reads = AtomicBool::new(true);
    std::thread::scope(|scope| {
        for path in ["/metrics", "/status", "/metrics"] {
            let (server, reads) = (&server, &reads);
            scope.spawn(move || {
                while reads.load(Ordering::Acquire) {
                    assert_eq!(server.get(path).status, 200);
                }
            });
        }
        for _ in 0..4 {
            server.text("a");
            server.text("b");
        }
        reads.store(false, Ordering::Release);
    });
    assert_eq!(server.loads(), 8);
    assert_eq!(server.metric("keel_idle_losses_total"), 0.0, "the ledger of each was empty at once");
}

#[test]
fn a_model_that_must_go_ends_its_answers_first() {
    let _turn = alone();
    let server = Several::start(&["a", "b"], planned(), None);
    server.text("a");
    let body = json!({"model": "a", "prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": true, "stream": true});
    let stream = send(server.address, "POST", "/v1/completions", &[], body.to_string().as_bytes());
    wait_for("it runs", || !server.get("/status").json()["running"].as_array().expect("a list").is_empty());
    std::thread::scope(|scope| {
        let others = [0, 1].map(|_| scope.spawn(|| server.text("b")));
        let events = read(stream).events();
        assert_eq!(events.last().expect("some")["choices"][0]["finish_reason"], "length");
        let [one, other] = others.map(|other| other.join().expect("it is answered"));
        assert_eq!(one, other);
    });
    assert_eq!((server.loaded(), server.loads()), (vec!["b".into()], 2), "two requests wait for one load");
    assert_eq!(server.allocated(), planned() as f64);
}

/// A server of several models goes on after a failure of one engine: the model is loaded again.
#[test]
fn an_engine_that_has_failed_is_loaded_again() {
    let _turn = alone();
    IS_LOST.store(false, Ordering::Release);
    let server = Several::start(&["a", "fragile"], 2 * planned(), None);
    let text = server.text("fragile");
    IS_LOST.store(true, Ordering::Release);
    let reply = server.complete("fragile", 12);
    assert!(matches!(reply.status, 500 | 503), "{}: {}", reply.status, reply.body);
    assert_eq!(reply.header("x-should-retry"), None, "a new try loads the model again");
    wait_for("its thread has ended", || server.complete("fragile", 12).status == 200);
    assert_eq!((server.text("fragile"), server.loads()), (text.clone(), 2));
    assert_eq!((server.text("a"), server.get("/health").status), (text, 200));
}

/// Nothing of it runs any more, so it makes room before others.
#[test]
fn an_engine_that_has_failed_has_no_work() {
    let _turn = alone();
    IS_LOST.store(false, Ordering::Release);
    let server = Several::start(&["a", "fragile", "c"], 2 * planned(), None);
    server.text("fragile");
    server.text("a");
    // Together they are more than run at once.
    let clients = [engine_options().sequences, 2].map(|n| {
        let body = json!({"model": "fragile", "prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": true,
            "n": n});
        send(server.address, "POST", "/v1/completions", &[], body.to_string().as_bytes())
    });
    wait_for("two wait", || server.metric("keel_requests_waiting") == 2.0);
    IS_LOST.store(true, Ordering::Release);
    for client in clients {
        let reply = read(client);
        assert!(matches!(reply.status, 500 | 503), "{}: {}", reply.status, reply.body);
    }
    wait_for("none is listed", || {
        server.metric("keel_requests_waiting") + server.metric("keel_requests_running") == 0.0
    });
    server.text("c");
    assert_eq!(server.loaded(), ["a", "c"], "a works, though it was used before the other");
}

/// The model of an engine that has failed is not asked for again, so it is still there at the end.
#[test]
fn a_device_that_frees_nothing_does_not_hold_up_the_end() {
    let _turn = alone();
    IS_LOST.store(false, Ordering::Release);
    let mut server = Several::start(&["fragile"], planned(), None);
    server.text("fragile");
    KEEPS_MEMORY.store(true, Ordering::Release);
    IS_LOST.store(true, Ordering::Release);
    let reply = server.complete("fragile", 12);
    assert!(matches!(reply.status, 500 | 503), "{}: {}", reply.status, reply.body);
    let _ = server.drain.take().expect("once").send(());
    let thread = server.thread.take().expect("once");
    wait_for("the server ends", || thread.is_finished());
    KEEPS_MEMORY.store(false, Ordering::Release);
    assert!(matches!(thread.join(), Ok(Ok(()))), "its model could have been loaded again");
}

/// A broken context of a GPU stays broken in this process, so a supervisor should start a new one.
#[test]
fn a_server_ends_when_no_model_can_be_loaded_after_a_failure() {
    let _turn = alone();
    IS_LOST.store(false, Ordering::Release);
    let mut server = Several::start(&["gone", "broken"], 2 * planned(), None);
    server.text("gone");
    assert_eq!(server.complete("broken", 1).status, 500);
    assert_eq!(server.get("/health").status, 200, "no engine has failed yet");
    IS_LOST.store(true, Ordering::Release);
    let reply = server.complete("gone", 12);
    assert!(matches!(reply.status, 500 | 503), "{}: {}", reply.status, reply.body);
    let thread = server.thread.take().expect("once");
    // A request that comes before the engine's thread has ended is refused without a load.
    let asked = Mutex::new(Vec::new());
    wait_for("the server ends", || {
        if let Ok(mut stream) = TcpStream::connect(server.address) {
            let body = r#"{"model": "gone", "prompt": "Once", "max_tokens": 1}"#;
            let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json";
            let _ = write!(stream, "{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
            asked.lock().expect("alone").push(stream);
        }
        thread.is_finished()
    });
    let error = thread.join().expect("no panic").expect_err("no model can run");
    assert!(matches!(error, ServerError::EngineLost { source: Some(_) }), "{error:?}");
}

#[test]
fn what_cannot_be_loaded_says_so_and_spoils_nothing() {
    let _turn = alone();
    let server = Several::start(&["a", "broken"], 2 * planned(), None);
    let reply = server.complete("broken", 1);
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (500, &json!("model_load_failure")));
    server.text("a");
    assert_eq!(server.complete("broken", 1).status, 500);
    assert_eq!(server.loaded(), ["a"]);
    let loads = Arc::new(AtomicUsize::new(0));
    let refused = |names: &[&str], memory_limit| {
        let offers = names.iter().map(|id| offer(id, 100, &loads)).collect();
        let fleet =
            ModelManagerOptions { memory_limit, tower_limit: 0, keep_alive: None, trim_allocator: || () };
        Server::of_several(offers, fleet, ServerOptions::default()).err().map(|error| error.to_string())
    };
    assert!(refused(&["a", "a"], 100).is_some_and(|error| error.contains("two models are called")));
    assert!(refused(&["a", "default"], 100).is_some_and(|error| error.contains("go to the first model")));
    assert_eq!(refused(&["default", "a"], 100), None);
    assert!(refused(&["a"], 99).is_some_and(|error| error.contains("100 bytes") && error.contains("99")));
    assert!(refused(&[], 99).is_some());
}
