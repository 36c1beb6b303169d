//! Options of a server.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use keel_engine::batch::BatchOptions;

use crate::access::keys::ApiKey;
use crate::pictures::PictureSources;

/// The place where remembered prefixes are saved.
#[derive(Clone, Debug)]
pub struct PrefixStore {
    /// The folder.
    pub folder: PathBuf,
    /// Identifies the model, its weights and its arithmetic. Caches of other models are not used.
    pub model: String,
}

/// Most bytes that a connection takes by itself: the head of its request, the bytes that wait to be written, and its
/// task.
pub const CONNECTION_BYTES: u64 = 48 << 10;
/// Smallest limit on connections, even if there are no descriptors left.
pub(crate) const CONNECTIONS_MIN: usize = 4;

/// Options of a server. They bound every queue and body.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Bounds of the batch.
    pub batch: BatchOptions,
    /// The place to restore prefixes from and save them to. With `None` they are lost at the end.
    pub prefix_store: Option<PrefixStore>,
    /// The name under which the model is served, where there is one.
    pub model_id: String,
    /// Limit on an answer's tokens if the request has none.
    pub max_tokens_default: usize,
    /// Time limit of a request, from its arrival to its last token. It includes the time of its body, of a load of its
    /// model and in queues.
    pub deadline: Duration,
    /// Time that running requests get after the signal to end.
    pub grace: Duration,
    /// Largest number of connections. The system's limit of descriptors may reduce it.
    pub connections_max: usize,
    /// Time limit for receiving the head of a request.
    pub head_timeout: Duration,
    /// Time limit for receiving a body. A body that arrives with at least 16 KiB/s has no limit.
    pub body_timeout: Duration,
    /// Longest time that a connection may be open without a request.
    pub idle_timeout: Duration,
    /// Longest time that a client may read nothing of its answer.
    pub write_timeout: Duration,
    /// Memory budget of all requests together, for bodies, texts and their copies: at least
    /// [`REQUEST_MEMORY_MIN`](crate::REQUEST_MEMORY_MIN).
    pub request_memory: u64,
    /// Where pictures may come from, other than the request itself.
    pub pictures: PictureSources,
    /// Makes the allocator return free memory to the system. Called after requests have ended.
    pub give_back: fn(),
    /// Time limit for compiling a schema or grammar.
    pub grammar_time: Duration,
    /// Largest size of a request's body.
    pub body_bytes_max: usize,
    /// Largest number of answers per request (`n`).
    pub choices_max: usize,
    /// Interval of the comments that keep a silent stream open.
    pub ping: Duration,
    /// The API keys. If there are any, every request must have one of them.
    pub keys: Vec<ApiKey>,
    /// Host names that clients may use, in addition to loopback names and addresses; `*` allows any name.
    pub hosts: Vec<String>,
    /// The time of day, which answers report. Nothing else uses it: deadlines and durations use a monotonic clock.
    pub wall_clock: fn() -> SystemTime,
    /// Origins of other sites whose pages may call the server; `*` allows any origin.
    pub cors_origins: Vec<String>,
}

impl Default for ServerOptions {
    fn default() -> ServerOptions {
        ServerOptions {
            batch: BatchOptions::default(),
            prefix_store: None,
            model_id: "keel".into(),
            max_tokens_default: 1024,
            deadline: Duration::from_secs(600),
            grace: Duration::from_secs(10),
            connections_max: 1024,
            head_timeout: Duration::from_secs(10),
            body_timeout: Duration::from_secs(30),
            idle_timeout: Duration::from_secs(75),
            write_timeout: Duration::from_secs(60),
            request_memory: 512 << 20,
            pictures: PictureSources::default(),
            give_back: || (),
            grammar_time: Duration::from_secs(5),
            body_bytes_max: 8 << 20,
            choices_max: 16,
            ping: Duration::from_secs(10),
            keys: Vec::new(),
            hosts: Vec::new(),
            cors_origins: Vec::new(),
            wall_clock: SystemTime::now,
        }
    }
}

impl ServerOptions {
    /// Number of connections at once: as many as asked for, if they take at most a quarter of the memory of requests.
    pub fn connections(&self) -> usize {
        let room = self.request_memory / 4 / CONNECTION_BYTES;
        self.connections_max.min(usize::try_from(room).unwrap_or(usize::MAX)).max(CONNECTIONS_MIN)
    }

    /// Bytes of the memory of requests that are kept for connections.
    pub fn connection_memory(&self) -> u64 {
        self.connections() as u64 * CONNECTION_BYTES
    }
}
