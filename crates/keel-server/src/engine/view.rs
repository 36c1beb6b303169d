//! An engine as other threads see it: counts as of the last step, and the memory of its devices.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

use keel_array::{DeviceReading, Gauge, Ledger, MemoryReport, Runtime};
use keel_engine::batch::{BatchStatus, Batcher, Readout};
use tokio::sync::Notify;

/// The state that an engine's thread and the handles to it share. Holding it does not keep the thread alive.
pub struct EngineView {
    pub(super) next_id: AtomicU64,
    status: Mutex<BatchStatus>,
    aborted: AtomicBool,
    stopped: AtomicBool,
    /// Told when `stopped` is set.
    stop: Notify,
    /// Why no later step can succeed.
    failure: OnceLock<String>,
    /// Number of checks at idle that found pages or bytes missing.
    pub(super) leaks: AtomicU64,
    /// The memory of each device, by rank. The arrays belong to the engine's threads alone, so all is freed when these
    /// have ended.
    devices: Vec<DeviceBooks>,
    /// The rank of the device with the output head.
    lead: usize,
    context: usize,
    context_max: usize,
    vocab: usize,
    hidden: usize,
    pools_rows: bool,
}

/// The books of a device.
struct DeviceBooks {
    name: String,
    gauge: Gauge,
    planned: MemoryReport,
}

/// Planned and measured memory of a device of an engine.
#[derive(Clone, Debug)]
pub struct DeviceReport {
    /// Its name.
    pub name: String,
    /// Bytes when the engine is ready, as planned. It never needs more.
    pub planned: MemoryReport,
    /// Bytes now.
    pub allocated: MemoryReport,
    /// The most bytes so far, by category.
    pub peak: MemoryReport,
}

impl EngineView {
    pub(super) fn new(batcher: &Batcher) -> EngineView {
        let engine = batcher.engine();
        let books = |(name, runtime): (String, &Runtime)| DeviceBooks {
            name,
            gauge: runtime.gauge(),
            planned: runtime.ledger().active(),
        };
        EngineView {
            next_id: AtomicU64::new(1),
            status: Mutex::new(batcher.status()),
            aborted: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            stop: Notify::new(),
            failure: OnceLock::new(),
            leaks: AtomicU64::new(0),
            devices: engine.devices().map(books).collect(),
            lead: engine.lead_rank(),
            context: engine.options().context,
            context_max: engine.model().config.context_max,
            vocab: engine.model().config.vocab,
            hidden: engine.model().config.hidden,
            pools_rows: engine.options().row_hidden,
        }
    }

    /// Largest number of tokens of a sequence.
    pub fn context(&self) -> usize {
        self.context
    }

    /// The model's own limit on them.
    pub fn context_max(&self) -> usize {
        self.context_max
    }

    /// Number of logits per row.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// Width of the hidden states.
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// The hidden states that embeddings are made of: the mean of all tokens if the engine was made for it, else the
    /// last.
    pub fn pooling(&self) -> Readout {
        if self.pools_rows { Readout::MeanHidden } else { Readout::LastHidden }
    }

    /// Counts as of the last step.
    pub fn status(&self) -> BatchStatus {
        self.status.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }

    /// Ends all running and waiting requests, and refuses new ones.
    pub fn abort(&self) {
        self.aborted.store(true, Ordering::Release);
    }

    pub(crate) fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::Acquire)
    }

    /// A step has ended.
    pub(super) fn set_status(&self, status: BatchStatus) {
        *self.status.lock().unwrap_or_else(|e| e.into_inner()) = status;
    }

    /// Records why no later step can succeed. The first reason stays.
    pub(super) fn note_failure(&self, reason: String) {
        let _ = self.failure.set(reason);
    }

    /// Why no later step can succeed.
    pub(crate) fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// The engine's thread has ended. Requests that its batch still lists are never run.
    pub(super) fn note_stop(&self) {
        self.stopped.store(true, Ordering::Release);
        self.status.lock().unwrap_or_else(|e| e.into_inner()).forget_gauges();
        self.stop.notify_one();
    }

    /// Whether the engine's thread has ended. While a handle exists, it ends only after a failure.
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Completes when the engine's thread has ended. One task may wait for it at a time.
    pub(crate) async fn stopped(&self) {
        // A note that comes before the wait is kept until then.
        while !self.is_stopped() {
            self.stop.notified().await;
        }
    }

    /// Number of checks at idle that found pages or bytes missing. Each is a bug, and a line in the log.
    pub fn leaks(&self) -> u64 {
        self.leaks.load(Ordering::Acquire)
    }

    /// The memory of each device, by rank.
    pub fn devices(&self) -> Vec<DeviceReport> {
        let device = |books: &DeviceBooks| DeviceReport {
            name: books.name.clone(),
            planned: books.planned,
            allocated: books.gauge.ledger().active(),
            peak: books.gauge.ledger().peak(),
        };
        self.devices.iter().map(device).collect()
    }

    /// Name of the device with the output head, its memory according to its driver, and the driver's own part of it.
    pub fn device_usage(&self) -> Option<(String, DeviceReading)> {
        let DeviceBooks { name, gauge, .. } = &self.devices[self.lead];
        Some((name.clone(), gauge.device_usage()?))
    }

    /// The ledger of the device; of a split model, of the one with the output head.
    pub fn ledger(&self) -> &Ledger {
        self.devices[self.lead].gauge.ledger()
    }

    /// The memory that the engine had allocated when it was ready, on all devices. It never needs more.
    pub fn planned(&self) -> MemoryReport {
        self.devices.iter().map(|books| books.planned).sum()
    }

    /// Whether each device has as many bytes as when the engine was ready.
    pub(super) fn is_level(&self) -> bool {
        self.devices.iter().all(|books| books.gauge.ledger().active() == books.planned)
    }
}
