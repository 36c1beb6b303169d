use std::sync::{Arc, Mutex, mpsc};
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

fn manager(options: ServerOptions, keep_alive: Option<Duration>, load: Load) -> Arc<ModelManager> {
    let offer = ServedModel {
        id: "demo".into(),
        bytes: 1,
        tower_bytes: 0,
        context: 256,
        takes: Modalities::default(),
        load,
    };
    let bounds = ModelManagerOptions { memory_limit: 1, tower_limit: 0, keep_alive, trim_allocator: || () };
    ModelManager::of_several(Shared::new(options), vec![offer], bounds).expect("it fits")
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
    let manager = manager(ServerOptions { batch, ..ServerOptions::default() }, None, Box::new(slow));
    let Err(error) = manager.model_for(None).await else { panic!("it is not loaded yet") };
    let reply = error.reply();
    assert_eq!((reply.status.as_u16(), reply.code, reply.retry_after), (503, "model_loading", Some(5)));
    assert!(error.to_string().contains("\"demo\" is not loaded yet"), "{error}");
    drop(go_on);
    while let Err(error) = manager.model_for(None).await {
        assert!(matches!(error, crate::error::ServerError::ModelLoading { .. }), "{error}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn a_sweep_that_is_stopped_ends_after_the_model_that_it_unloads() {
    let manager = manager(ServerOptions::default(), Some(Duration::from_millis(1)), Box::new(load));
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
