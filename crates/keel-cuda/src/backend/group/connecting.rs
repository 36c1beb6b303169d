//! Connecting the devices of a group: of one process, or of several at the same time.
//!
//! ```text
//! the process that leads    makes ids ▸ announces them ▸ connects its devices ─┐▸ waits for the others
//! one that follows                       receives them ▸ connects its devices ─┘▸ says so
//! ```
//!
//! NCCL waits until all ranks have come, without a time limit. So it connects on a thread of its own. If a device is
//! absent, the caller stops waiting, and that thread goes on by itself.

use super::{CudaGroup, GroupIds, Links, Role};
use crate::driver::{CudaMemory, Device, Membership, Nccl, OPENING, explained};
use crate::error::{CudaError, Result};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// How often a thread that waits for the library looks whether a device is absent.
const LOOK: Duration = Duration::from_millis(5);

impl CudaGroup {
    /// Connects the group's devices: all of this process are open, and those of the others connect when they are told
    /// to. Each call makes new connections. In a group of one process, nothing is to be done.
    ///
    /// # Errors
    /// One sentence. The others are told to stop connecting.
    pub fn connect(&self) -> Result<()> {
        match &self.shared.role {
            Role::Alone => Ok(()),
            Role::Leads(_) => self.connect_all(),
            Role::Follows(_) => {
                Err(CudaError::Peer { reason: "the first process of the group connects it".into() })
            }
        }
    }

    /// Connects the devices of this process, which are open, with those of the other processes, which connect with the
    /// same ids at the same time. After a failure each of these devices must have rejoined before.
    ///
    /// # Errors
    /// One sentence; also if a device is [noted as absent](CudaGroup::note_absent). The other processes are told.
    pub fn connect_with(&self, ids: &GroupIds) -> Result<()> {
        let turn = self.turn();
        let outcome = self.links(ids).map(|links| self.seat_all(links));
        drop(turn);
        self.note_outcome(outcome)
    }

    /// Makes ids and connects all devices with them, while none of them runs.
    pub(super) fn connect_all(&self) -> Result<()> {
        let turn = self.turn();
        let outcome = self.connect_in_turn();
        drop(turn);
        self.note_outcome(outcome)
    }

    fn connect_in_turn(&self) -> Result<()> {
        let nccl = self.wiring()?.nccl;
        let ids = GroupIds::make(self.ids_needed(), || nccl.make_id())?;
        // Forgotten right before the ids are announced: absences noted from then on concern this connection.
        self.forget_absent();
        let others = self.shared.role.others();
        let peer = |reason| CudaError::Peer { reason };
        others.map_or(Ok(()), |others| others.announce(&ids)).map_err(peer)?;
        let links = self.links(&ids);
        if links.is_err() && others.is_some() {
            // The others do not wait for these devices.
            self.abandon();
        }
        let finished = others.map_or(Ok(()), |others| others.finish()).map_err(peer);
        let links = links?;
        finished?;
        self.seat_all(links);
        Ok(())
    }

    /// Keeps the reason why the devices are not connected. Other processes, which may wait for this one, are told.
    fn note_outcome(&self, outcome: Result<()>) -> Result<()> {
        self.members().reason = outcome.as_ref().err().cloned();
        if outcome.is_err() && self.shared.role.others().is_some() {
            self.abandon();
        }
        outcome
    }

    /// Communicators for one group: one of all devices, and one for each stage if these are several devices and fewer
    /// than all.
    pub(super) fn ids_needed(&self) -> usize {
        1 + if self.has_stage_links() { self.size() / self.shares } else { 0 }
    }

    fn has_stage_links(&self) -> bool {
        1 < self.shares && self.shares < self.size()
    }

    /// Connects the devices of this process by these ids. Waits for the other processes.
    fn links(&self, ids: &GroupIds) -> Result<Vec<Links>> {
        if ids.count() != self.ids_needed() {
            let reason = format!("the group needs {} ids, and has got {}", self.ids_needed(), ids.count());
            return Err(CudaError::Peer { reason });
        }
        let wiring = self.wiring()?;
        // When the library ends communicators, it must not bind this thread to a device of its own choice.
        wiring.devices[0].bind()?;
        // Mailboxes first: a device uses its mailbox as soon as it has a communicator, so it must be reset by then.
        for first in (0..self.size()).step_by(self.shares).filter(|first| self.is_local_stage(*first)) {
            let at = first - self.shared.local.start;
            self.connect_mailboxes(first, &wiring.devices[at..at + self.shares])?;
        }
        let (ids, is_wanted) = (ids.clone(), Arc::clone(&wiring.is_wanted));
        let look = || self.absent().map_or(Ok(()), |absent| Err(self.absence(absent)));
        let outcome = patiently(move || wiring.connect(&ids), look);
        if outcome.is_err() {
            is_wanted.store(false, Ordering::Release);
        }
        outcome
    }

    /// The parts of a connection of this process's devices.
    ///
    /// # Errors
    /// One of them is closed.
    fn wiring(&self) -> Result<Wiring> {
        let (members, local) = (self.members(), self.shared.local.clone());
        let devices: Vec<Arc<Device>> =
            members.devices[local.clone()].iter().filter_map(Weak::upgrade).collect();
        match &members.nccl {
            Some(nccl) if devices.len() == local.len() => Ok(Wiring {
                nccl: Arc::clone(nccl),
                devices,
                ranks: local,
                size: self.size(),
                shares: self.shares,
                has_stage_links: self.has_stage_links(),
                is_wanted: Arc::new(AtomicBool::new(true)),
            }),
            _ => Err(CudaError::Peer { reason: "a device of the group is closed".into() }),
        }
    }

