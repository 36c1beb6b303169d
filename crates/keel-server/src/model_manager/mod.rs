//! The models of a server: which are loaded, and how they are loaded and unloaded within one memory limit.
//!
//! A request for a model that is not loaded waits until it is loaded. Models are loaded one at a time. If memory is
//! short, models that hold some of it are unloaded first, the least recently used before others. Memory is that of the
//! models' device, or that of the CPU for vision towers. A model that is being unloaded takes no new requests, and its
//! running requests end. Then its engine's thread ends, all its memory is freed, and its ledger is checked.

mod entry;
mod failures;
mod served_model;

use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use keel_engine::batch::BatchStatus;
use tokio::sync::oneshot;

use crate::engine::view::{DeviceReport, EngineView};
use crate::engine::worker::{EngineHandle, batcher};
use crate::error::{Result, ServerError, setting};
use crate::loaded_model::LoadedModel;
use crate::shared::Shared;
use crate::text::ServedText;
use entry::{Entry, Resident};
pub(crate) use failures::FREE_TIME;
use failures::Lost;
pub use served_model::{Load, LoadOutput, Modalities, ModelManagerOptions, ServedModel};
use served_model::{Needs, Shortage};

/// Facts about a model.
pub(crate) struct ModelFacts {
    pub id: String,
    pub context: usize,
    pub bytes: u64,
    pub is_loaded: bool,
    pub takes: Modalities,
}

/// The state that the handlers of all endpoints share: the models, and through them the state for one request.
pub struct ModelManager {
    shared: Arc<Shared>,
    entries: Vec<Entry>,
    options: ModelManagerOptions,
    /// Held while a model is loaded or unloaded.
    turn: tokio::sync::Mutex<()>,
    departed: Mutex<UnloadedTotals>,
    lost: Lost,
}

/// Counters of unloaded models.
#[derive(Default)]
struct UnloadedTotals {
    status: BatchStatus,
    leaks: u64,
    /// Models that are being unloaded.
    leaving: Vec<Arc<EngineView>>,
    /// Why an engine has failed for good since a model was last loaded.
    failure: Option<String>,
}

/// Counters over all models.
pub(crate) struct Totals {
    pub status: BatchStatus,
    pub leaks: u64,
    pub engines: Vec<Arc<EngineView>>,
    /// The loaded models that several devices share.
    pub split: Vec<SplitModel>,
}

/// The memory of a model that several devices share.
pub(crate) struct SplitModel {
    pub model: String,
    pub devices: Vec<DeviceReport>,
}

impl Deref for ModelManager {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.shared
    }
}

/// The other name of the first model.
const DEFAULT: &str = "default";

/// Loading may need as large a stack as the main thread has.
const STACK_BYTES: usize = 8 << 20;
/// Smallest and largest interval between checks for unused models.
const SWEEP: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(10)];

impl ModelManager {
    /// A server with one model, which is always loaded.
    pub(crate) fn of_one(
        shared: Shared,
        engine: EngineHandle,
        text: ServedText,
        thread: JoinHandle<()>,
    ) -> Arc<ModelManager> {
        let shared = Arc::new(shared);
        let id = shared.options.model_id.clone();
        let needs = Needs { bytes: engine.planned().total(), tower_bytes: 0 };
        let (context, takes) = (engine.context(), text.takes());
        let model = Arc::new(LoadedModel { shared: Arc::clone(&shared), id: id.clone(), engine, text });
        let resident = Mutex::new(Some(Resident { model, thread, used: Instant::now() }));
        let entries =
            vec![Entry { id, needs, context, takes, load: None, resident, waiting: Mutex::default() }];
        let options = ModelManagerOptions {
            memory_limit: u64::MAX,
            tower_limit: u64::MAX,
            keep_alive: None,
            trim_allocator: || (),
        };
        ModelManager::with(shared, entries, options)
    }

