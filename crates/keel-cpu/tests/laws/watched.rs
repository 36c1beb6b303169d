//! A backend that is observed, and that can be told to break a law.

use keel_array::{Backend, Launch, OperandMemory, Result};
use keel_testkit::intercepted::{InterceptedBackend, Interceptor};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};

/// A backend's memory and launches as a test observes them, and a gate before its launches.
pub struct Watched {
    /// Launches wait while it is closed.
    gate: Mutex<bool>,
    opened: Condvar,
    /// Act as if dropping the host's handle had freed memory that a submission still reads.
    pub forgetful: AtomicBool,
    /// The next launch panics.
    pub panics: AtomicBool,
    /// Kernels of the largest launch.
    pub kernels_max: AtomicUsize,
    /// Launches so far.
    pub launches: AtomicUsize,
}

impl Watched {
    /// A watch and the backend it watches.
    pub fn over(backend: impl Backend) -> (Arc<Watched>, Arc<InterceptedBackend<Watched>>) {
        let watched = Arc::new(Watched {
            gate: Mutex::new(true),
            opened: Condvar::new(),
            forgetful: AtomicBool::new(false),
            panics: AtomicBool::new(false),
            kernels_max: AtomicUsize::new(0),
            launches: AtomicUsize::new(0),
        });
        (watched.clone(), InterceptedBackend::new(Arc::new(backend), watched))
    }

    fn gate(&self) -> MutexGuard<'_, bool> {
        self.gate.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Launches wait from now on.
    pub fn close(&self) {
        *self.gate() = false;
    }

    /// Launches go on.
    pub fn open(&self) {
        *self.gate() = true;
        self.opened.notify_all();
    }
}

impl Interceptor for Watched {
    fn launch(&self, backend: &dyn Backend, launch: &Launch<'_>) -> Result<()> {
        let mut open = self.gate();
        while !*open {
            open = self.opened.wait(open).unwrap_or_else(|e| e.into_inner());
        }
        drop(open);
        assert!(!self.panics.swap(false, Ordering::Relaxed), "planted");
        if self.forgetful.load(Ordering::Relaxed) {
            poison_inputs(backend, launch);
        }
        self.launches.fetch_add(1, Ordering::Relaxed);
        self.kernels_max.fetch_max(launch.kernels().len(), Ordering::Relaxed);
        backend.launch(launch)
    }
}

/// Fills the launch's external inputs with NaN, as freeing them would.
fn poison_inputs(backend: &dyn Backend, launch: &Launch<'_>) {
    let inputs = launch.kernels().iter().flat_map(|kernel| &kernel.inputs);
    for input in inputs.filter(|input| matches!(input.memory, OperandMemory::External(_))) {
        let buffer = launch.resolve(input.memory).buffer;
        backend.write(buffer.memory(), 0, &vec![0xff; buffer.bytes()]);
    }
}
