//! Several GPUs that exchange arrays. They are of one process, or of several, which may run on different machines.
//!
//! A device waits for its peers on its stream. Should one of them fail, the others would wait forever: the library's
//! kernels run until all have come. So a host that waits for a stream also looks whether a peer has failed, and then
//! ends its own exchanges.
//!
//! ```text
//! device 0    exchange ── waits ──▶ sees that 1 has failed ▸ ends its exchanges, drops its graphs ▸ error
//! device 1    fails ▸ abandon
//! then        each: rejoin ▸ ends its exchanges, drops its graphs      the last one: connects all again
//! ```
//!
//! In a group of several processes, one of them leads. Each process knows its own devices, and is told when those of
//! the others fail or return: [`CudaGroup::note_absent`], [`CudaGroup::note_rejoined`]. It tells the others through
//! [`PeerProcesses`].
//!
//! Small arrays of a stage are added without the library, by mailboxes; see `kernels/one_shot_all_reduce.cu`. Their
//! kernels end with the device's exchanges, too, and all mailboxes are reset when the devices are connected again. A
//! stage of several processes has no mailboxes, because none of them can write to the memory of another one.
//!
//! The end of a device's exchanges tells its kernels to stop. The last device to end them waits until no graph of any
//! device holds a communicator. A graph may be dropped only when it does not run. So communicators end on threads of
//! their own, all at the same time, while the graphs are dropped.

mod connecting;
mod one_shot;
mod peer_processes;

pub(super) use one_shot::OneShot;
pub use peer_processes::{GroupIds, PeerProcesses, Role};

use super::Gpu;
use crate::driver::{
    Communicator, DRAIN, Device, Extent, Mailboxes, Messages, Nccl, apply_settings, communicator_bytes,
    mailbox_bytes,
};
use crate::error::{CudaError, Result};
use keel_array::{Op, Peers};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

/// No device has failed.
const NO_RANK: usize = usize::MAX;

/// A device's communicators: with all devices, and with those of its stage if these are fewer.
struct Links {
    all: Communicator,
    stage: Option<Communicator>,
}

/// The connections through which a device exchanges arrays.
#[derive(Default)]
struct MemberState {
    links: Option<Links>,
    /// Those of its stage, as long as the device is open.
    mailboxes: Option<Arc<Mailboxes>>,
}

/// The devices of a group, and the library that connects them.
#[derive(Default)]
struct Members {
    nccl: Option<Arc<Nccl>>,
    /// By rank; those of this process that are open.
    devices: Vec<Weak<Device>>,
    /// Those that have come back after a failure.
    back: BTreeSet<usize>,
    /// Why the devices are not connected.
    reason: Option<CudaError>,
}

struct Shared {
    /// Ranks of the devices of this process.
    local: Range<usize>,
    role: Role,
    /// Whether the group is, or is planned to be, one of several processes.
    spans_processes: bool,
    members: Mutex<Members>,
    /// Held while the devices are connected, and while one of them closes.
    turn: Mutex<()>,
    /// By rank. A device locks its own alone, because a call of the library may wait for the peers.
    seats: Vec<Mutex<MemberState>>,
    /// The device that has failed.
    absent: AtomicUsize,
    /// Whether several devices may be one GPU.
    may_share_a_gpu: bool,
}

/// A backend's membership of a group of GPUs.
#[derive(Clone)]
pub struct CudaGroup {
    shared: Arc<Shared>,
    pub(super) rank: usize,
    /// How many of the group's devices share the layers of a stage: those with consecutive ranks.
    shares: usize,
}

impl CudaGroup {
    /// The memberships of a group of `size` backends, by rank. Each `shares` of them are a stage of a pipeline, and
    /// share its layers; they alone, and all devices together, can add and gather arrays.
    ///
    /// The first call sets variables of the environment for NCCL. Make it before other threads start that read the
    /// environment, and before a device is opened.
    ///
    /// # Panics
    /// If the devices are no whole stages.
    pub fn of(size: usize, shares: usize) -> Vec<CudaGroup> {
        CudaGroup::across(size, shares, 0..size, Role::Alone)
    }

