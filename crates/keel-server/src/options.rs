//! Bounds of a server.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use keel_engine::batch::BatchOptions;

use crate::keys::ApiKey;

/// Where remembered prefixes outlive the server.
#[derive(Clone, Debug)]
pub struct PrefixStore {
    /// The folder.
    pub folder: PathBuf,
    /// What tells the model, its weights and its arithmetic from others: caches of another are not used.
    pub model: String,
}

/// How a server behaves. Every queue and body is bounded here.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Bounds of the batch.
    pub batch: BatchOptions,
    /// Where prefixes are restored from and saved to; `None` forgets them.
    pub prefix_store: Option<PrefixStore>,
    /// The name under which the model is served.
    pub model_id: String,
    /// Tokens of an answer where the request names no number.
    pub max_tokens_default: usize,
    /// Time that a request may take, from its arrival to its last token.
    pub deadline: Duration,
    /// How long requests that run may go on after the signal to end.
    pub grace: Duration,
    /// Connections at once. The system's limit of descriptors may allow fewer.
    pub connections_max: usize,
    /// Time for the head of a request to come.
    pub head_timeout: Duration,
    /// Time for a body to come; one that comes at 16 KiB a second has as long as it needs.
    pub body_timeout: Duration,
    /// Time that a connection may be open without a request.
    pub idle_timeout: Duration,
    /// Time that a client may read nothing of its answer.
    pub write_timeout: Duration,
    /// Bytes for bodies, texts and their copies of all requests together.
    pub request_memory: u64,
    /// Time for a schema or grammar to be compiled.
    pub grammar_time: Duration,
    /// Bytes of a request's body.
    pub body_bytes_max: usize,
    /// Answers of one request (`n`).
    pub choices_max: usize,
    /// Time between comments that keep a silent stream open.
    pub ping: Duration,
    /// Keys, of which every request must bring one; none lets all in.
    pub keys: Vec<ApiKey>,
    /// Names, besides those of loopback and addresses, under which clients reach the server; `*` is any.
    pub hosts: Vec<String>,
    /// The time of day, which answers report. Nothing else depends on it: deadlines and times hang on a clock that never
    /// jumps.
    pub wall_clock: fn() -> SystemTime,
    /// Origins of other sites that a browser may call from; `*` is any.
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
