//! Helpers for the server's tests: a server on the built-in model, and a client on plain sockets.

#![allow(dead_code)] // each test file uses its part

pub mod splitting;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use keel_array::{Backend, Runtime, RuntimeOptions};
use keel_cpu::{CpuBackend, CpuOptions};
use keel_engine::{Engine, EngineOptions};
use keel_models::loading::CheckpointParameters;
use keel_server::{ImagePreprocessor, LoadedModel, ServedText, Server, ServerOptions, bind};
pub use keel_testkit::fixtures::demo;
use keel_text::TextFiles;
use keel_vision::ProcessorFiles;
use keel_weights::Checkpoint;
use serde_json::{Value, json};
use tokio::sync::oneshot;

/// Pixels of a picture that models of these tests read.
pub const PIXELS_MAX: usize = 1 << 20;

pub fn engine_options() -> EngineOptions {
    EngineOptions {
        context: 2048,
        sequences: 16,
        prefill_step: 512,
        checkpoints: 48,
        pool_pages: Some(64),
        drafts: 2,
        ..EngineOptions::default()
    }
}

pub fn cpu() -> Arc<dyn Backend> {
    Arc::new(CpuBackend::new(CpuOptions { threads: Some(2), ..CpuOptions::default() }))
}

pub fn engine(backend: Arc<dyn Backend>, options: EngineOptions) -> Engine {
    engine_of(&demo(), backend, options)
}

fn engine_of(folder: &Path, backend: Arc<dyn Backend>, options: EngineOptions) -> Engine {
    let checkpoint = Checkpoint::open(folder).expect("the model opens");
    let runtime = Runtime::new(backend, RuntimeOptions::default());
    let parameters = CheckpointParameters(&checkpoint);
    Engine::load(&runtime, &parameters, checkpoint.config(), options, &|_| ()).expect("the model loads")
}

/// A server on a separate thread.
pub struct Running {
    pub address: SocketAddr,
    pub model: Arc<LoadedModel>,
    tasks: tokio::runtime::Handle,
    drain: Option<oneshot::Sender<()>>,
    abort: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<keel_server::Result<()>>>,
}

impl Running {
    pub fn start() -> Running {
        Running::with(engine_options(), ServerOptions { model_id: "demo".into(), ..ServerOptions::default() })
    }

    pub fn with(engine_options: EngineOptions, options: ServerOptions) -> Running {
        Running::on(cpu(), engine_options, options)
    }

    pub fn on(backend: Arc<dyn Backend>, engine_options: EngineOptions, options: ServerOptions) -> Running {
        Running::of(&demo(), backend, engine_options, options)
    }

    /// A server of the model in a folder. It is shown pictures if the engine plans for any.
    pub fn of(
        folder: &Path,
        backend: Arc<dyn Backend>,
        engine_options: EngineOptions,
        options: ServerOptions,
    ) -> Running {
        let model = folder.to_path_buf();
        Running::made(folder, move || engine_of(&model, backend, engine_options), options)
    }

    /// A server of the engine that `make` makes of the model in a folder.
    pub fn made(
        folder: &Path,
        make: impl FnOnce() -> Engine + Send + 'static,
        options: ServerOptions,
    ) -> Running {
        let folder = folder.to_path_buf();
        let (sender, receiver) = mpsc::channel();
        let (drain, drained) = oneshot::channel();
        let (abort, aborted) = oneshot::channel();
        let thread = std::thread::spawn(move || {
            // The same runtime as in `keel serve`.
            let mut runtime = tokio::runtime::Builder::new_multi_thread();
            let runtime = runtime
                .worker_threads(2)
                .max_blocking_threads(keel_server::WORK_THREADS + 1)
                .enable_all()
                .build();
            runtime.expect("a runtime").block_on(async {
                let listener = bind("127.0.0.1:0").await.expect("a free port");
                let address = listener.local_addr().expect("it is bound");
                let text = ServedText::new(&TextFiles::read(&folder).expect("there")).expect("right");
                let engine = make();
                let text = match engine.vision() {
                    Some(vision) => {
                        let files = ProcessorFiles::read(&folder).expect("there");
                        let preprocessor =
                            ImagePreprocessor::new(vision.clone(), &files, &text.tokenizer, PIXELS_MAX, 3);
                        text.with_preprocessor(preprocessor.expect("right"))
                    }
                    None => text,
                };
                let server = Server::new(engine, text, options).expect("starts");
                let tasks = tokio::runtime::Handle::current();
                sender
                    .send((address, server.last_used().expect("it is loaded"), tasks))
                    .expect("the test waits");
                let either = |signal: oneshot::Receiver<()>| async move {
                    if signal.await.is_err() {
                        std::future::pending::<()>().await;
                    }
                };
                server.run(listener, either(drained), either(aborted)).await
            })
        });
        let (address, model, tasks) = receiver.recv().expect("the server starts");
        Running { address, model, tasks, drain: Some(drain), abort: Some(abort), thread: Some(thread) }
    }

    /// Number of the server's tasks that have not ended.
    pub fn tasks(&self) -> usize {
        self.tasks.metrics().num_alive_tasks()
    }

    /// Starts the shutdown.
    pub fn drain(&mut self) {
        let _ = self.drain.take().expect("once").send(());
    }

    /// Ends running requests.
    pub fn abort(&mut self) {
        let _ = self.abort.take().expect("once").send(());
    }

