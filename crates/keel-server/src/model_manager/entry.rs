//! A model of a server, loaded or not.

use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::served_model::{Load, Modalities, Needs};
use crate::error::ServerError;
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
}

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

    pub fn failed(&self, reason: String) -> ServerError {
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
