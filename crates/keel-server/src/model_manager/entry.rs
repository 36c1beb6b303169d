//! A model of a server, loaded or not.

use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::served_model::{Load, Modalities, Needs};
use crate::error::{Result, ServerError};
use crate::loaded_model::LoadedModel;

/// A model of the server.
pub(crate) struct Entry {
    pub id: String,
    pub needs: Needs,
    pub context: usize,
    pub takes: Modalities,
    /// `None` if the model is always loaded.
    pub load: Option<Load>,
    pub resident: Mutex<Option<Resident>>,
    /// Requests that wait for the model. While there are any, exactly one task is bringing it.
    pub waiting: Mutex<Vec<Waiter>>,
}

/// Gets the model, or the reason why it cannot be loaded. It is closed if its request has left.
pub(crate) type Waiter = oneshot::Sender<Result<Arc<LoadedModel>>>;

/// A loaded model.
pub(crate) struct Resident {
    pub model: Arc<LoadedModel>,
    pub thread: JoinHandle<()>,
    pub used: Instant,
}

impl Entry {
    pub fn resident(&self) -> MutexGuard<'_, Option<Resident>> {
        self.resident.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn waiting(&self) -> MutexGuard<'_, Vec<Waiter>> {
        self.waiting.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Adds a request that waits for the model. Returns whether a task that brings the model must be started.
    pub fn wait(&self, waiter: Waiter) -> bool {
        let mut waiting = self.waiting();
        let is_first = waiting.is_empty();
        waiting.retain(|waiter| !waiter.is_closed());
        waiting.push(waiter);
        is_first
    }

    /// Whether a request still waits. If not, the task that brings the model must end.
    pub fn is_wanted(&self) -> bool {
        let mut waiting = self.waiting();
        waiting.retain(|waiter| !waiter.is_closed());
        !waiting.is_empty()
    }

    /// Answers all requests that wait.
    pub fn answer(&self, outcome: Result<Arc<LoadedModel>>) {
        for waiter in std::mem::take(&mut *self.waiting()) {
            let _ = waiter.send(match &outcome {
                Ok(model) => Ok(Arc::clone(model)),
                Err(ServerError::Draining) => Err(ServerError::Draining),
                Err(error) => Err(self.failed(error.to_string())),
            });
        }
    }

    /// The model, if it is loaded and its engine runs. A model that is always loaded counts even after a failure, and
    /// then reports it.
    pub fn use_now(&self) -> Option<Arc<LoadedModel>> {
        let mut resident = self.resident();
        let resident = resident.as_mut().filter(|r| self.load.is_none() || !r.model.engine.is_stopped())?;
        resident.used = Instant::now();
        Some(Arc::clone(&resident.model))
    }

    /// Whether the model was unused for `keep_alive`.
    pub fn has_rested(&self, keep_alive: Duration) -> bool {
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
    pub fn is_busy(&self) -> bool {
        let status = self.model.engine.status();
        // Apart from this reference, only requests hold the model.
        Arc::strong_count(&self.model) > 1 || !status.running.is_empty() || status.waiting > 0
    }
}
