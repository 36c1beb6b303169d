use std::any::Any;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::Poll;
use std::time::Duration;

use keel_array::{ArrayError, Backend, DeviceMemory, Launch, Runtime, RuntimeOptions};
use keel_cpu::{CpuBackend, CpuOptions};
use keel_engine::batch::{BatchOptions, BatchRequest};
use keel_engine::{Engine, EngineOptions};
use keel_models::loading::CheckpointParameters;
use keel_testkit::fixtures::demo;
use keel_testkit::intercepted::{InterceptedBackend, Interceptor};
use keel_text::TextFiles;
use keel_weights::Checkpoint;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::{Load, LoadOutput, Modalities, ModelManager, ModelManagerOptions, ServedModel};
use crate::engine::worker::{EngineHandle, NewRequest};
use crate::error::ServerError;
use crate::options::ServerOptions;
use crate::shared::Shared;
use crate::text::ServedText;

fn cpu() -> Arc<dyn Backend> {
    Arc::new(CpuBackend::new(CpuOptions::default()))
}

fn load() -> Result<LoadOutput, Box<dyn std::error::Error + Send + Sync>> {
    load_on(cpu())
}

fn load_on(backend: Arc<dyn Backend>) -> Result<LoadOutput, Box<dyn std::error::Error + Send + Sync>> {
    let checkpoint = Checkpoint::open(&demo())?;
    let runtime = Runtime::new(backend, RuntimeOptions::default());
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

/// Has `a` unloaded for a request for `b`. The engine's thread of `a` goes on while there is a handle, as it does while
/// it saves prefixes.
async fn unloading(manager: &Arc<ModelManager>) -> (EngineHandle, JoinHandle<Result<(), ServerError>>) {
    let model = manager.model_for(Some("a")).await.expect("it loads");
    let handle = model.engine.clone();
    drop(model);
    let other = {
        let manager = Arc::clone(manager);
        tokio::spawn(async move { manager.model_for(Some("b")).await.map(drop) })
    };
    while !manager.loaded().is_empty() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    (handle, other)
}

#[tokio::test]
async fn an_abort_reaches_a_model_that_is_being_unloaded() {
    let (manager, _) = two(|| ());
    let (handle, other) = unloading(&manager).await;
    assert!(!handle.is_aborted());
    manager.abort();
    assert!(handle.is_aborted());
    drop(handle);
    other.await.expect("it is answered").expect("it is loaded");
}

/// Memory that is never freed once its device is lost.
struct Held {
    memory: Box<dyn DeviceMemory>,
    is_lost: Arc<AtomicBool>,
}

impl DeviceMemory for Held {
    fn as_any(&self) -> &dyn Any {
        self.memory.as_any()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        while self.is_lost.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// A device that can be lost.
struct Losing(Arc<AtomicBool>);

impl Interceptor for Losing {
    fn launch(&self, backend: &dyn Backend, launch: &Launch<'_>) -> Result<(), ArrayError> {
        match self.0.load(Ordering::Acquire) {
            true => Err(ArrayError::DeviceLost { op: "launch".into(), reason: "injected".into() }),
            false => backend.launch(launch),
        }
    }

    fn allocate_lasting(&self, backend: &dyn Backend, bytes: usize) -> Result<Box<dyn DeviceMemory>, String> {
        let memory = backend.allocate_lasting(bytes)?;
        Ok(Box::new(Held { memory, is_lost: Arc::clone(&self.0) }))
    }
}

#[tokio::test]
async fn a_device_that_is_lost_while_its_model_is_unloaded_keeps_no_other_from_loading() {
    let is_lost = Arc::new(AtomicBool::new(false));
    let backend = InterceptedBackend::new(cpu(), Arc::new(Losing(Arc::clone(&is_lost))));
    let a: Load = Box::new(move || load_on(backend.clone()));
    let b: Load = Box::new(load);
    let manager = manager(ServerOptions::default(), None, vec![("a", a), ("b", b)]);
    let (handle, other) = unloading(&manager).await;
    is_lost.store(true, Ordering::Release);
    let requests = vec![NewRequest { request: BatchRequest::new(0, vec![1], 4), tables: None }];
    let submitted = handle.submit(requests, None, || manager.memory.meter()).await;
    let (_, mut events) = submitted.expect("it is queued").pop().expect("there is one");
    while events.recv().await.is_ok() {}
    let view = handle.view();
    drop(handle);
    other.await.expect("it is answered").expect("it is loaded");
    assert!(view.devices()[0].allocated.total() > 0, "the lost device has given nothing back");
    is_lost.store(false, Ordering::Release);
}

#[tokio::test]
async fn the_end_waits_for_a_model_that_is_being_unloaded_and_nothing_is_loaded_after_it() {
    let (manager, loads) = two(|| ());
    let (handle, other) = unloading(&manager).await;
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