    /// A server with several models. None is loaded yet.
    ///
    /// # Errors
    /// There are no models, two have the same name, one that is not the first is called `default`, or one does not fit
    /// alone.
    pub(crate) fn of_several(
        shared: Shared,
        offers: Vec<ServedModel>,
        options: ModelManagerOptions,
    ) -> Result<Arc<ModelManager>> {
        if offers.is_empty() {
            return Err(setting("--model", "there is none to serve"));
        }
        for (i, ServedModel { id, bytes, tower_bytes, .. }) in offers.iter().enumerate() {
            if offers[..i].iter().any(|other| other.id == *id) {
                return Err(setting("--model", format!("two models are called {id:?}; say NAME=MODEL")));
            }
            if i > 0 && id == DEFAULT {
                let problem =
                    "requests for \"default\" go to the first model; say NAME=MODEL with another name";
                return Err(setting("--model", problem));
            }
            let needs = Needs { bytes: *bytes, tower_bytes: *tower_bytes };
            if let Some(Shortage { of, whose, limit }) = needs.beyond(&options) {
                let bytes = of(needs);
                return Err(setting(
                    "--model",
                    format!("{id:?} holds {bytes} bytes{whose}, and the limit for all is {limit}"),
                ));
            }
        }
        let entry = |ServedModel { id, bytes, tower_bytes, context, takes, load }| Entry {
            takes,
            id,
            needs: Needs { bytes, tower_bytes },
            context,
            load: Some(load),
            resident: Mutex::new(None),
            waiting: Mutex::default(),
        };
        Ok(ModelManager::with(Arc::new(shared), offers.into_iter().map(entry).collect(), options))
    }

    fn with(shared: Arc<Shared>, entries: Vec<Entry>, options: ModelManagerOptions) -> Arc<ModelManager> {
        let (turn, departed) = (tokio::sync::Mutex::new(()), Mutex::default());
        Arc::new(ModelManager { shared, entries, options, turn, departed, lost: Lost::default() })
    }

    /// Returns the model that a request names, or the first model if it names none. Loads it if necessary.
    ///
    /// # Errors
    /// [`ServerError::UnknownModel`]; [`ServerError::ModelLoad`]; [`ServerError::ModelLoading`] if it is not loaded
    /// within the time of the queue.
    pub(crate) async fn model_for(self: &Arc<Self>, asked: Option<&str>) -> Result<Arc<LoadedModel>> {
        let at = self.find(asked)?;
        if let Some(model) = self.entries[at].use_now() {
            return Ok(model);
        }
        self.refuse_if_draining()?;
        let entry = &self.entries[at];
        let (waiter, outcome) = oneshot::channel();
        if entry.wait(waiter) {
            tokio::spawn(Arc::clone(self).bring(at));
        }
        let wait = self.shared.options.batch.queue_timeout;
        match tokio::time::timeout(wait, outcome).await {
            // A waiter is lost only at the end of the runtime.
            Ok(outcome) => outcome.unwrap_or(Err(ServerError::Draining)),
            Err(_) => Err(ServerError::ModelLoading { id: entry.id.clone(), seconds: wait.as_secs_f64() }),
        }
    }

    /// Finds a model by name. An unknown name is an error.
    pub(crate) fn find(&self, asked: Option<&str>) -> Result<usize> {
        let Some(asked) = asked.filter(|asked| !asked.is_empty() && *asked != DEFAULT) else {
            return Ok(0);
        };
        let found = self.entries.iter().position(|entry| entry.id == asked);
        found.ok_or_else(|| {
            let names: Vec<String> = self.entries.iter().map(|entry| format!("{:?}", entry.id)).collect();
            let verb = if names.len() == 1 { "is" } else { "are" };
            let served = format!("{} {verb}", names.join(", "));
            ServerError::UnknownModel { asked: asked.into(), served }
        })
    }

    /// Facts about a model.
    pub(crate) fn facts(&self, at: usize) -> ModelFacts {
        let Entry { id, context, needs, takes, .. } = &self.entries[at];
        let is_loaded = self.entries[at].resident().is_some();
        ModelFacts { id: id.clone(), context: *context, bytes: needs.bytes, is_loaded, takes: *takes }
    }

    /// Facts about every model.
    pub(crate) fn all_facts(&self) -> Vec<ModelFacts> {
        (0..self.entries.len()).map(|at| self.facts(at)).collect()
    }

    /// The loaded models, most recently used first.
    pub(crate) fn loaded(&self) -> Vec<Arc<LoadedModel>> {
        let mut all: Vec<(Instant, Arc<LoadedModel>)> = Vec::new();
        for entry in &self.entries {
            all.extend(
                entry.resident().as_ref().map(|resident| (resident.used, Arc::clone(&resident.model))),
            );
        }
        all.sort_by_key(|(used, _)| std::cmp::Reverse(*used));
        all.into_iter().map(|(_, model)| model).collect()
    }

