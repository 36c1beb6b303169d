//! What the leader and a node say to each other.

use keel_array::{DeviceUsage, Kernel, Preparations, RemoteLaunch, WeightSpec};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The sources that say what messages mean, how they are framed, and how connections begin and end.
const SOURCES: &str =
    concat!(include_str!("connection.rs"), include_str!("frame.rs"), include_str!("message.rs"));

/// A hash of them and of those that define launches. Many builds have one version of the crate.
const SOURCES_HASH: u64 = RemoteLaunch::hash_of_sources(SOURCES);

/// Both ends must speak the same language: the version of the crate, and of its sources.
pub(crate) fn version() -> String {
    format!("{}+{SOURCES_HASH:016x}", env!("CARGO_PKG_VERSION"))
}

/// The first message of a connection.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Hello {
    /// A leader opens its control connection.
    Lead {
        /// [`version`] of the leader.
        version: String,
    },
    /// The leader opens the connection of a device.
    Device {
        /// The number that the node has given to this leader.
        session: u64,
        /// The device's number in the node.
        index: usize,
    },
}

/// The node's answer to a [`Hello`]: [`Welcome`] for a leader, `()` for the connection of a device. A refusal does not
/// depend on the hello. Its form stays, because leaders of other builds read it.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum HelloReply<T> {
    Accepted(T),
    Refused(Refusal),
}

/// What an accepted leader learns of a node.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Welcome {
    /// The number that the node gives to this leader.
    pub session: u64,
    pub devices: Vec<DeviceFacts>,
}

/// Why a node does not serve a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Refusal {
    pub reason: String,
    /// Whether it is worth asking again.
    pub may_pass: bool,
}

impl Refusal {
    /// It is worth asking again.
    pub fn passing(reason: impl Into<String>) -> Refusal {
        Refusal { reason: reason.into(), may_pass: true }
    }

    /// It is not.
    pub fn last(reason: impl Into<String>) -> Refusal {
        Refusal { reason: reason.into(), may_pass: false }
    }
}

/// A device of a node, as its leader hears of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceFacts {
    /// Its name in its own process, for example `cuda:0`.
    pub name: String,
    /// Bytes that it has room for; `None` if that is not known.
    pub room: Option<u64>,
}

/// News, in both directions.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum ControlMessage {
    /// To a node: open your devices as these members of a group.
    Open(GroupPlacement),
    /// To the leader: they are open, or why they are not.
    Opened(Result<(), String>),
    /// To a node: connect them with the others. The ids come as bytes.
    Connect { round: u64 },
    /// To the leader: they are connected, or why they are not.
    Connected { round: u64, outcome: Result<(), String> },
    /// In both directions: a device does not come to its exchanges any more. Each device that hears of it ends its
    /// exchanges, once between two rounds of connecting. In a later round the message is ignored.
    Absent { rank: usize, round: u64 },
    /// In both directions: nothing, but I am here.
    Here,
}

/// The places of a node's devices in a group, and the leader's settings for them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct GroupPlacement {
    pub size: usize,
    pub shares: usize,
    pub first_rank: usize,
    pub settings: Value,
}

/// A place in the memory of a device.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct At {
    pub memory: u64,
    pub offset: usize,
}

/// A copy from one place to another.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct CopyAt {
    pub from: At,
    pub to: At,
    pub bytes: usize,
}

/// Some bytes from a place on.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct RangeAt {
    pub at: At,
    pub bytes: usize,
}

/// Which elements follow as bytes.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum Coding {
    Dense,
    /// Codes, then scales, then biases: f32, little-endian.
    Affine {
        codes: usize,
        groups: usize,
    },
    Blocks,
}

/// Most pieces of programs that a device keeps.
pub(crate) const PIECES_MAX: usize = 4096;

/// Most copies, or ranges to zero, of one request.
pub(crate) const MOVES_MAX: usize = 1 << 16;

