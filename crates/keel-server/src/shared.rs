//! The state that all models and handlers of a server share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::access::caller::Caller;
use crate::access::keys::Keys;
use crate::error::Result;
use crate::http::blocking_work::BlockingWork;
use crate::memory::requests::RequestMemory;
use crate::metrics::Metrics;
use crate::options::ServerOptions;

/// The state that all models of a server share.
pub struct Shared {
    /// The server's options.
    pub options: ServerOptions,
    /// Counters.
    pub metrics: Metrics,
    /// Start of the server, in seconds since 1970.
    pub created: u64,
    /// The memory budget of requests.
    pub memory: RequestMemory,
    pub(crate) keys: Keys,
    pub(crate) works: BlockingWork,
    draining: AtomicBool,
}

impl Shared {
    /// Creates the state.
    pub(crate) fn new(options: ServerOptions) -> Shared {
        let created = seconds_since_1970((options.wall_clock)());
        Shared {
            memory: RequestMemory::new(options.request_memory, options.connection_memory()),
            keys: Keys::new(&options.keys),
            works: BlockingWork::new(),
            options,
            metrics: Metrics::new(),
            created,
            draining: AtomicBool::new(false),
        }
    }

    /// Refuses new requests from now on; running requests continue.
    pub(crate) fn start_draining(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// Whether requests are refused because the server is shutting down.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// Number of grammars whose compilation has begun since the start.
    pub fn grammars_begun(&self) -> u64 {
        self.works.grammars_begun()
    }

    /// Number of grammars whose compilation has ended since the start, whatever its outcome.
    pub fn grammars_ended(&self) -> u64 {
        self.works.grammars_ended()
    }

    /// Seconds since 1970, by the wall clock.
    pub(crate) fn now(&self) -> u64 {
        seconds_since_1970((self.options.wall_clock)())
    }

    /// Runs work for a request on a worker thread. The work is cancelled when the request is dropped.
    pub(crate) async fn work<T: Send + 'static>(
        &self,
        caller: &Arc<Caller>,
        work: impl FnOnce(&Caller) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (bytes, wait) = (caller.meter.held(), self.options.batch.queue_timeout);
        let caller = Arc::clone(caller);
        self.works.text(bytes, wait, move || work(&caller)).await
    }

    /// Runs work for a request with pictures. It has seats of its own, because pictures take longer and some are
    /// fetched.
    pub(crate) async fn work_on_pictures<T: Send + 'static>(
        &self,
        caller: &Arc<Caller>,
        work: impl FnOnce(&Caller) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (wait, caller) = (self.options.batch.queue_timeout, Arc::clone(caller));
        self.works.pictures(wait, move || work(&caller)).await
    }
}

/// Seconds since 1970; 0 for earlier times.
fn seconds_since_1970(now: SystemTime) -> u64 {
    now.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// A seed that differs for each call.
pub(crate) fn fresh_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(SystemTime::now())
}

/// A name that is unique among the objects of this server.
pub(crate) fn fresh_id(prefix: &str) -> String {
    format!("{prefix}{:016x}", fresh_seed())
}
