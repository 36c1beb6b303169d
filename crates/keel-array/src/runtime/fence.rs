//! Tells whether work is done, and how it ended.
//!
//! `tests/interleavings.rs` compiles this file with loom's types and checks each order of the threads' steps.

use crate::sync::{Arc, Condvar, Mutex, MutexGuard};

/// The end of work, for those who wait for it. Clones are of the same work.
pub(crate) struct Fence<O>(Arc<Shared<O>>);

struct Shared<O> {
    outcome: Mutex<Option<O>>,
    passed: Condvar,
}

impl<O: Clone> Fence<O> {
    fn lock(&self) -> MutexGuard<'_, Option<O>> {
        self.0.outcome.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The work has ended. The first outcome stays.
    pub fn pass(&self, outcome: O) {
        self.lock().get_or_insert(outcome);
        self.0.passed.notify_all();
    }

    /// Waits for the work.
    pub fn outcome(&self) -> O {
        let mut outcome = self.lock();
        loop {
            match &*outcome {
                Some(outcome) => return outcome.clone(),
                None => outcome = self.0.passed.wait(outcome).unwrap_or_else(|e| e.into_inner()),
            }
        }
    }

    /// The outcome, if the work has ended.
    pub fn outcome_so_far(&self) -> Option<O> {
        self.lock().clone()
    }
}

impl<O> Default for Fence<O> {
    fn default() -> Fence<O> {
        Fence(Arc::new(Shared { outcome: Mutex::new(None), passed: Condvar::new() }))
    }
}

impl<O> Clone for Fence<O> {
    fn clone(&self) -> Fence<O> {
        Fence(Arc::clone(&self.0))
    }
}