    /// As [`CudaGroup::of`], but of the devices of several processes: the memberships of the ranks `local`, which are
    /// those of this one. Every process calls it with the same numbers. NCCL's variables, too, are to be the same.
    ///
    /// Its devices are not connected when they are opened, but by [`CudaGroup::connect`] in the process that leads and
    /// [`CudaGroup::connect_with`] in the others, and again after a failure, when all devices have rejoined.
    ///
    /// # Panics
    /// If the devices are no whole stages, `local` are not among them, or a process is alone without being all.
    pub fn across(size: usize, shares: usize, local: Range<usize>, role: Role) -> Vec<CudaGroup> {
        let is_alone = matches!(role, Role::Alone);
        assert!(!is_alone || local == (0..size), "{local:?} of {size} devices have no others");
        CudaGroup::make(size, shares, local, role, !is_alone)
    }

    /// For plans: the memberships of all ranks of a group of several processes, with the numbers of the real ones.
    ///
    /// # Panics
    /// If the devices are no whole stages.
    pub fn planned(size: usize, shares: usize) -> Vec<CudaGroup> {
        CudaGroup::make(size, shares, 0..size, Role::Alone, true)
    }

    fn make(
        size: usize,
        shares: usize,
        local: Range<usize>,
        role: Role,
        spans_processes: bool,
    ) -> Vec<CudaGroup> {
        assert!(shares > 0 && size.is_multiple_of(shares), "{size} devices are no stages of {shares}");
        assert!(!local.is_empty() && local.end <= size, "{local:?} are not devices of {size}");
        if size > 1 {
            apply_settings();
        }
        let devices = std::iter::repeat_with(Weak::new).take(size).collect();
        let shared = Arc::new(Shared {
            local: local.clone(),
            role,
            spans_processes,
            members: Mutex::new(Members { devices, ..Members::default() }),
            turn: Mutex::default(),
            seats: (0..size).map(|_| Mutex::default()).collect(),
            absent: AtomicUsize::new(NO_RANK),
            may_share_a_gpu: CudaGroup::may_share_a_gpu(),
        });
        local.map(|rank| CudaGroup { shared: Arc::clone(&shared), rank, shares }).collect()
    }

