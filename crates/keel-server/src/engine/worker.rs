//! The thread that owns the engine, and the handle through which requests reach it.
//!
//! A request is a channel. The worker sends the request's events, and treats a dropped receiver as cancellation. So
//! when a client is gone for any reason, its sequence ends within one step.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use keel_engine::batch::{BatchEvent, BatchOptions, BatchRequest, Batcher, SequenceEvent, SequenceId};
use keel_engine::{Engine, EngineError};
use tokio::sync::{mpsc, oneshot};
use tracing::field::Empty;

use crate::engine::grammar::Tables;
use crate::engine::view::EngineView;
use crate::error::{Result, ServerError};
use crate::events::{Events, Listener, Patience};
use crate::memory::requests::Meter;
use crate::options::PrefixStore;

/// Largest number of commands that wait for the worker. More are refused. The queue of requests is part of the batch.
const INBOX: usize = 1024;

type Accepted = oneshot::Sender<Result<(), EngineError>>;

enum Command {
    Submit {
        requests: Vec<BatchRequest>,
        listeners: HashMap<SequenceId, Listener>,
        accepted: Accepted,
    },
    /// Only of tests.
    ForgetPrefixes(oneshot::Sender<()>),
    /// The server is shutting down: prefixes are saved as soon as nothing runs.
    SavePrefixes,
}

/// A request, and the charge of its grammar, if it has one.
pub(crate) struct NewRequest {
    pub request: BatchRequest,
    pub tables: Option<Tables>,
}

/// A batch without a limit on the time in its queue. The worker limits it, because it knows which answers and texts
/// belong together.
pub(crate) fn batcher(engine: Engine, options: BatchOptions) -> Batcher {
    Batcher::new(engine, BatchOptions { queue_timeout: Duration::MAX, ..options })
}

/// Reaches the engine's thread from any task. Clones reach the same thread. It ends when the last handle is dropped.
#[derive(Clone)]
pub struct EngineHandle {
    inbox: SyncSender<Command>,
    view: Arc<EngineView>,
}

impl EngineHandle {
    /// Restores remembered prefixes from the store and starts the thread, which saves them again when it ends.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn start(mut batcher: Batcher, store: Option<PrefixStore>) -> Result<(EngineHandle, JoinHandle<()>)> {
        if let Some(store) = &store {
            let restored = batcher.restore_prefixes(&store.model, &store.folder);
            tracing::info!("{} texts are remembered from {}", restored.texts, store.folder.display());
            restored.problems.iter().for_each(|problem| tracing::warn!("not remembered: {problem}"));
        }
        let (handle, worker) = EngineHandle::of(batcher, store);
        let thread = std::thread::Builder::new().name("keel-engine".into()).spawn(move || worker.run())?;
        Ok((handle, thread))
    }

    /// A handle, and the worker that its commands reach.
    fn of(batcher: Batcher, store: Option<PrefixStore>) -> (EngineHandle, Worker) {
        let (inbox, commands) = sync_channel(INBOX);
        let view = Arc::new(EngineView::new(&batcher));
        let worker = Worker {
            batcher,
            commands,
            live: HashMap::new(),
            view: Arc::clone(&view),
            store,
            steps: 0,
            saved_at: None,
            saves_when_idle: false,
            checked_at: None,
        };
        (EngineHandle { inbox, view }, worker)
    }

    /// A view that does not keep the thread alive.
    pub(crate) fn view(&self) -> Arc<EngineView> {
        Arc::clone(&self.view)
    }

    /// Adds requests to the batch's queue before the same step, all or none, and assigns their ids. `meter` makes the
    /// meter of each. The first of them fails if it waits longer than `wait_max`. The others may wait for it.
    ///
    /// # Errors
    /// Errors of [`Batcher::submit`]; [`ServerError::Busy`]; [`ServerError::EngineStopped`].
    pub(crate) async fn submit(
        &self,
        requests: Vec<NewRequest>,
        wait_max: Option<Duration>,
        meter: impl Fn() -> Meter,
    ) -> Result<Vec<(SequenceId, Events)>> {
        let mut listed = Vec::with_capacity(requests.len());
        let mut listeners = HashMap::with_capacity(requests.len());
        let mut all = Vec::with_capacity(requests.len());
        let mut patience = wait_max.map(|limit| Patience { since: Instant::now(), limit });
        for NewRequest { mut request, tables } in requests {
            request.id = self.view.next_id.fetch_add(1, Ordering::Relaxed);
            // The channel needs no bound of its own: tokens that wait are charged, and prompt chunks bound the other
            // events.
            let (sender, receiver) = mpsc::unbounded_channel();
            let meter = Arc::new(meter());
            all.push((request.id, Events { receiver, meter: Arc::clone(&meter) }));
            listeners.insert(request.id, Listener { sender, meter, tables, patience: patience.take() });
            listed.push(request);
        }
        let (accepted, answer) = oneshot::channel();
        self.send(Command::Submit { requests: listed, listeners, accepted })?;
        answer.await.map_err(|_| ServerError::EngineStopped)??;
        Ok(all)
    }

    /// Forgets remembered prefixes. For tests, which then find all memory free: a server keeps prefixes until their
    /// memory is needed.
    ///
    /// # Errors
    /// [`ServerError::Busy`], [`ServerError::EngineStopped`].
    #[doc(hidden)]
    pub async fn forget_prefixes(&self) -> Result<()> {
        let (done, answer) = oneshot::channel();
        self.send(Command::ForgetPrefixes(done))?;
        answer.await.map_err(|_| ServerError::EngineStopped)
    }

    /// Saves prefixes as soon as nothing runs: saving takes time, which answers under way do not have. Those of later
    /// requests are saved when the thread ends.
    pub(crate) fn save_prefixes(&self) {
        // If the inbox is full, prefixes are saved when the thread ends.
        let _ = self.send(Command::SavePrefixes);
    }

    fn send(&self, command: Command) -> Result<()> {
        self.inbox.try_send(command).map_err(|error| match error {
            TrySendError::Full(_) => ServerError::Busy,
            TrySendError::Disconnected(_) => ServerError::EngineStopped,
        })
    }
}

