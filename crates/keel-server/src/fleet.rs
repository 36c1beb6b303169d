//! The models of a server: which are loaded, and how they come and go within one limit.
//!
//! A request for a model that is not loaded waits until it is. Loads happen one at a time. Where memory is short, the model that was used
//! least recently is given back first: it takes no new requests, those that run end, and then its engine's thread and all its
//! memory are gone, which its ledger proves.

use std::error::Error;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use keel_engine::batch::{BatchStatus, Batcher};
use keel_engine::{Engine, EngineError};
use tokio::sync::oneshot;

use crate::app::{App, Shared};
use crate::error::{Result, ServerError, setting};
use crate::options::PrefixStore;
use crate::text::ModelText;
use crate::worker::{EngineHandle, EngineView};

/// What the loading of a model gives.
pub struct Loaded {
    /// The engine.
    pub engine: Engine,
    /// The text side.
    pub text: ModelText,
    /// Where its prefixes are restored from and saved to.
    pub prefix_store: Option<PrefixStore>,
}

/// Loads a model, on a thread of its own.
pub type Load = Box<dyn Fn() -> Result<Loaded, Box<dyn Error + Send + Sync>> + Send + Sync>;

/// A model that can be asked for.
pub struct Offer {
    /// Its name in the API.
    pub id: String,
    /// Bytes that it holds while it is loaded, as planned.
    pub bytes: u64,
    /// Tokens of its longest sequence.
    pub context: usize,
    /// Loads it.
    pub load: Load,
}

/// Bounds of a server with several models.
#[derive(Clone, Copy, Debug)]
pub struct FleetOptions {
    /// Bytes that the loaded models may hold together.
    pub memory_limit: u64,
    /// How long a model stays loaded that nobody uses; `None` is until another needs its memory.
    pub keep_alive: Option<Duration>,
    /// Has the allocator give back what a model left with it.
    pub rest: fn(),
}

/// A model of the server.
struct Entry {
    id: String,
    bytes: u64,
    context: usize,
    /// `None` where the model is always loaded.
    load: Option<Load>,
    resident: Mutex<Option<Resident>>,
}

/// A loaded model.
struct Resident {
    app: Arc<App>,
    thread: JoinHandle<()>,
    used: Instant,
}

/// What is said about a model.
pub(crate) struct ModelFacts {
    pub id: String,
    pub context: usize,
    pub bytes: u64,
    pub is_loaded: bool,
}

/// What the handlers of all endpoints share: the models, and through them what one request needs.
pub struct Front {
    shared: Arc<Shared>,
    entries: Vec<Entry>,
    options: FleetOptions,
    /// Whoever loads a model or gives one back has the turn.
    turn: tokio::sync::Mutex<()>,
    departed: Mutex<Departed>,
}

/// What models that were given back have counted.
#[derive(Default)]
struct Departed {
    status: BatchStatus,
    losses: u64,
    /// Those on their way.
    leaving: Vec<EngineView>,
}

/// Counts over all models.
pub(crate) struct Totals {
    pub status: BatchStatus,
    pub losses: u64,
    pub engines: Vec<EngineView>,
}

impl Deref for Front {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.shared
    }
}

/// A load may need the stack that a main thread has.
const STACK_BYTES: usize = 8 << 20;
/// How often it is looked whether a model may go, at most and at least.
const SWEEP: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(10)];

impl Front {
    /// A server of one model, which is always loaded.
    pub(crate) fn of_one(
        shared: Shared,
        engine: EngineHandle,
        text: ModelText,
        thread: JoinHandle<()>,
    ) -> Arc<Front> {
        let shared = Arc::new(shared);
        let id = shared.options.model_id.clone();
        let (bytes, context) = (engine.planned().total(), engine.context());
        let app = Arc::new(App { shared: Arc::clone(&shared), id: id.clone(), engine, text });
        let resident = Mutex::new(Some(Resident { app, thread, used: Instant::now() }));
        let entries = vec![Entry { id, bytes, context, load: None, resident }];
        Front::with(shared, entries, FleetOptions { memory_limit: u64::MAX, keep_alive: None, rest: || () })
    }

    /// A server of several models, of which none is loaded yet.
    ///
    /// # Errors
    /// If there is none, two have one name, or one does not fit by itself.
    pub(crate) fn of_several(
        shared: Shared,
        offers: Vec<Offer>,
        options: FleetOptions,
    ) -> Result<Arc<Front>> {
        if offers.is_empty() {
            return Err(setting("--model", "there is none to serve"));
        }
        for (i, Offer { id, bytes, .. }) in offers.iter().enumerate() {
            if offers[..i].iter().any(|other| other.id == *id) {
                return Err(setting("--model", format!("two models are called {id:?}; say NAME=MODEL")));
            }
            if *bytes > options.memory_limit {
                let limit = options.memory_limit;
                return Err(setting(
                    "--model",
                    format!("{id:?} holds {bytes} bytes, and the limit for all is {limit}"),
                ));
            }
        }
        let entry = |Offer { id, bytes, context, load }| Entry {
            id,
            bytes,
            context,
            load: Some(load),
            resident: Mutex::new(None),
        };
        Ok(Front::with(Arc::new(shared), offers.into_iter().map(entry).collect(), options))
    }

