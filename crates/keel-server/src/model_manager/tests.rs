use std::sync::Arc;
use std::time::Duration;

use keel_array::{Runtime, RuntimeOptions};
use keel_cpu::{CpuBackend, CpuOptions};
use keel_engine::{Engine, EngineOptions};
use keel_models::loading::CheckpointParameters;
use keel_testkit::fixtures::demo;
use keel_text::TextFiles;
use keel_weights::Checkpoint;
use tokio::sync::oneshot;

use super::{Loaded, Modalities, ModelManager, ModelManagerOptions, ServedModel};
use crate::app::Shared;
use crate::options::ServerOptions;
use crate::text::ModelText;

fn load() -> Result<Loaded, Box<dyn std::error::Error + Send + Sync>> {
    let checkpoint = Checkpoint::open(&demo())?;
    let runtime = Runtime::new(Arc::new(CpuBackend::new(CpuOptions::default())), RuntimeOptions::default());
    let options =
        EngineOptions { context: 256, sequences: 1, pool_pages: Some(8), ..EngineOptions::default() };
    let parameters = CheckpointParameters(&checkpoint);
    let engine = Engine::load(&runtime, &parameters, checkpoint.config(), options, &|_| ())?;
    Ok(Loaded { engine, text: ModelText::new(&TextFiles::read(&demo())?)?, prefix_store: None })
}

#[tokio::test]
async fn a_sweep_that_is_stopped_ends_after_the_model_that_it_unloads() {
    let offer = ServedModel {
        id: "demo".into(),
        bytes: 1,
        tower_bytes: 0,
        context: 256,
        takes: Modalities::default(),
        load: Box::new(load),
    };
    let options = ModelManagerOptions {
        memory_limit: 1,
        tower_limit: 0,
        keep_alive: Some(Duration::from_millis(1)),
        trim_allocator: || (),
    };
    let front = ModelManager::of_several(Shared::new(ServerOptions::default()), vec![offer], options);
    let front = front.expect("it fits");
    let app = front.app(None).await.expect("it loads");
    // The engine's thread goes on while there is a handle, as it does while it saves prefixes.
    let handle = app.engine.clone();
    drop(app);
    let (stop, stops) = oneshot::channel();
    let sweeping = tokio::spawn(Arc::clone(&front).sweep(stops));
    while !front.loaded().is_empty() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    drop(stop);
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert!(!sweeping.is_finished(), "the model is not unloaded yet");
    drop(handle);
    sweeping.await.expect("it ends");
    assert!(front.totals().engines.is_empty(), "nothing is being unloaded");
}
