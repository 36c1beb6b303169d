//! What can go wrong between processes.

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RemoteError {
    /// No connection can be made.
    #[error(
        "node {node} ({address}) cannot be reached: {reason}; start it with the same --nodes and --node {node}"
    )]
    Unreachable {
        /// The node's number.
        node: usize,
        /// Its address.
        address: String,
        /// The system's reason.
        reason: String,
    },
    /// A node refuses to be led, or to open its devices.
    #[error("node {node} ({address}): {reason}")]
    Refused {
        /// The node's number.
        node: usize,
        /// Its address.
        address: String,
        /// Its reason.
        reason: String,
    },
    /// A connection has ended or is silent.
    #[error("{peer} is lost: {reason}")]
    Lost {
        /// Who was at the other end.
        peer: String,
        /// What was seen of it.
        reason: String,
    },
    /// A node is lost, and with it the model.
    #[error("{0}")]
    Gone(String),
    /// This process cannot start a thread.
    #[error("no thread can be started for a connection: {reason}; raise the limits of this process")]
    NoThread {
        /// The system's reason.
        reason: String,
    },
    /// A node cannot listen.
    #[error("this node cannot listen on {address}: {reason}")]
    Listen {
        /// The address.
        address: String,
        /// The system's reason.
        reason: String,
    },
}

/// Result of this crate.
pub type Result<T, E = RemoteError> = std::result::Result<T, E>;