impl Deref for EngineHandle {
    type Target = EngineView;

    fn deref(&self) -> &EngineView {
        &self.view
    }
}

struct Worker {
    // Dropped before the batcher: clients are told before the engine is freed, which may take long on a lost device.
    commands: Receiver<Command>,
    live: HashMap<SequenceId, Listener>,
    batcher: Batcher,
    view: Arc<EngineView>,
    store: Option<PrefixStore>,
    /// Number of steps so far.
    steps: u64,
    /// Value of `steps` at the last save.
    saved_at: Option<u64>,
    saves_when_idle: bool,
    /// Value of `steps` at the last check at idle.
    checked_at: Option<u64>,
}

/// Why a step has lost a device: the failure of the step among its events. Others are of single requests.
fn failure_of(events: &[SequenceEvent]) -> String {
    let failure = events.iter().find_map(|of| match &of.event {
        BatchEvent::Failed(EngineError::Step(reason)) => Some(reason.clone()),
        BatchEvent::Failed(error) if error.is_device_lost() => Some(error.to_string()),
        _ => None,
    });
    failure.unwrap_or_else(|| "a device is lost".into())
}

/// Whether a request goes on. If its client has left, it is cancelled. A client may leave at any moment, so that is
/// asked once: a request that is no longer listed can never be cancelled.
fn goes_on(mut is_closed: impl FnMut() -> bool, cancel: impl FnOnce()) -> bool {
    let has_left = is_closed();
    if has_left {
        cancel();
    }
    !has_left
}

/// Records that the thread has ended for any reason.
struct StopNote(Arc<EngineView>);

impl Drop for StopNote {
    fn drop(&mut self) {
        self.0.note_stop();
    }
}

impl Worker {
    fn run(mut self) {
        let _note = StopNote(Arc::clone(&self.view));
        while self.take_commands() {
            self.end_impatient(Instant::now());
            if self.view.is_aborted() {
                self.batcher.cancel_all();
                for (_, events) in self.live.drain() {
                    events.send(Err(ServerError::Draining));
                }
            }
            if !self.step() {
                let reason = self.view.failure().unwrap_or("a device is lost");
                tracing::error!("the engine stops for good: {reason}");
                return;
            }
        }
        self.save();
    }

    /// Makes a step. Returns false if no later one can succeed.
    fn step(&mut self) -> bool {
        self.steps += 1;
        let span = tracing::debug_span!(
            "step",
            number = self.steps,
            tokens = Empty,
            running = Empty,
            waiting = Empty,
            parked = Empty
        );
        let _in_span = span.enter();
        let events = self.batcher.step(Instant::now());
        let status = self.batcher.status();
        span.record("tokens", events.iter().filter(|e| matches!(e.event, BatchEvent::Token { .. })).count());
        span.record("running", status.running.len());
        span.record("waiting", status.waiting);
        span.record("parked", status.parking.parked);
        let can_go_on = !status.is_device_lost;
        if !can_go_on {
            self.view.note_failure(failure_of(&events));
        }
        for SequenceEvent { id, event } in events {
            self.deliver(id, event);
        }
        self.view.set_status(status);
        can_go_on
    }

