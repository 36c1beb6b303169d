//! Who may use the device: the stream's thread, a thread that runs work at once, or a thread that touches memory.
//!
//! `tests/interleavings.rs` compiles this file with loom's types and checks each order of the threads' steps.

use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::{Condvar, Mutex, MutexGuard};

/// The turns at a device. Queued work is counted before it is sent, and counts until it has run.
pub(crate) struct DeviceLock {
    /// The thread that holds this runs kernels, or touches memory from the host.
    device: Mutex<()>,
    queued: Mutex<usize>,
    drained: Condvar,
    /// Runs whose pieces are in the backend's queue, with intermediates in the arena.
    runs: AtomicUsize,
}

/// A turn. It ends when this is dropped.
pub(crate) struct DeviceGuard<'a> {
    _device: MutexGuard<'a, ()>,
}

impl DeviceLock {
    pub fn new() -> DeviceLock {
        let runs = AtomicUsize::new(0);
        DeviceLock { device: Mutex::new(()), queued: Mutex::new(0), drained: Condvar::new(), runs }
    }

    fn device(&self) -> DeviceGuard<'_> {
        DeviceGuard { _device: self.device.lock().unwrap_or_else(|e| e.into_inner()) }
    }

    fn queued(&self) -> MutexGuard<'_, usize> {
        self.queued.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// A turn at once, unless work is queued. The queue is looked at while the device is held: queued work may be
    /// between two of its pieces, with live intermediates in the arena.
    pub fn now(&self) -> Option<DeviceGuard<'_>> {
        let turn = self.device();
        (*self.queued() == 0).then_some(turn)
    }

    /// Counts pieces of work that are about to be sent. All pieces of one work are counted together. Otherwise the
    /// queue would read as empty between two pieces, and a thread that waits for an empty queue would overwrite their
    /// intermediates in the arena.
    pub fn announce(&self, pieces: usize) {
        *self.queued() += pieces;
    }

    /// Runs an announced piece, and counts it as done, also if it panics. So no thread waits for a piece that will not
    /// end.
    pub fn take(&self, run: impl FnOnce()) {
        // Dropped in the opposite order: the turn ends before the piece counts as done.
        let _done = Done(self);
        let _turn = self.device();
        run();
    }

    /// An announced piece is done, or will not come.
    pub fn pass(&self) {
        let mut queued = self.queued();
        *queued -= 1;
        if *queued == 0 {
            self.drained.notify_all();
        }
    }

    /// Waits until nothing is queued.
    pub fn synchronize(&self) {
        let mut queued = self.queued();
        while *queued > 0 {
            queued = self.drained.wait(queued).unwrap_or_else(|e| e.into_inner());
        }
    }

    /// Waits until nothing is queued, then gives a turn in which nothing is.
    pub fn exclusive(&self) -> DeviceGuard<'_> {
        loop {
            self.synchronize();
            // Another thread may have queued work meanwhile, of which the first piece has run and the second has not.
            if let Some(turn) = self.now() {
                return turn;
            }
        }
    }

    /// A run begins, whose turn comes later. Returns how many runs are under way with it.
    pub fn begin_run(&self) -> usize {
        // The lock of its turn orders this before any turn that follows.
        self.runs.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// A run has ended.
    pub fn end_run(&self) {
        self.runs.fetch_sub(1, Ordering::Relaxed);
    }

    /// Runs that have begun and not ended.
    pub fn runs(&self) -> usize {
        self.runs.load(Ordering::Relaxed)
    }

    /// An exclusive turn in which the arena holds nothing of value: nothing is queued. `None` if a run is under way.
    pub fn at_rest(&self) -> Option<DeviceGuard<'_>> {
        let turn = self.exclusive();
        (self.runs() == 0).then_some(turn)
    }
}

/// Counts an announced piece as done when it is dropped.
struct Done<'a>(&'a DeviceLock);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.pass();
    }
}