    /// Whether NCCL may connect a GPU with itself, so that several devices of a group are one GPU. It is for tests: the
    /// devices share the GPU's memory, and a graph with NCCL's kernels does not end.
    pub fn may_share_a_gpu() -> bool {
        std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|set| set == "1")
    }

    pub(super) fn size(&self) -> usize {
        self.shared.seats.len()
    }

    /// Whether some of its devices are in other processes.
    pub(super) fn spans_processes(&self) -> bool {
        self.shared.spans_processes
    }

    /// The devices of this one's stage.
    fn stage(&self) -> Peers {
        Peers { first: self.rank / self.shares * self.shares, count: self.shares }
    }

    /// The most bytes of the device's memory that NCCL takes, and its mailbox. They are counted also where devices turn
    /// out not to reach each other, because a plan cannot know. So each process counts the same for a device.
    pub(super) fn buffer_bytes(&self) -> u64 {
        let (size, shares) = (self.size(), self.shares);
        if size == 1 {
            return 0;
        }
        let (received, sent) = (self.rank >= shares, self.rank + shares < size);
        let messages = Messages { received: received.into(), sent: sent.into() };
        let bytes = |devices, messages| {
            communicator_bytes(Extent { devices, messages, spans_machines: self.shared.spans_processes })
        };
        let stage = (1 < shares && shares < size).then(|| bytes(shares, Messages::default()));
        bytes(size, messages) + stage.unwrap_or(0) + mailbox_bytes(shares) as u64
    }

    /// Refuses an exchange with devices that have no communicator.
    pub(super) fn supports(&self, op: &Op) -> Result<(), String> {
        let Some(peers) = op.peers() else { return Ok(()) };
        if peers.count == 1 || peers.count == self.size() || peers == self.stage() {
            return Ok(());
        }
        let (wanted, stage) = (peers.ranks(), self.stage().ranks());
        Err(format!(
            "devices {wanted:?} cannot add arrays: GPUs do that with their stage, {stage:?}, or with all"
        ))
    }

    /// Whether the stage whose first rank is `first` has all its devices in this process.
    fn is_local_stage(&self, first: usize) -> bool {
        self.shared.local.start <= first && first + self.shares <= self.shared.local.end
    }

    /// Brings a device into the group. If there are no other processes, the last one connects all.
    pub(super) fn join(&self, device: &Arc<Device>) -> Result<()> {
        let mut members = self.members();
        if members.nccl.is_none() {
            members.nccl = Some(Nccl::load()?);
        }
        members.devices[self.rank] = Arc::downgrade(device);
        let are_all_open = members.devices.iter().all(|device| device.strong_count() > 0);
        drop(members);
        let watching = self.clone();
        device.watch(move || watching.check());
        match self.shared.role {
            Role::Alone if are_all_open => self.connect_all(),
            _ => Ok(()),
        }
    }

    fn members(&self) -> MutexGuard<'_, Members> {
        self.shared.members.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn turn(&self) -> MutexGuard<'_, ()> {
        self.shared.turn.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn seat(&self, rank: usize) -> MutexGuard<'_, MemberState> {
        self.shared.seats[rank].lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The error of a device that waits: a device of the group has failed, or a connection. It may be the device
    /// itself: its peers no longer come to the exchanges that it has still to make.
    fn check(&self) -> Result<()> {
        if let Some(absent) = self.absent() {
            return Err(self.absence(absent));
        }
        let seat = self.seat(self.rank);
        let links = seat.links.iter().flat_map(|links| std::iter::once(&links.all).chain(&links.stage));
        let failure = links.map(Communicator::failure).find_map(|failure| failure);
        failure.map_or(Ok(()), |error| Err(CudaError::Peer { reason: error.to_string() }))
    }

    /// The device that has failed.
    fn absent(&self) -> Option<usize> {
        Some(self.shared.absent.load(Ordering::Acquire)).filter(|absent| *absent != NO_RANK)
    }

    fn absence(&self, absent: usize) -> CudaError {
        let reason = match absent == self.rank {
            true => format!("device {absent} of the group has failed, and its peers no longer wait for it"),
            false => {
                format!("device {absent} of the group has failed, and device {} waited for it", self.rank)
            }
        };
        CudaError::Peer { reason }
    }

    /// Ends this device's exchanges, while `drop_graphs` drops the graphs that hold them.
    fn leave(&self, device: &Arc<Device>, drop_graphs: impl FnOnce()) {
        let links = {
            let mut seat = self.seat(self.rank);
            if let Some(mailboxes) = &seat.mailboxes {
                mailboxes.stop(self.rank % self.shares);
            }
            seat.links.take()
        };
        std::thread::scope(|scope| {
            for communicator in
                links.into_iter().flat_map(|Links { all, stage }| [Some(all), stage]).flatten()
            {
                let end = move || {
                    // The library must not bind its thread to another device.
                    let _ = device.bind();
                    drop(communicator);
                };
                // Without a thread the communicator ends here, with the closure.
                if let Err(error) = std::thread::Builder::new().spawn_scoped(scope, end) {
                    tracing::error!("no thread can be started: {error}");
                }
            }
            drop_graphs();
        });
    }

    pub(super) fn has_failed(&self) -> bool {
        self.absent().is_some()
    }

    pub(super) fn abandon(&self) {
        self.note_absent(self.rank);
        // Told even if another device has failed before: each process remembers only its first absent device.
        if let Some(others) = self.shared.role.others() {
            others.abandon(self.rank);
        }
    }

    /// Makes waits for the peers end with an error: a device of another process has failed, or the connection to that
    /// process. A wait for a connection ends, too.
    pub fn note_absent(&self, rank: usize) {
        let _ = self.shared.absent.compare_exchange(NO_RANK, rank, Ordering::AcqRel, Ordering::Acquire);
    }

    fn forget_absent(&self) {
        self.shared.absent.store(NO_RANK, Ordering::Release);
    }

    /// As [`keel_array::Group::rejoin`]. Arrays that were sent and not received would stay in the library's buffers, so
    /// all devices connect again.
    pub(super) fn rejoin(&self, gpu: &Gpu) {
        if self.has_failed() {
            // Its own stream may hold exchanges as well, whatever its failure was.
            gpu.session().end_exchanges(gpu);
            self.note_back(self.rank);
        }
    }

    /// In the process that leads: a device of another process has rejoined, and has ended its exchanges. After the last
    /// device, which may be one of this process, all are connected again, on the thread of that call.
    pub fn note_rejoined(&self, rank: usize) {
        if self.has_failed() {
            self.note_back(rank);
        }
    }

    /// Notes a device that has come back. A process that follows awaits its own devices, any other process all of the
    /// group. After the last one, a process that follows waits for ids, and any other connects all devices. Absences
    /// noted from then on concern the new connection.
    fn note_back(&self, rank: usize) {
        let is_led = matches!(self.shared.role, Role::Follows(_));
        let awaited = if is_led { self.shared.local.clone() } else { 0..self.size() };
        let mut members = self.members();
        members.back.insert(rank);
        if !awaited.into_iter().all(|rank| members.back.contains(&rank)) {
            return;
        }
        members.back.clear();
        drop(members);
        self.forget_absent();
        if !is_led && let Err(error) = self.connect_all() {
            tracing::error!("the devices cannot be connected again: {error}");
        }
    }

    /// Passes the communicator with `peers`, or with all devices, to `work`.
    pub(super) fn with(
        &self,
        peers: Option<Peers>,
        work: impl FnOnce(&Communicator) -> Result<()>,
    ) -> Result<()> {
        let seat = self.seat(self.rank);
        let of_stage = peers.is_some_and(|peers| peers.count < self.size());
        let links = seat.links.as_ref();
        match links.and_then(|links| if of_stage { links.stage.as_ref() } else { Some(&links.all) }) {
            Some(communicator) => work(communicator),
            None => {
                let reason = self.members().reason.as_ref().map(CudaError::to_string);
                let reason = reason.unwrap_or_else(|| "the devices are not connected".into());
                Err(CudaError::Peer { reason })
            }
        }
    }
}