    /// Waits until the server has ended. It ends only when all handles are dropped, including this one.
    pub fn join(self) {
        self.outcome().expect("the server ends well");
    }

    /// The same for a server that may end with an error.
    pub fn outcome(mut self) -> keel_server::Result<()> {
        let thread = self.thread.take().expect("once");
        drop(self);
        thread.join().expect("the server does not panic")
    }

    pub fn get(&self, path: &str) -> Reply {
        request(self.address, "GET", path, &[], b"")
    }

    pub fn post(&self, path: &str, body: &Value) -> Reply {
        request(self.address, "POST", path, &[], body.to_string().as_bytes())
    }

    /// Posts a request, which must succeed.
    pub fn ask(&self, path: &str, body: &Value) -> Value {
        let reply = self.post(path, body);
        assert_eq!(reply.status, 200, "{}", reply.body);
        reply.json()
    }

    /// Waits until nothing runs or waits.
    pub fn wait_until_idle(&self) {
        wait_for("nothing runs", || {
            let status = self.model.engine.status();
            status.running.is_empty() && status.waiting == 0 && status.parking.parked == 0
        });
    }

    /// Asserts that an idle server holds nothing after its prefixes are forgotten.
    pub fn assert_all_is_back(&self) {
        self.wait_until_idle();
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        runtime.block_on(self.model.engine.forget_prefixes()).expect("it runs");
        wait_for("all pages are free", || {
            let status = self.model.engine.status();
            status.free_pages == status.pages && status.prefix_states == 0
        });
        for device in self.model.engine.devices() {
            assert_eq!(device.allocated, device.planned, "{}", device.name);
        }
    }
}

/// Tasks of a server without connections: one watches over connections, one gives back memory at rest.
pub const OWN_TASKS: usize = 2;

/// A request for a greedy completion of `max_tokens` tokens.
pub fn completion(max_tokens: usize) -> Value {
    json!({"prompt": "Once upon a time", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true})
}

pub fn wait_for(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(60), "waited too long until {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: String,
    /// Whether the body came to its end: its last chunk, or all of its length.
    pub is_complete: bool,
}

impl Reply {
    pub fn json(&self) -> Value {
        assert!(self.is_complete, "the body was cut off: {}", self.body);
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
    }

    /// The JSON events of a stream. The stream must end properly.
    pub fn events(&self) -> Vec<Value> {
        assert!(self.is_complete, "the stream was cut off: {}", self.body);
        let mut data: Vec<&str> = self.body.lines().filter_map(|l| l.strip_prefix("data: ")).collect();
        assert_eq!(data.pop(), Some("[DONE]"), "{}", self.body);
        data.into_iter().map(|text| serde_json::from_str(text).expect("JSON")).collect()
    }
}

/// Sends a request and returns the connection. A header with an empty value removes the default header of that name.
pub fn send(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> TcpStream {
    let mut stream = TcpStream::connect(address).expect("the server listens");
    let mut head = format!("{method} {path} HTTP/1.1\r\nconnection: close\r\n");
    let given = |name: &str| headers.iter().any(|(given, _)| given.eq_ignore_ascii_case(name));
    for (name, value) in [("host", "localhost"), ("content-type", "application/json")] {
        if !given(name) {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
    }
    for (name, value) in headers.iter().filter(|(_, value)| !value.is_empty()) {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str(&format!("content-length: {}\r\n\r\n", body.len()));
    stream.write_all(head.as_bytes()).expect("sent");
    // A server may refuse a body before it has read it.
    let _ = stream.write_all(body);
    stream
}

pub fn request(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Reply {
    read(send(address, method, path, headers, body))
}

/// Reads a response to its end, or to where the connection ends.
pub fn read(stream: TcpStream) -> Reply {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).expect("a status line");
    let status = line.split(' ').nth(1).and_then(|s| s.parse().ok()).unwrap_or_else(|| panic!("{line:?}"));
    let mut headers = Vec::new();
    loop {
        line.clear();
        reader.read_line(&mut line).expect("a header");
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        headers.push((name.to_ascii_lowercase(), value.to_string()));
    }
    let chunked = headers.iter().any(|(n, v)| n == "transfer-encoding" && v == "chunked");
    let length =
        headers.iter().find(|(n, _)| n == "content-length").map(|(_, v)| v.parse().expect("a number"));
    let mut body = Vec::new();
    let is_complete = if chunked {
        loop {
            match read_chunk(&mut reader) {
                Some(chunk) if chunk.is_empty() => break true,
                Some(chunk) => body.extend(chunk),
                None => break false,
            }
        }
    } else {
        // The server may close before the client has sent everything. Then the read fails after the body.
        let read = reader.read_to_end(&mut body);
        length.map_or(read.is_ok(), |length: usize| body.len() == length)
    };
    Reply { status, headers, body: String::from_utf8(body).expect("UTF-8"), is_complete }
}

/// The next chunk, empty if it is the last one. `None` if it does not come whole.
fn read_chunk(reader: &mut impl BufRead) -> Option<Vec<u8>> {
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let size = usize::from_str_radix(line.trim(), 16).ok()?;
    let mut chunk = vec![0; size + 2];
    reader.read_exact(&mut chunk).ok()?;
    chunk.ends_with(b"\r\n").then_some(())?;
    chunk.truncate(size);
    Some(chunk)
}
