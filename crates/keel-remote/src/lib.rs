//! Devices of other processes, as backends of this one: how a model is split over several machines.
//!
//! One process leads. It reads the model, plans, schedules and serves. Each other process is a *node*: it opens its
//! devices, and does with them what the leader says. The leader sees each of them as a [`RemoteBackend`], so that
//! nothing above a backend knows where a device is.
//!
//! ```text
//! leader                                              node
//! ──────                                              ────
//! engine ▸ runtime ▸ RemoteBackend ── connection ───▶ a thread ▸ runtime ▸ CUDA backend
//!                       │   of the device             (one for each device)
//!                       └ a planning backend,
//!                         which answers all questions
//! Cluster ◀───────── control connection ───────────▶ members of the group, heartbeats
//! ```
//!
//! What goes over a device's connection is what goes over the backend contract: allocations, bytes, packed rows of
//! weights, programs (once), launches. A program's kernels, its places in the arena and its scratch are planned by the
//! leader on a planning backend of the same kind. Arrays between devices do not go this way: the backends of a group
//! exchange them themselves (NCCL).
//!
//! A step costs a round trip for each device: the small arrays that the host fills and the launch go in one direction
//! without waiting, and the answer comes when the launch has ended.
//!
//! A node that is lost ends the steps under way with an error, on all devices: see [`Cluster::lost`]. When a leader is
//! gone, a node frees all that it had and waits for the next one.

#![forbid(unsafe_code)]

mod backend;
mod cluster;
mod connection;
mod device_worker;
mod error;
mod frame;
mod leaders;
mod link;
mod message;
mod node;

pub use backend::RemoteBackend;
pub use cluster::Cluster;
pub use error::{RemoteError, Result};
pub use message::DeviceFacts;
pub use node::{OpenDevices, OpenRequest, serve};

/// What the local devices of a group can be told about those of other processes. The library of the backend implements
/// it.
pub trait Members: Send + Sync {
    /// A device of another process does not come to its exchanges any more. Local ones that wait for it get an error.
    fn note_absent(&self, rank: usize);

    /// A device of another process is ready to meet again. The last device of all connects them, in the leader.
    fn note_rejoined(&self, rank: usize);

    /// Connects the local devices with those of the other processes, which do the same now. `ids` are the leader's.
    ///
    /// # Errors
    /// One sentence.
    fn connect(&self, ids: &[u8]) -> std::result::Result<(), String>;
}