    /// Counters over loaded and unloaded models.
    pub(crate) fn totals(&self) -> Totals {
        let departed = self.departed();
        let mut engines = departed.leaving.clone();
        let mut split = Vec::new();
        for entry in &self.entries {
            let Some(engine) = entry.resident().as_ref().map(|resident| resident.model.engine.view()) else {
                continue;
            };
            let devices = engine.devices();
            if devices.len() > 1 {
                split.push(SplitModel { model: entry.id.clone(), devices });
            }
            engines.push(engine);
        }
        let mut totals = Totals { status: departed.status.clone(), leaks: departed.leaks, engines, split };
        drop(departed);
        for engine in &totals.engines {
            totals.status.add(&engine.status());
            totals.leaks += engine.leaks();
        }
        totals
    }

    fn departed(&self) -> MutexGuard<'_, UnloadedTotals> {
        self.departed.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Brings a model for all requests that wait for it, and answers them. Each entry has at most one such task. It
    /// does nothing if all of the requests have left before its turn. A load that has begun goes on.
    async fn bring(self: Arc<Self>, at: usize) {
        let _turn = self.turn.lock().await;
        let entry = &self.entries[at];
        if !entry.is_wanted() {
            return;
        }
        let manager = Arc::clone(&self);
        // It is a task of its own, so that a panic in it is an answer, too.
        let outcome = tokio::spawn(async move { manager.load_in_turn(at).await }).await;
        entry.answer(outcome.unwrap_or_else(|error| Err(std::io::Error::other(error).into())));
    }

    /// Loads a model, after unloading others if necessary. The caller has the turn.
    async fn load_in_turn(self: Arc<Self>, at: usize) -> Result<Arc<LoadedModel>> {
        let entry = &self.entries[at];
        if let Some(model) = entry.use_now() {
            return Ok(model);
        }
        self.refuse_if_draining()?;
        // A model whose engine has failed is unloaded like any other.
        self.give_back(at).await;
        while let Some(shortage) = self.held().plus(entry.needs).beyond(&self.options) {
            let Some(oldest) = self.least_recent(&shortage) else { break };
            self.give_back(oldest).await;
        }
        self.refuse_if_draining()?;
        let (done, loaded) = oneshot::channel();
        let manager = Arc::clone(&self);
        let load = move || drop(done.send(manager.load(at)));
        std::thread::Builder::new().name("keel-load".into()).stack_size(STACK_BYTES).spawn(load)?;
        let loaded = loaded.await.map_err(|_| std::io::Error::other("its thread ended").into()).flatten();
        self.note_load(loaded.is_ok());
        loaded
    }

    fn refuse_if_draining(&self) -> Result<()> {
        if self.is_draining() { Err(ServerError::Draining) } else { Ok(()) }
    }

    fn load(&self, at: usize) -> Result<Arc<LoadedModel>> {
        let entry = &self.entries[at];
        let Some(load) = &entry.load else { return Err(ServerError::EngineStopped) };
        let start = Instant::now();
        let LoadOutput { mut engine, text, prefix_store } = load().map_err(std::io::Error::other)?;
        if !engine.is_ready() {
            engine.make_ready(&mut |_, _, _| ())?;
        }
        let batch = batcher(engine, self.shared.options.batch);
        let (engine, thread) = EngineHandle::start(batch, prefix_store)?;
        let seconds = start.elapsed().as_secs_f64();
        tracing::info!(model = entry.id, bytes = engine.planned().total(), seconds, "loaded");
        let model =
            Arc::new(LoadedModel { shared: Arc::clone(&self.shared), id: entry.id.clone(), engine, text });
        let resident = Resident { model: Arc::clone(&model), thread, used: Instant::now() };
        *entry.resident() = Some(resident);
        Ok(model)
    }

    /// Bytes of the loaded models.
    fn held(&self) -> Needs {
        let loaded = self.entries.iter().filter(|entry| entry.resident().is_some());
        loaded.map(|entry| entry.needs).fold(Needs::default(), Needs::plus)
    }