    /// When nothing runs, every page must be free or remembered, and the ledgers must read the same as at the start.
    fn check_idle(&mut self) {
        if self.checked_at == Some(self.steps) {
            return;
        }
        self.checked_at = Some(self.steps);
        let status = self.batcher.status();
        let held = status.free_pages + status.idle_prefix_pages;
        if held == status.pages && status.idle_prefix_pages == status.prefix_pages && self.view.is_level() {
            return;
        }
        self.view.leaks.fetch_add(1, Ordering::AcqRel);
        tracing::error!(
            "a bug in keel, please report it: nothing runs, but of {} pages {} are free and {} remembered ({} of them by nobody \
             else), and {} bytes are allocated of {} planned",
            status.pages,
            status.free_pages,
            status.prefix_pages,
            status.idle_prefix_pages,
            self.view.devices().iter().map(|device| device.allocated.total()).sum::<u64>(),
            self.view.planned().total(),
        );
    }

    /// Saves remembered prefixes for the next server.
    fn save(&mut self) {
        let Some(store) = self.store.as_ref().filter(|_| self.saved_at != Some(self.steps)) else { return };
        self.saved_at = Some(self.steps);
        match self.batcher.save_prefixes(&store.model, &store.folder) {
            Ok(texts) => tracing::info!("{texts} texts are saved to {}", store.folder.display()),
            Err(error) => tracing::warn!("{error}"),
        }
    }

    /// Ends abandoned requests, and takes the waiting commands. If nothing runs, waits for a command. Returns false if
    /// no command can come any more.
    fn take_commands(&mut self) -> bool {
        if self.batcher.is_idle() {
            self.check_idle();
            if std::mem::take(&mut self.saves_when_idle) {
                self.save();
            }
            match self.commands.recv() {
                Ok(command) => self.obey(command),
                Err(_) => return false,
            }
        } else {
            // It comes first, because new requests need their places in the queue.
            self.end_abandoned();
        }
        while let Ok(command) = self.commands.try_recv() {
            self.obey(command);
        }
        true
    }

    fn obey(&mut self, command: Command) {
        match command {
            // The clients have left. The receivers of the events are gone, too.
            Command::Submit { accepted, .. } if accepted.is_closed() => {}
            Command::Submit { requests, listeners, accepted } => {
                let _ = accepted.send(self.submit(requests, listeners));
            }
            Command::SavePrefixes => self.saves_when_idle = true,
            Command::ForgetPrefixes(done) => {
                self.batcher.forget_prefixes();
                self.saved_at = None;
                let _ = done.send(());
            }
        }
    }

    /// Adds all requests to the queue, or none.
    fn submit(
        &mut self,
        requests: Vec<BatchRequest>,
        listeners: HashMap<SequenceId, Listener>,
    ) -> Result<(), EngineError> {
        self.batcher.submit_together(requests, Instant::now())?;
        self.live.extend(listeners);
        Ok(())
    }

    /// Cancels requests whose client has disconnected.
    fn end_abandoned(&mut self) {
        let batcher = &mut self.batcher;
        self.live.retain(|&id, events| goes_on(|| events.sender.is_closed(), || batcher.cancel(id)));
    }

    /// Fails requests that have waited too long.
    fn end_impatient(&mut self, now: Instant) {
        let batcher = &mut self.batcher;
        self.live.retain(|&id, events| {
            let late = |p: &Patience| now.saturating_duration_since(p.since) >= p.limit;
            let Some(Patience { limit, .. }) = events.patience.filter(late) else { return true };
            batcher.cancel(id);
            let error = EngineError::QueueTimeout { seconds: limit.as_secs_f64() };
            events.send(Ok(BatchEvent::Failed(error)));
            false
        });
    }

    fn deliver(&mut self, id: SequenceId, event: BatchEvent) {
        let Some(events) = self.live.get_mut(&id) else { return };
        // A request that has started waits no longer.
        events.patience = None;
        let mut ends = matches!(event, BatchEvent::Finished(_) | BatchEvent::Failed(_));
        let charged = events.charge(&event);
        if charged.is_err() {
            self.batcher.cancel(id);
            ends = true;
        }
        events.send(charged.map(|()| event));
        if ends {
            self.live.remove(&id);
        }
    }
}

#[cfg(test)]
mod tests;