    fn seat_all(&self, links: Vec<Links>) {
        for (rank, links) in self.shared.local.clone().zip(links) {
            let replaced = self.seat(rank).links.replace(links);
            // After the seat's lock is released: ending exchanges may take long.
            drop(replaced);
        }
    }
}

/// The parts with which a thread connects the devices of a process.
struct Wiring {
    nccl: Arc<Nccl>,
    devices: Vec<Arc<Device>>,
    /// Those of the devices.
    ranks: Range<usize>,
    /// Devices of the group, and of a stage.
    size: usize,
    shares: usize,
    has_stage_links: bool,
    /// Whether the caller still waits.
    is_wanted: Arc<AtomicBool>,
}

impl Wiring {
    fn connect(self, ids: &GroupIds) -> Result<Vec<Links>> {
        let words = |device: &Arc<Device>| {
            let words = CudaMemory::zeroed(device, 2 * size_of::<f32>());
            words.map_err(explained(device.ordinal(), OPENING))
        };
        // Freed after the communicators, if these fail: their kernels may wait with it.
        let memory: Vec<CudaMemory> = self.devices.iter().map(words).collect::<Result<_>>()?;
        let links = self.links(ids)?;
        if !self.is_wanted.load(Ordering::Acquire) {
            return Err(CudaError::Peer { reason: "nobody waits for this connection any more".into() });
        }
        self.connect_stages(&links, &memory)?;
        Ok(links)
    }

    fn links(&self, ids: &GroupIds) -> Result<Vec<Links>> {
        let ranked = || self.ranks.clone().zip(self.devices.iter().map(|device| &**device));
        let in_all = |(rank, device)| Membership { device, id: ids.of_all(), rank, size: self.size };
        let all = self.nccl.connect(&ranked().map(in_all).collect::<Vec<_>>())?.into_iter();
        if !self.has_stage_links {
            return Ok(all.map(|all| Links { all, stage: None }).collect());
        }
        let shares = self.shares;
        let in_stage = |(rank, device)| {
            let id = ids.of_stage(rank / shares);
            Membership { device, id, rank: rank % shares, size: shares }
        };
        let stages = self.nccl.connect(&ranked().map(in_stage).collect::<Vec<_>>())?;
        Ok(all.zip(stages).map(|(all, stage)| Links { all, stage: Some(stage) }).collect())
    }

    /// Sends a number from each stage to the next, with two words of each device: the library connects a sender and a
    /// receiver at their first exchange.
    fn connect_stages(&self, links: &[Links], memory: &[CudaMemory]) -> Result<()> {
        let (size, shares) = (self.size, self.shares);
        self.nccl.together(|| {
            for (at, rank) in self.ranks.clone().enumerate() {
                let (device, all) = (&self.devices[at], &links[at].all);
                device.bind()?;
                let (sent, received) = (memory[at].at(0), memory[at].at(size_of::<f32>()));
                // SAFETY: a word each of the device's memory, which is kept until the streams have passed, below.
                unsafe {
                    if rank + shares < size {
                        all.send(sent, 1, rank + shares, device)?;
                    }
                    if rank >= shares {
                        all.receive(received, 1, rank - shares, device)?;
                    }
                }
            }
            Ok(())
        })?;
        self.devices.iter().try_for_each(|device| device.bind().and_then(|()| device.synchronize()))
    }
}

/// Runs `work` on a thread of its own and waits for it. If `look` fails, returns that error at once. The thread then
/// goes on by itself, and its result is dropped.
fn patiently<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
    look: impl Fn() -> Result<()>,
) -> Result<T> {
    let lost = |what: &str| CudaError::Peer { reason: format!("the devices cannot be connected: {what}") };
    let (sender, receiver) = channel();
    let run = move || _ = sender.send(work());
    let thread = std::thread::Builder::new().name("keel-connect".into()).spawn(run);
    let thread = thread.map_err(|error| lost(&error.to_string()))?;
    loop {
        match receiver.recv_timeout(LOOK) {
            Ok(outcome) => {
                let _ = thread.join();
                return outcome;
            }
            Err(RecvTimeoutError::Timeout) => look()?,
            Err(RecvTimeoutError::Disconnected) => return Err(lost("a thread panicked, which is a bug")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn work_is_waited_for_until_a_device_is_absent() {
        assert_eq!(patiently(|| Ok(7), || Ok(())).expect("it ends"), 7);
        let slow = || {
            std::thread::sleep(3 * LOOK);
            Ok(8)
        };
        assert_eq!(patiently(slow, || Ok(())).expect("it ends"), 8);
        let never = || {
            std::thread::sleep(Duration::from_secs(3600));
            Ok(9)
        };
        let absent = || Err(CudaError::Peer { reason: "device 1 has failed".into() });
        let start = Instant::now();
        let error = patiently(never, absent).expect_err("it is left behind").to_string();
        assert!(error == "device 1 has failed" && start.elapsed() < Duration::from_secs(60), "{error}");
        let error = patiently(|| -> Result<()> { panic!("a bug") }, || Ok(())).expect_err("it panicked");
        assert!(error.to_string().contains("the devices cannot be connected: a thread panicked"));
    }

    #[test]
    fn a_grid_has_an_id_for_each_stage() {
        let needed = |size, shares| CudaGroup::of(size, shares)[0].ids_needed();
        assert_eq!([needed(1, 1), needed(2, 2), needed(2, 1), needed(4, 2), needed(6, 2)], [1, 1, 1, 3, 4]);
        let group = &CudaGroup::of(4, 2)[0];
        let ids = GroupIds::from_bytes(&[0; crate::driver::ID_BYTES]).expect("one id");
        let error = group.connect_with(&ids).expect_err("too few").to_string();
        assert!(error.contains("the group needs 3 ids, and has got 1"), "{error}");
    }
}
