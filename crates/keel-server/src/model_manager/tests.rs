use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::Poll;
use std::time::Duration;

use keel_array::{Runtime, RuntimeOptions};
use keel_cpu::{CpuBackend, CpuOptions};
use keel_engine::batch::BatchOptions;
use keel_engine::{Engine, EngineOptions};
use keel_models::loading::CheckpointParameters;
use keel_testkit::fixtures::demo;
use keel_text::TextFiles;
use keel_weights::Checkpoint;
use tokio::sync::oneshot;

use super::{Load, LoadOutput, Modalities, ModelManager, ModelManagerOptions, ServedModel};
use crate::error::ServerError;
use crate::options::ServerOptions;
use crate::shared::Shared;
use crate::text::ServedText;

fn load() -> Result<LoadOutput, Box<dyn std::error::Error + Send + Sync>> {
    let checkpoint = Checkpoint::open(&demo())?;
    let runtime = Runtime::new(Arc::new(CpuBackend::new(CpuOptions::default())), RuntimeOptions::default());
    let options =
        EngineOptions { context: 256, sequences: 1, pool_pages: Some(8), ..EngineOptions::default() };
    let parameters = CheckpointParameters(&checkpoint);
    let engine = Engine::load(&runtime, &parameters, checkpoint.config(), options, &|_| ())?;
    Ok(LoadOutput { engine, text: ServedText::new(&TextFiles::read(&demo())?)?, prefix_store: None })
}

/// Models of one byte each. One of them fits at a time.
fn manager(
    options: ServerOptions,
    keep_alive: Option<Duration>,
    loads: Vec<(&str, Load)>,
) -> Arc<ModelManager> {
    let offer = |(id, load): (&str, Load)| ServedModel {
        id: id.into(),
        bytes: 1,
        tower_bytes: 0,
        context: 256,
        takes: Modalities::default(),
        load,
    };
    let bounds = ModelManagerOptions { memory_limit: 1, tower_limit: 0, keep_alive, trim_allocator: || () };
    let offers = loads.into_iter().map(offer).collect();
    ModelManager::of_several(Shared::new(options), offers, bounds).expect("they fit")
}

/// The models `a` and `b`, which count their loads. `wait` runs before each load.
fn two(wait: impl Fn() + Clone + Send + Sync + 'static) -> (Arc<ModelManager>, Arc<AtomicUsize>) {
    let count = Arc::new(AtomicUsize::new(0));
    let loads = ["a", "b"].map(|id| {
        let (count, wait) = (Arc::clone(&count), wait.clone());
        let load: Load = Box::new(move || {
            count.fetch_add(1, Ordering::AcqRel);
            wait();
            load()
        });
        (id, load)
    });
    (manager(ServerOptions::default(), None, loads.into()), count)
}

/// A function that returns when the gate is dropped.
fn gate() -> (mpsc::Sender<()>, impl Fn() + Clone + Send + Sync + 'static) {
    let (closed, opens) = mpsc::channel();
    let opens = Arc::new(Mutex::new(opens));
    let wait = move || {
        let _ = opens.lock().expect("the test goes on").recv();
    };
    (closed, wait)
}

/// Polls a future once. Returns whether it is complete.
async fn completes(future: &mut (impl Future + Unpin)) -> bool {
    poll_fn(|context| Poll::Ready(Pin::new(&mut *future).poll(context).is_ready())).await
}

