//! Which absences both ends of a connection for news have heard of.
//!
//! News and requests go over connections of their own, so one may overtake the other. A device must not rejoin its
//! group before its process has heard of all absences from before: one that came later would end the next exchange.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

/// How long the news may take to come after what has overtaken it.
const PATIENCE: Duration = Duration::from_secs(5);

/// Counts of a connection's absences.
#[derive(Default)]
pub(crate) struct Absences {
    told: AtomicU64,
    heard: Mutex<u64>,
    changed: Condvar,
}

impl Absences {
    /// Counts an absence before it is told.
    pub fn tell(&self) {
        self.told.fetch_add(1, Ordering::SeqCst);
    }

    /// How many were told to the other end.
    pub fn told(&self) -> u64 {
        self.told.load(Ordering::SeqCst)
    }

    /// Counts an absence that was heard of, once it has been passed on.
    pub fn hear(&self) {
        *self.heard.lock().unwrap_or_else(|e| e.into_inner()) += 1;
        self.changed.notify_all();
    }

    /// Waits until as many were heard of as the other end has told. It gives up when the news is lost.
    pub fn wait_for(&self, told: u64) {
        let heard = self.heard.lock().unwrap_or_else(|e| e.into_inner());
        drop(self.changed.wait_timeout_while(heard, PATIENCE, |heard| *heard < told));
    }
}
