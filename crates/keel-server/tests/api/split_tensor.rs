//! Servers whose model's layers are shared by several devices: the answers of the whole model, up to near ties, and
//! after many requests and failures every device's ledger as at the start.

use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::splitting::engine_on;
use crate::common::{Running, engine_options, read, send, wait_for};
use keel_array::{ArrayError, Backend, Compute, Launch};
use keel_engine::{Depth, EngineOptions};
use keel_server::ServerOptions;
use keel_testkit::fixtures::served_fixture;
use keel_testkit::intercepted::{InterceptedBackend, Interceptor, injected};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

/// Logits whose logarithms of probability differ by less may change places by rounding.
const NEAR: f64 = 1e-3;

/// Splits: stages, and devices of each.
const GRIDS: [(usize, usize); 2] = [(1, 2), (2, 2)];

/// Bounds at which sequences are parked.
fn crowded() -> EngineOptions {
    EngineOptions {
        context: 1024,
        sequences: 6,
        checkpoints: 12,
        pool_pages: Some(5),
        swap_bytes: 64 << 20,
        compute: Compute::F32,
        ..engine_options()
    }
}

fn server_options() -> ServerOptions {
    let mut options = ServerOptions { model_id: "served".into(), ..ServerOptions::default() };
    options.batch.speculation.depth = Depth::Fixed(2);
    options
}

/// Fails launches of a device while the counter is above zero.
#[derive(Default)]
struct Failing(AtomicUsize);

impl Interceptor for Failing {
    fn launch(&self, backend: &dyn Backend, launch: &Launch<'_>) -> Result<(), ArrayError> {
        if self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_err() {
            return backend.launch(launch);
        }
        launch.note_done(0);
        Err(injected("launch"))
    }
}

/// A server of a split model whose device `rank` can fail.
fn server_on(grid: (usize, usize), rank: usize, options: EngineOptions) -> (Running, Arc<Failing>) {
    let failing = Arc::new(Failing::default());
    let handle = Arc::clone(&failing);
    let make = move || {
        engine_on(&served_fixture(), grid, options, |at, backend| match at == rank {
            true => InterceptedBackend::new(backend, Arc::clone(&failing)) as _,
            false => backend,
        })
    };
    (Running::made(&served_fixture(), make, server_options()), handle)
}