/// Runs until the other tasks of this test's runtime wait.
async fn let_others_run() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_model_that_loads_for_longer_than_requests_wait_says_that_it_is_loading() {
    let (go_on, may_go_on) = mpsc::channel::<()>();
    let may_go_on = Mutex::new(may_go_on);
    let slow = move || {
        let _ = may_go_on.lock().expect("the test goes on").recv();
        load()
    };
    let batch = BatchOptions { queue_timeout: Duration::from_millis(1), ..BatchOptions::default() };
    let manager =
        manager(ServerOptions { batch, ..ServerOptions::default() }, None, vec![("demo", Box::new(slow))]);
    let Err(error) = manager.model_for(None).await else { panic!("it is not loaded yet") };
    let reply = error.reply();
    assert_eq!((reply.status.as_u16(), reply.code, reply.retry_after), (503, "model_loading", Some(5)));
    assert!(error.to_string().contains("\"demo\" is not loaded yet"), "{error}");
    drop(go_on);
    while let Err(error) = manager.model_for(None).await {
        assert!(matches!(error, ServerError::ModelLoading { .. }), "{error}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn a_sweep_that_is_stopped_ends_after_the_model_that_it_unloads() {
    let manager =
        manager(ServerOptions::default(), Some(Duration::from_millis(1)), vec![("demo", Box::new(load))]);
    let model = manager.model_for(None).await.expect("it loads");
    // The engine's thread goes on while there is a handle, as it does while it saves prefixes.
    let handle = model.engine.clone();
    drop(model);
    let (stop, stops) = oneshot::channel();
    let sweeping = tokio::spawn(Arc::clone(&manager).sweep(stops));
    while !manager.loaded().is_empty() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    drop(stop);
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert!(!sweeping.is_finished(), "the model is not unloaded yet");
    drop(handle);
    sweeping.await.expect("it ends");
    assert!(manager.totals().engines.is_empty(), "nothing is being unloaded");
}

#[tokio::test]
async fn clients_of_two_models_alternate_in_one_place() {
    let (manager, _) = two(|| std::thread::sleep(Duration::from_millis(100)));
    let client = |id: &'static str| {
        let manager = Arc::clone(&manager);
        tokio::spawn(async move {
            for _ in 0..3 {
                let model = manager.model_for(Some(id)).await.expect("it is loaded");
                assert_eq!(model.id, id);
            }
        })
    };
    for client in [client("a"), client("b")] {
        client.await.expect("it is answered");
    }
}

#[tokio::test]
async fn a_load_that_is_not_wanted_any_more_does_not_begin() {
    let (closed, wait) = gate();
    let (manager, loads) = two(wait);
    for id in ["a", "b"].repeat(10) {
        let mut request = Box::pin(manager.model_for(Some(id)));
        assert!(!completes(&mut request).await);
        let_others_run().await;
    }
    drop(closed);
    manager.model_for(Some("b")).await.expect("it is loaded");
    let loads = loads.load(Ordering::Acquire);
    assert!(loads <= 3, "{loads} loads");
}

/// A second request for `a` comes while the first is loading and one for `b` waits for its turn.
#[tokio::test]
async fn one_load_answers_all_that_wait_for_it() {
    let (closed, wait) = gate();
    let (manager, loads) = two(wait);
    let ask = |id: &'static str| {
        let manager = Arc::clone(&manager);
        tokio::spawn(async move { manager.model_for(Some(id)).await.expect("it is loaded").id.clone() })
    };
    let mut asked = Vec::new();
    for id in ["a", "b", "a"] {
        asked.push(ask(id));
        let_others_run().await;
    }
    drop(closed);
    let mut answers = Vec::new();
    for ask in asked {
        answers.push(ask.await.expect("it is answered"));
    }
    assert_eq!(answers, ["a", "b", "a"]);
    assert_eq!(loads.load(Ordering::Acquire), 2);
}

#[tokio::test]
async fn the_end_waits_for_a_model_that_is_being_unloaded_and_nothing_is_loaded_after_it() {
    let (manager, loads) = two(|| ());
    let model = manager.model_for(Some("a")).await.expect("it loads");
    // The engine's thread goes on while there is a handle, as it does while it saves prefixes.
    let handle = model.engine.clone();
    drop(model);
    let other = {
        let manager = Arc::clone(&manager);
        tokio::spawn(async move { manager.model_for(Some("b")).await.map(drop) })
    };
    while !manager.loaded().is_empty() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    manager.drain();
    let mut end = Box::pin(manager.close());
    assert!(!completes(&mut end).await, "the model is not unloaded yet");
    drop(handle);
    assert!(end.await.is_empty());
    assert!(manager.totals().engines.is_empty(), "nothing is being unloaded");
    let refused = other.await.expect("it is answered");
    assert!(matches!(refused, Err(ServerError::Draining)), "{refused:?}");
    assert_eq!(loads.load(Ordering::Acquire), 1);
}