    /// The least recently used model among those that hold some of the memory that is short. Models whose engine has
    /// failed come first, and idle ones before busy ones.
    fn least_recent(&self, shortage: &Shortage) -> Option<usize> {
        let age = |at: &usize| {
            let resident = self.entries[*at].resident();
            resident.as_ref().map(|r| (!r.model.engine.is_stopped(), r.is_busy(), r.used))
        };
        let would_help = |at: &usize| (shortage.of)(self.entries[*at].needs) > 0;
        (0..self.entries.len()).filter(|at| would_help(at) && age(at).is_some()).min_by_key(age)
    }

    /// Unloads a model: waits until its requests have ended and its memory is freed.
    async fn give_back(&self, at: usize) {
        let entry = &self.entries[at];
        let (model, thread, view) = {
            let mut departed = self.departed();
            let Some(Resident { model, thread, .. }) = entry.resident().take() else { return };
            let view = model.engine.view();
            departed.leaving.push(view.clone());
            (model, thread, view)
        };
        model.engine.save_prefixes();
        // The thread ends when no request holds the model any more.
        drop(model);
        let (done, ended) = oneshot::channel();
        let join = move || drop(done.send(thread.join()));
        if std::thread::Builder::new().name("keel-unload".into()).spawn(join).is_ok() {
            // A device that is lost may never let go.
            let stuck = async {
                view.stopped().await;
                match view.failure() {
                    Some(_) => tokio::time::sleep(FREE_TIME).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                _ = ended => {}
                () = stuck => {
                    tracing::error!(model = entry.id, "its lost device has given nothing back for {FREE_TIME:?}");
                }
            }
        }
        {
            let mut departed = self.departed();
            departed.leaving.retain(|leaving| !Arc::ptr_eq(leaving, &view));
            departed.status.add(&view.status());
            departed.status.forget_gauges();
            departed.leaks += view.leaks();
            departed.failure = view.failure().map(String::from).or(departed.failure.take());
        }
        // The thread has freed the engine. Views and requests that end just now hold none of it.
        let left: u64 = view.devices().iter().map(|device| device.allocated.total()).sum();
        if left > 0 && view.failure().is_none() {
            self.departed().leaks += 1;
            tracing::error!(
                "a bug in keel, please report it: {:?} was given back and {left} bytes of it are left",
                entry.id
            );
        }
        (self.options.trim_allocator)();
        tracing::info!(model = entry.id, bytes = entry.needs.bytes, "given back");
    }

    /// Unloads models that were unused for the time of `keep_alive`, until the sender of `stops` is dropped. It is not
    /// aborted, so that a model that is being unloaded then has saved its prefixes at the end.
    pub(crate) async fn sweep(self: Arc<Self>, mut stops: oneshot::Receiver<()>) {
        let Some(keep_alive) = self.options.keep_alive else { return };
        loop {
            let turn = async {
                tokio::time::sleep((keep_alive / 4).clamp(SWEEP[0], SWEEP[1])).await;
                self.turn.lock().await
            };
            let _turn = tokio::select! {
                _ = &mut stops => return,
                turn = turn => turn,
            };
            for (at, entry) in self.entries.iter().enumerate() {
                if entry.load.is_some() && entry.has_rested(keep_alive) {
                    self.give_back(at).await;
                }
            }
        }
    }

    /// Ends all running and waiting requests of all models, also of those that are being unloaded.
    pub(crate) fn abort(&self) {
        self.loaded().iter().for_each(|model| model.engine.abort());
        self.departed().leaving.iter().for_each(|engine| engine.abort());
    }

    /// Refuses new requests from now on; running requests continue. Remembered prefixes are saved as soon as nothing
    /// runs, because the process may be killed before it ends.
    pub(crate) fn drain(&self) {
        self.shared.start_draining();
        self.loaded().iter().for_each(|model| model.engine.save_prefixes());
    }

    /// The threads of the engines, and whether each engine has failed. The threads end when no other code holds the
    /// engines. Waits for a model that is being loaded or unloaded now; no other is loaded after that.
    pub(crate) async fn close(&self) -> Vec<(JoinHandle<()>, bool)> {
        self.shared.start_draining();
        let _turn = self.turn.lock().await;
        let thread = |Resident { model, thread, .. }: Resident| {
            (thread, model.engine.is_stopped() || model.engine.failure().is_some())
        };
        self.entries.iter().filter_map(|entry| entry.resident().take().map(thread)).collect()
    }
}

#[cfg(test)]
mod tests;