/// A request whose prompt begins as others do. Some answers are long, so that sequences are parked.
fn request(i: usize) -> Value {
    let own: Vec<String> = (0..30 + i % 50).map(|j| ((i * 31 + j * 7) % 90).to_string()).collect();
    let shared = "You know the story of a dog that met a cat. ".repeat(12);
    let max_tokens = if i.is_multiple_of(2) { 600 } else { 4 + i % 9 };
    json!({"messages": [{"role": "system", "content": shared}, {"role": "user", "content": own.join(" ")}],
        "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true})
}

fn with(mut body: Value, more: Value) -> Value {
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    body
}

/// The first choices of the answers to many requests at once.
fn ask_all(server: &Running, count: usize, more: &Value) -> Vec<Value> {
    std::thread::scope(|scope| {
        let ask =
            |i| scope.spawn(move || server.ask(CHAT, &with(request(i), more.clone()))["choices"][0].clone());
        let all: Vec<_> = (0..count).map(ask).collect();
        all.into_iter().map(|thread| thread.join().expect("an answer")).collect()
    })
}

fn text(choice: &Value) -> &str {
    choice["message"]["content"].as_str().expect("text")
}

/// Asserts that two answers with log probabilities agree up to the first near tie. Returns whether all of them is
/// equal.
fn agree(want: &Value, got: &Value) -> bool {
    let tokens = |choice: &Value| choice["logprobs"]["content"].as_array().expect("tokens").clone();
    let (want, got) = (tokens(want), tokens(got));
    assert_eq!(want.len(), got.len());
    let Some(at) = want.iter().zip(&got).position(|(want, got)| want["bytes"] != got["bytes"]) else {
        return true;
    };
    let top = |i: usize| want[at]["top_logprobs"][i]["logprob"].as_f64().expect("two tokens");
    assert!(top(0) - top(1) < NEAR, "token {at}: {} or {}", want[at], got[at]);
    false
}

/// Asserts that every device holds its planned bytes, and is shown.
fn assert_planned(server: &Running, count: usize) {
    let status = server.get("/status").json();
    let devices = status["devices"].as_array().expect("devices");
    assert_eq!(devices.len(), count);
    let metrics = server.get("/metrics").body;
    for (rank, device) in devices.iter().enumerate() {
        assert_eq!(device["device"], format!("cpu:{rank}"));
        for report in ["allocated", "peak"] {
            assert_eq!(device[report], device["planned"], "device {rank}: {report}");
        }
        let line = format!("device=\"cpu:{rank}\",category=\"weights\",kind=\"allocated\"");
        assert!(metrics.lines().any(|l| l.contains(&line) && !l.ends_with(" 0")), "{line}: {metrics}");
    }
    for kind in ["trace", "compile", "load", "capture", "allocate"] {
        assert!(metrics.contains(&format!("keel_late_work_total{{kind=\"{kind}\"}} 0\n")), "{kind}");
    }
}

#[test]
fn shared_layers_serve_the_answers_of_the_whole_model_and_leave_nothing() {
    const COUNT: usize = 16;
    let margins = json!({"logprobs": true, "top_logprobs": 2});
    let whole = Running::of(&served_fixture(), crate::common::cpu(), crowded(), server_options());
    let want = ask_all(&whole, COUNT, &margins);
    drop(whole);
    for grid in GRIDS {
        let (server, _) = server_on(grid, 0, crowded());
        let got = ask_all(&server, COUNT, &margins);
        let equal = want.iter().zip(&got).filter(|(want, got)| agree(want, got)).count();
        assert!(equal + 3 > COUNT, "{grid:?}: only {equal} of {COUNT} answers are equal");
        // Drafts, neighbours and parking do not change a bit of a split model either.
        let drafted = ask_all(&server, COUNT, &json!({}));
        for (i, (got, drafted)) in got.iter().zip(&drafted).enumerate() {
            assert_eq!(text(drafted), text(got), "{grid:?}: request {i}");
        }
        let streamed = server.post(CHAT, &with(request(1), json!({"stream": true}))).events();
        let piece = |event: &Value| event["choices"][0]["delta"]["content"].as_str().map(String::from);
        assert_eq!(streamed.iter().filter_map(piece).collect::<String>(), text(&drafted[1]), "{grid:?}");
        let again = server.ask(CHAT, &request(2));
        assert!(again["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64() >= Some(64), "{again}");
        assert_eq!(text(&again["choices"][0]), text(&drafted[2]), "{grid:?}");
        server.wait_until_idle();
        assert_planned(&server, grid.0 * grid.1);
        let batch = server.model.engine.status();
        assert!(batch.parking.times > 0 && batch.speculation.drafted_total() > 0, "{grid:?}: {batch:?}");
        assert_eq!((batch.failed_steps, server.model.engine.leaks()), (0, 0));
        server.assert_all_is_back();
    }
}

#[test]
fn shared_layers_follow_schemas_and_call_tools() {
    let schema = json!({"type": "object", "properties": {"animal": {"enum": ["cat", "dog"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["animal", "legs"],
        "additionalProperties": false});
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    let tools = json!([{"type": "function", "function": {"name": "weather", "parameters": {"type": "object",
        "properties": {"city": {"enum": ["Bern", "Rome"]}}, "required": ["city"], "additionalProperties": false}}}]);
    let ask = |more: Value| {
        with(
            json!({"messages": [{"role": "user", "content": "Which?"}], "temperature": 0, "max_tokens": 120}),
            more,
        )
    };
    for grid in GRIDS {
        let (server, _) = server_on(grid, 0, crowded());
        let answer = server.ask(CHAT, &ask(json!({"response_format": format})));
        let value: Value = serde_json::from_str(text(&answer["choices"][0])).expect("JSON");
        assert!(["cat", "dog"].contains(&value["animal"].as_str().expect("one")), "{grid:?}: {value}");
        let call = json!({"tools": tools, "tool_choice": "required", "parallel_tool_calls": false});
        let answer = server.ask(CHAT, &ask(call));
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{grid:?}: {answer}");
        let arguments = choice["message"]["tool_calls"][0]["function"]["arguments"].as_str().expect("text");
        let arguments: Value = serde_json::from_str(arguments).expect("JSON");
        assert!(["Bern", "Rome"].contains(&arguments["city"].as_str().expect("one")), "{arguments}");
        server.assert_all_is_back();
    }
}

#[test]
fn a_client_that_leaves_and_a_device_that_fails_leave_nothing() {
    for (grid, rank) in [((1, 2), 0), ((1, 2), 1), ((2, 2), 0), ((2, 2), 3)] {
        let (server, failing) = server_on(grid, rank, EngineOptions { pool_pages: Some(16), ..crowded() });
        let good = server.ask(CHAT, &request(1));
        let long = with(request(0), json!({"max_tokens": 700, "stream": true})).to_string();
        let mut leaving = send(server.address, "POST", CHAT, &[], long.as_bytes());
        leaving.read_exact(&mut [0; 400]).expect("it streams");
        drop(leaving);
        server.wait_until_idle();
        let body = with(request(0), json!({"max_tokens": 700})).to_string();
        let clients: Vec<_> =
            (0..3).map(|_| send(server.address, "POST", CHAT, &[], body.as_bytes())).collect();
        wait_for("they run", || {
            let running = server.model.engine.status().running;
            running.len() == 3 && running.iter().all(|r| r.generated_tokens > 0)
        });
        failing.0.store(usize::MAX, Ordering::SeqCst);
        for client in clients {
            let reply = read(client);
            assert_eq!(reply.status, 500, "{grid:?}, device {rank}: {}", reply.body);
            assert!(!reply.body.contains("injected"), "details are for the log: {}", reply.body);
        }
        failing.0.store(0, Ordering::SeqCst);
        let again = server.ask(CHAT, &request(1));
        assert_eq!(again["choices"], good["choices"], "{grid:?}, device {rank}: all devices are back");
        server.assert_all_is_back();
        server.wait_until_idle();
        let held = server.get("/status").json()["devices"].clone();
        for device in held.as_array().expect("devices") {
            assert_eq!(device["allocated"], device["planned"], "{grid:?}, device {rank}");
        }
    }
}