    fn with(shared: Arc<Shared>, entries: Vec<Entry>, options: FleetOptions) -> Arc<Front> {
        let (turn, departed) = (tokio::sync::Mutex::new(()), Mutex::default());
        Arc::new(Front { shared, entries, options, turn, departed })
    }

    /// The model that a request names; the first if it names none. It is loaded if it is not.
    ///
    /// # Errors
    /// [`ServerError::UnknownModel`]; [`ServerError::ModelLoad`]; if memory does not become free in time.
    pub(crate) async fn app(self: &Arc<Self>, asked: Option<&str>) -> Result<Arc<App>> {
        let at = self.find(asked)?;
        if let Some(app) = self.entries[at].use_now() {
            return Ok(app);
        }
        if self.is_draining() {
            return Err(ServerError::Draining);
        }
        // Goes on when the client leaves: others may wait for it, too.
        let front = Arc::clone(self);
        let loading = tokio::spawn(async move { front.bring(at).await });
        let wait = self.shared.options.batch.queue_timeout;
        match tokio::time::timeout(wait, loading).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(error)) => Err(self.entries[at].failed(error.to_string())),
            Err(_) => Err(EngineError::QueueTimeout { seconds: wait.as_secs_f64() }.into()),
        }
    }

    /// Refuses a name that is none of the models'.
    pub(crate) fn find(&self, asked: Option<&str>) -> Result<usize> {
        let Some(asked) = asked.filter(|asked| !asked.is_empty() && *asked != "default") else {
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

    /// What is said about a model.
    pub(crate) fn facts(&self, at: usize) -> ModelFacts {
        let Entry { id, context, bytes, .. } = &self.entries[at];
        let is_loaded = self.entries[at].resident().is_some();
        ModelFacts { id: id.clone(), context: *context, bytes: *bytes, is_loaded }
    }

    /// The same about each.
    pub(crate) fn all_facts(&self) -> Vec<ModelFacts> {
        (0..self.entries.len()).map(|at| self.facts(at)).collect()
    }

    /// The models that are loaded, the one used last first.
    pub(crate) fn loaded(&self) -> Vec<Arc<App>> {
        let mut all: Vec<(Instant, Arc<App>)> = Vec::new();
        for entry in &self.entries {
            all.extend(entry.resident().as_ref().map(|resident| (resident.used, Arc::clone(&resident.app))));
        }
        all.sort_by_key(|(used, _)| std::cmp::Reverse(*used));
        all.into_iter().map(|(_, app)| app).collect()
    }

    /// Counts over the models that are loaded and those that were.
    pub(crate) fn totals(&self) -> Totals {
        let departed = self.departed();
        let mut engines = departed.leaving.clone();
        engines.extend(
            self.entries.iter().filter_map(|entry| Some(entry.resident().as_ref()?.app.engine.view())),
        );
        let mut totals = Totals { status: departed.status.clone(), losses: departed.losses, engines };
        drop(departed);
        for engine in &totals.engines {
            totals.status.add(&engine.status());
            totals.losses += engine.losses();
        }
        totals
    }

    fn departed(&self) -> MutexGuard<'_, Departed> {
        self.departed.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Loads a model, once those that must go are gone.
    async fn bring(self: Arc<Self>, at: usize) -> Result<Arc<App>> {
        let _turn = self.turn.lock().await;
        let entry = &self.entries[at];
        if let Some(app) = entry.use_now() {
            return Ok(app);
        }
        // One whose engine has failed goes like any other.
        self.give_back(at).await;
        while self.held() + entry.bytes > self.options.memory_limit {
            let Some(oldest) = self.least_recent() else { break };
            self.give_back(oldest).await;
        }
        let (done, loaded) = oneshot::channel();
        let front = Arc::clone(&self);
        let load = move || drop(done.send(front.load(at)));
        std::thread::Builder::new().name("keel-load".into()).stack_size(STACK_BYTES).spawn(load)?;
        loaded.await.map_err(|_| entry.failed("its thread ended".into()))?
    }

    fn load(&self, at: usize) -> Result<Arc<App>> {
        let entry = &self.entries[at];
        let Some(load) = &entry.load else { return Err(ServerError::EngineStopped) };
        let start = Instant::now();
        let Loaded { mut engine, text, prefix_store } =
            load().map_err(|error| entry.failed(error.to_string()))?;
        if !engine.is_ready() {
            engine.make_ready(&mut |_, _, _| ())?;
        }
        let batcher = Batcher::new(engine, self.shared.options.batch);
        let (engine, thread) = EngineHandle::start(batcher, prefix_store)?;
        let seconds = start.elapsed().as_secs_f64();
        tracing::info!(model = entry.id, bytes = engine.planned().total(), seconds, "loaded");
        let app = Arc::new(App { shared: Arc::clone(&self.shared), id: entry.id.clone(), engine, text });
        let resident = Resident { app: Arc::clone(&app), thread, used: Instant::now() };
        *entry.resident() = Some(resident);
        Ok(app)
    }

    /// Bytes that the loaded models hold.
    fn held(&self) -> u64 {
        self.entries.iter().filter(|entry| entry.resident().is_some()).map(|entry| entry.bytes).sum()
    }

    /// The loaded model that was used least recently; one without work before others.
    fn least_recent(&self) -> Option<usize> {
        let age = |at: &usize| {
            self.entries[*at].resident().as_ref().map(|resident| (resident.is_busy(), resident.used))
        };
        (0..self.entries.len()).filter(|at| age(at).is_some()).min_by_key(age)
    }

    /// Takes a model away and waits until what runs on it has ended and its memory is free.
    async fn give_back(&self, at: usize) {
        let entry = &self.entries[at];
        let (app, thread, view) = {
            let mut departed = self.departed();
            let Some(Resident { app, thread, .. }) = entry.resident().take() else { return };
            let view = app.engine.view();
            departed.leaving.push(view.clone());
            (app, thread, view)
        };
        app.engine.save_prefixes();
        // The thread ends when no request holds the model any more.
        drop(app);
        let (done, ended) = oneshot::channel();
        let join = move || drop(done.send(thread.join()));
        if std::thread::Builder::new().name("keel-unload".into()).spawn(join).is_ok() {
            let _ = ended.await;
        }
        let ledger = view.ledger().clone();
        {
            let mut departed = self.departed();
            departed.leaving.retain(|leaving| !leaving.is_of(&view));
            departed.status.add(&view.status());
            departed.status.forget_gauges();
            departed.losses += view.losses();
        }
        drop(view);
        let left = ledger.active().total();
        if left > 0 {
            self.departed().losses += 1;
            tracing::error!(
                "a bug in keel, please report it: {:?} was given back and {left} bytes of it are left",
                entry.id
            );
        }
        (self.options.rest)();
        tracing::info!(model = entry.id, bytes = entry.bytes, "given back");
    }

    /// Gives back what nobody has used for as long as models are kept, again and again.
    pub(crate) async fn sweep(self: Arc<Self>) {
        let Some(keep_alive) = self.options.keep_alive else { return };
        loop {
            tokio::time::sleep((keep_alive / 4).clamp(SWEEP[0], SWEEP[1])).await;
            let _turn = self.turn.lock().await;
            for (at, entry) in self.entries.iter().enumerate() {
                if entry.load.is_some() && entry.has_rested(keep_alive) {
                    self.give_back(at).await;
                }
            }
        }
    }

    /// Whether an engine that cannot be loaded anew has failed.
    pub(crate) fn has_failed(&self) -> bool {
        let failed = |entry: &Entry| entry.resident().as_ref().is_some_and(|r| r.app.engine.is_stopped());
        self.entries.iter().any(|entry| entry.load.is_none() && failed(entry))
    }

    /// Ends everything that runs or waits, on all models.
    pub(crate) fn abort(&self) {
        self.loaded().iter().for_each(|app| app.engine.abort());
    }

    /// From now on requests are refused; those that run go on. What is remembered is saved as soon as nothing runs: whoever
    /// asked for the end may lose patience.
    pub(crate) fn drain(&self) {
        self.shared.start_draining();
        self.loaded().iter().for_each(|app| app.engine.save_prefixes());
    }

    /// The threads of the engines, which end when nobody else holds one.
    pub(crate) fn close(&self) -> Vec<JoinHandle<()>> {
        self.entries.iter().filter_map(|entry| Some(entry.resident().take()?.thread)).collect()
    }
}

impl Entry {
    fn resident(&self) -> MutexGuard<'_, Option<Resident>> {
        self.resident.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The model, if it is loaded and runs: one that is always loaded counts even if its engine has failed, and says so.
    fn use_now(&self) -> Option<Arc<App>> {
        let mut resident = self.resident();
        let resident = resident.as_mut().filter(|r| self.load.is_none() || !r.app.engine.is_stopped())?;
        resident.used = Instant::now();
        Some(Arc::clone(&resident.app))
    }

    /// Whether nobody has used it for so long.
    fn has_rested(&self, keep_alive: Duration) -> bool {
        let mut resident = self.resident();
        let Some(resident) = resident.as_mut() else { return false };
        if resident.is_busy() {
            resident.used = Instant::now();
        }
        resident.used.elapsed() >= keep_alive
    }

    fn failed(&self, reason: String) -> ServerError {
        ServerError::ModelLoad { id: self.id.clone(), reason }
    }
}

impl Resident {
    fn is_busy(&self) -> bool {
        let status = self.app.engine.status();
        // Besides this one, only requests hold the model.
        Arc::strong_count(&self.app) > 1 || !status.running.is_empty() || status.waiting > 0
    }
}
