//! Engines that have failed for good: whether a model can be loaded in their place, or the server must end.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use keel_engine::EngineError;
use tokio::sync::Notify;

use super::ModelManager;
use crate::engine::view::EngineView;
use crate::error::ServerError;

/// Time in which an engine that has failed must free its memory and devices. A device that is lost may never let go.
pub(crate) const FREE_TIME: Duration = Duration::from_secs(10);

/// Why no model can be loaded any more, once that is known.
#[derive(Default)]
pub(super) struct Lost {
    reason: OnceLock<String>,
    told: Notify,
}

impl ModelManager {
    /// The engine whose model cannot be loaded again, if there is one and the server has not closed it.
    fn lasting(&self) -> Option<Arc<EngineView>> {
        let entry = self.entries.iter().find(|entry| entry.load.is_none())?;
        entry.resident().as_ref().map(|resident| resident.model.engine.view())
    }

    /// Notes how the load of one of several models has ended. If it fails after an engine has failed for good, later
    /// ones fail, too: a GPU's broken context stays broken as long as the process lives.
    pub(super) fn note_load(&self, has_succeeded: bool) {
        let Some(reason) = self.departed().failure.take() else { return };
        if !has_succeeded && self.lost.reason.set(reason).is_ok() {
            self.lost.told.notify_one();
        }
    }

    /// Whether an engine has failed for good, and no model can be loaded in its place.
    pub(crate) fn has_failed(&self) -> bool {
        self.lasting().is_some_and(|engine| engine.is_stopped()) || self.lost.reason.get().is_some()
    }

    /// Completes when this is so. One task may wait for it at a time.
    pub(crate) async fn failed(&self) {
        match self.lasting() {
            Some(engine) => engine.stopped().await,
            // A note that comes before the wait is kept until then.
            None => self.lost.told.notified().await,
        }
    }

    /// The error that ends the server, if this is so.
    pub(crate) fn failure(&self) -> Option<ServerError> {
        let reason = match self.lasting() {
            Some(engine) if engine.is_stopped() => engine.failure().map(String::from),
            Some(_) => return None,
            None => Some(self.lost.reason.get()?.clone()),
        };
        let source = reason.map(|reason| Box::new(EngineError::Step(reason)));
        Some(ServerError::EngineLost { source })
    }
}