impl std::fmt::Debug for CudaGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaGroup({} of {}, stages of {})", self.rank, self.size(), self.shares)
    }
}

/// An open device's membership, which ends with it.
pub(super) struct Membership {
    pub group: CudaGroup,
    /// Its context is there until the communicators have ended.
    device: Arc<Device>,
}

impl Membership {
    pub fn new(group: &CudaGroup, device: &Arc<Device>) -> Result<Membership> {
        // If it cannot join, its membership ends all the same.
        let membership = Membership { group: group.clone(), device: Arc::clone(device) };
        group.join(device).map(|()| membership)
    }

    /// Ends the device's exchanges, while `drop_graphs` drops its graphs, and waits until its stream is empty.
    ///
    /// # Errors
    /// It does not become empty.
    pub fn end(&self, drop_graphs: impl FnOnce()) -> Result<()> {
        self.group.leave(&self.device, drop_graphs);
        self.device.drain(DRAIN)
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        // A device that closes while others are connected would leave its communicators behind.
        let _turn = self.group.turn();
        let _ = self.device.bind();
        self.group.leave(&self.device, || ());
        let mailboxes = self.group.seat(self.group.rank).mailboxes.take();
        // Dropped without the lock on the seat. Dropping the last handle waits for all devices, and they look at their
        // seats meanwhile.
        drop(mailboxes);
        // Peers' mailboxes may keep the device. It is closed all the same.
        let mut members = self.group.members();
        let place = &mut members.devices[self.group.rank];
        if std::ptr::eq(place.as_ptr(), Arc::as_ptr(&self.device)) {
            *place = Weak::new();
        }
    }
}

#[cfg(test)]
mod tests;
