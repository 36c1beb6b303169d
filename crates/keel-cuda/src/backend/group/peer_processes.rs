//! The other processes of a group, and the ids with which all processes connect their devices.

use crate::driver::ID_BYTES;
use crate::error::{CudaError, Result};
use std::sync::Arc;

/// Ids of communicators that are to be made. One process makes them, and all processes connect with them, once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupIds {
    /// That of all devices, then those of the stages, where these have several devices and are not the whole group.
    ids: Vec<[u8; ID_BYTES]>,
}

impl GroupIds {
    pub(super) fn make(count: usize, id: impl Fn() -> Result<[u8; ID_BYTES]>) -> Result<GroupIds> {
        let ids = (0..count).map(|_| id()).collect::<Result<_>>()?;
        Ok(GroupIds { ids })
    }

    /// The ids as bytes, to be sent to another process.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.ids.concat()
    }

    /// The ids of which these are the bytes.
    ///
    /// # Errors
    /// They are no whole number of ids.
    pub fn from_bytes(bytes: &[u8]) -> Result<GroupIds> {
        let (ids, rest) = bytes.as_chunks::<ID_BYTES>();
        if ids.is_empty() || !rest.is_empty() {
            let reason = format!("{} bytes are no ids of a group, which have {ID_BYTES} each", bytes.len());
            return Err(CudaError::Peer { reason });
        }
        Ok(GroupIds { ids: ids.to_vec() })
    }

    pub(super) fn count(&self) -> usize {
        self.ids.len()
    }

    pub(super) fn of_all(&self) -> [u8; ID_BYTES] {
        self.ids[0]
    }

    pub(super) fn of_stage(&self, stage: usize) -> [u8; ID_BYTES] {
        self.ids[1 + stage]
    }
}

/// How a process of a group reaches the others. Messages to one process must arrive in the order of the calls.
///
/// In the process that leads, [`CudaGroup::connect`](super::CudaGroup::connect) calls `announce` and then `finish`, one
/// connection at a time.
///
/// - `finish` waits on the thread of the caller until the messages of the others have come.
/// - So another thread must receive these messages.
/// - That thread must not call [`CudaGroup::note_rejoined`](super::CudaGroup::note_rejoined), which may connect.
pub trait PeerProcesses: Send + Sync {
    /// Sends the ids to all other processes, which connect with them
    /// ([`CudaGroup::connect_with`](super::CudaGroup::connect_with)). Does not wait for that.
    ///
    /// # Errors
    /// One sentence: one of them is gone. Notes of absent devices from before this call are dropped, so a process whose
    /// end was noted earlier must be an error here.
    fn announce(&self, ids: &GroupIds) -> Result<(), String>;

    /// Waits until all other processes have connected.
    ///
    /// # Errors
    /// One sentence: one of them cannot.
    fn finish(&self) -> Result<(), String>;

    /// Tells all other processes that a device of this one does not come to its exchanges any more, as
    /// [`CudaGroup::note_absent`](super::CudaGroup::note_absent) there. Does not wait. A process that reaches only the
    /// one that leads tells that one, which passes it on.
    fn abandon(&self, rank: usize);
}

/// A process's role in its group.
#[derive(Clone, Default)]
pub enum Role {
    /// All devices are of this process. They connect when the last one is opened.
    #[default]
    Alone,
    /// It makes the ids, and connects when it is told to.
    Leads(Arc<dyn PeerProcesses>),
    /// It connects with the ids of the process that leads. `announce` and `finish` are never called.
    Follows(Arc<dyn PeerProcesses>),
}

impl Role {
    /// The other processes, if there are any.
    pub(super) fn others(&self) -> Option<&dyn PeerProcesses> {
        match self {
            Role::Alone => None,
            Role::Leads(others) | Role::Follows(others) => Some(&**others),
        }
    }
}

impl std::fmt::Debug for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Role::Alone => "Alone",
            Role::Leads(_) => "Leads",
            Role::Follows(_) => "Follows",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_come_back_from_their_bytes() {
        let next = std::cell::Cell::new(0);
        let id = || Ok([next.replace(next.get() + 1); ID_BYTES]);
        let ids = GroupIds::make(3, id).expect("three ids");
        assert_eq!((ids.count(), ids.of_all(), ids.of_stage(1)), (3, [0; ID_BYTES], [2; ID_BYTES]));
        let bytes = ids.to_bytes();
        assert_eq!(bytes.len(), 3 * ID_BYTES);
        assert_eq!(GroupIds::from_bytes(&bytes).expect("whole ids"), ids);
    }

    #[test]
    fn bytes_that_are_no_whole_ids_are_refused() {
        for len in [0, 1, ID_BYTES - 1, ID_BYTES + 1] {
            let error = GroupIds::from_bytes(&vec![7; len]).expect_err("refused").to_string();
            assert!(error.contains(&format!("{len} bytes are no ids of a group")), "{error}");
        }
    }
}