/// What the leader asks of a device.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    Allocate {
        memory: u64,
        bytes: usize,
        lasting: bool,
    },
    Free {
        memory: u64,
    },
    /// One user more of the arena, which has at least these bytes. Queued work may still use the arena of before.
    Arena {
        bytes: usize,
    },
    /// The arena has at least these bytes, for the users that it has.
    GrowArena {
        bytes: usize,
    },
    /// One user less of the arena. After the last one it is freed.
    FreeArena,
    ReleaseIdleMemory,
    /// Bytes follow.
    Write {
        at: At,
    },
    Read {
        at: At,
        bytes: usize,
        settled: bool,
    },
    Copy {
        copies: Vec<CopyAt>,
    },
    Clear {
        parts: Vec<RangeAt>,
    },
    /// Elements follow.
    Pack {
        spec: WeightSpec,
        at: At,
        expert: usize,
        first_row: usize,
        rows: usize,
        coding: Coding,
    },
    Repeat {
        spec: WeightSpec,
        at: At,
        rows: usize,
    },
    Program(Piece),
    Forget {
        number: u64,
    },
    Launch {
        number: u64,
        is_last: bool,
    },
    MakeReady {
        numbers: Vec<u64>,
    },
    Usage,
    /// End the device's exchanges after a failure.
    Rejoin,
}

impl Request {
    /// Whether the leader waits for an answer. A failed request without an answer makes later requests with an answer
    /// fail, except `Rejoin` and `Usage`.
    pub fn has_reply(&self) -> bool {
        match self {
            Request::Allocate { .. }
            | Request::Arena { .. }
            | Request::GrowArena { .. }
            | Request::ReleaseIdleMemory
            | Request::Read { .. }
            | Request::Repeat { .. }
            | Request::MakeReady { .. }
            | Request::Usage
            | Request::Rejoin => true,
            Request::Launch { is_last, .. } => *is_last,
            _ => false,
        }
    }
}

/// A piece of a program, with its memory.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Piece {
    pub number: u64,
    pub kernels: Vec<Kernel>,
    pub externals: Vec<At>,
    pub outputs: Vec<At>,
    pub has_arena: bool,
}

/// The answer of a device.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum DeviceReply {
    /// Bytes follow if they were asked for.
    Done,
    /// It cannot do this; the leader takes another way.
    Cannot,
    Failed(Failure),
    Usage(Option<DeviceUsage>),
    /// A launch has ended, or programs are ready. What has been prepared so far.
    Ran(Preparations),
    /// No answer: the node is there.
    Here,
}

/// Why a request failed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Failure {
    /// The operation, if it was one.
    pub op: Option<String>,
    pub reason: String,
    /// Whether the device has failed for good.
    pub is_lasting: bool,
}

impl Failure {
    /// Of no operation.
    pub fn new(reason: impl Into<String>) -> Failure {
        Failure { op: None, reason: reason.into(), is_lasting: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A leader of another build learns from a refusal that it is one.
    #[test]
    fn the_form_of_a_refusal_stays() {
        let refused = HelloReply::<()>::Refused(Refusal::last("another build"));
        let form = serde_json::json!({"Refused": {"reason": "another build", "may_pass": false}});
        assert_eq!(serde_json::to_value(refused).expect("memory"), form);
    }

    /// Otherwise builds that frame or mean messages differently would talk to each other.
    #[test]
    fn all_sources_of_messages_are_hashed() {
        let mut found = 0;
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src");
        for entry in std::fs::read_dir(folder).expect("a folder of this crate") {
            let path = entry.expect("it is listed").path();
            if path.is_dir() {
                continue;
            }
            let text = std::fs::read_to_string(&path).expect("a source");
            if text.contains("Deserialize") {
                assert!(SOURCES.contains(&text), "{} is not in SOURCES", path.display());
                found += 1;
            }
        }
        assert_eq!(found, 3, "messages, their frames and connections");
    }
}
