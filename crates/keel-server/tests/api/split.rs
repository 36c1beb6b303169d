//! A server of a split model: the answers of the whole one, and after many requests every device's ledger as at the
//! start. A server whose vision tower has a device of its own.

use crate::common::splitting::engine_on;
use crate::common::{Running, demo, engine_options};
use keel_array::{Category, Runtime, RuntimeOptions};
use keel_engine::batch::{BatchOptions, Batcher};
use keel_engine::split::PlacedPart;
use keel_engine::{Engine, EngineOptions, VisionOptions};
use keel_models::loading::CheckpointParameters;
use keel_server::{EngineHandle, ServerOptions};
use keel_testkit::fixtures::{SEEING, seeing_fixture};
use keel_weights::Checkpoint;
use serde_json::{Value, json};

/// Bounds at which sequences are parked.
fn crowded() -> EngineOptions {
    EngineOptions {
        sequences: 6,
        checkpoints: 12,
        pool_pages: Some(8),
        swap_bytes: 64 << 20,
        ..engine_options()
    }
}

/// A request whose prompt begins as others do. Some answers are long, so that sequences are parked.
fn request(i: usize) -> Value {
    let own = (0..60 + i % 50).map(|j| (i * 31 + j * 7) % 4000);
    let prompt: Vec<usize> = (0..128).map(|j| j * 13 % 4000).chain(own).collect();
    let max_tokens = if i.is_multiple_of(3) { 600 } else { 4 + i % 9 };
    json!({"prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": true})
}

fn ask_all(server: &Running, count: usize) -> Vec<Value> {
    std::thread::scope(|scope| {
        let ask =
            |i| scope.spawn(move || server.ask("/v1/completions", &request(i))["choices"][0]["text"].clone());
        let all: Vec<_> = (0..count).map(ask).collect();
        all.into_iter().map(|thread| thread.join().expect("an answer")).collect()
    })
}

#[test]
fn a_pipeline_serves_the_answers_of_the_whole_model_and_leaves_nothing() {
    const COUNT: usize = 24;
    let options = || ServerOptions { model_id: "demo".into(), ..ServerOptions::default() };
    let whole = Running::with(crowded(), options());
    let want = ask_all(&whole, COUNT);
    drop(whole);
    let engine = || engine_on(&demo(), (2, 1), crowded(), |_, backend| backend);
    let server = Running::made(&demo(), engine, options());
    let answers = ask_all(&server, COUNT);
    assert!(answers == want, "a pipeline has the bits of the whole model");
    server.wait_until_idle();
    let status = server.get("/status").json();
    let devices = status["devices"].as_array().expect("devices");
    assert_eq!([&devices[0]["device"], &devices[1]["device"]], ["cpu:0", "cpu:1"]);
    for device in devices {
        assert_eq!(device["allocated"], device["planned"]);
        assert_eq!(device["peak"], device["planned"]);
    }
    let metrics = server.get("/metrics").body;
    assert!(metrics.contains(
        "keel_split_memory_bytes{model=\"demo\",device=\"cpu:1\",category=\"weights\",kind=\"planned\"}"
    ));
    let batch = server.model.engine.status();
    assert!(batch.parking.times > 0 && batch.speculation.drafted_total() > 0, "{batch:?}");
    assert_eq!((batch.failed_steps, server.model.engine.leaks()), (0, 0));
    assert!(batch.late_work.named().iter().all(|(_, count)| *count == 0), "{:?}", batch.late_work);
    server.assert_all_is_back();
}

/// The ledger that a server shows is that of the model, not that of the tower.
#[test]
fn the_ledger_of_a_server_whose_tower_is_apart_is_that_of_the_model() {
    let folder = seeing_fixture(SEEING[0]);
    let checkpoint = Checkpoint::open(&folder).expect("the model opens");
    let parameters = CheckpointParameters(&checkpoint);
    let runtime = || Runtime::new(crate::common::cpu(), RuntimeOptions::default());
    let (devices, tower) = ([PlacedPart::whole(runtime())], runtime());
    let vision = VisionOptions { patches: 64, pictures: 2, piece_tokens: VisionOptions::WHOLE };
    let options = EngineOptions {
        drafts: 0,
        context: 512,
        pool_pages: Some(8),
        vision: Some(vision),
        ..engine_options()
    };
    let config = checkpoint.config();
    let engine = Engine::load_on(&devices, Some(&tower), &parameters, config, options, &|_| ())
        .expect("the model loads");
    let (handle, thread) =
        EngineHandle::start(Batcher::new(engine, BatchOptions::default()), None).expect("it starts");
    let all = handle.devices();
    let [on_model, on_tower] = &all[..] else { panic!("{all:?}") };
    assert!(on_tower.planned.get(Category::Vision) > 0 && on_tower.planned.get(Category::Kv) == 0, "{all:?}");
    assert!(handle.ledger().active().get(Category::Kv) > 0, "{all:?}");
    assert_eq!(handle.ledger().active(), on_model.allocated);
    drop(handle);
    thread.join().expect("it ends well");
}
