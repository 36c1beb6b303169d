//! Several GPUs of one process that exchange arrays.
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
//! Small arrays of a stage are added without the library, by mailboxes; see `kernels/one_shot_sum.cu`. Their kernels
//! end with the device's exchanges, too, and all mailboxes are reset when the devices are connected again.
//!
//! The end of a device's exchanges tells its kernels to stop. The last device to end them waits until no graph of any
//! device holds a communicator. A graph may be dropped only when it does not run. So communicators end on threads of
//! their own, all at the same time, while the graphs are dropped.

mod one_shot;

pub(super) use one_shot::OneShot;

use super::Gpu;
use crate::driver::{
    Communicator, CudaMemory, DRAIN, Device, Mailboxes, Messages, Nccl, apply_settings, communicator_bytes,
    mailbox_bytes,
};
use crate::error::{CudaError, Result};
use keel_array::{Op, Peers};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

/// No device has failed.
const NO_RANK: usize = usize::MAX;

/// A device's communicators: with all devices, and with those of its stage if these are fewer.
#[derive(Default)]
struct Seat {
    all: Option<Communicator>,
    stage: Option<Communicator>,
    /// Those of its stage, as long as the device is open.
    mailboxes: Option<Arc<Mailboxes>>,
}

/// The devices of a group, and the library that connects them.
#[derive(Default)]
struct Members {
    nccl: Option<Arc<Nccl>>,
    /// By rank; those that are open.
    devices: Vec<Weak<Device>>,
    /// How many have come back after a failure.
    back: usize,
    /// Why the devices are not connected.
    reason: Option<CudaError>,
}

struct Shared {
    members: Mutex<Members>,
    /// By rank. A device locks its own alone, because a call of the library may wait for the peers.
    seats: Vec<Mutex<Seat>>,
    /// The device that has failed.
    absent: AtomicUsize,
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
        assert!(shares > 0 && size.is_multiple_of(shares), "{size} devices are no stages of {shares}");
        if size > 1 {
            apply_settings();
        }
        let devices = std::iter::repeat_with(Weak::new).take(size).collect();
        let members = Members { devices, ..Members::default() };
        let shared = Arc::new(Shared {
            members: Mutex::new(members),
            seats: (0..size).map(|_| Mutex::default()).collect(),
            absent: AtomicUsize::new(NO_RANK),
        });
        (0..size).map(|rank| CudaGroup { shared: Arc::clone(&shared), rank, shares }).collect()
    }

    /// Whether NCCL may connect a GPU with itself, so that several devices of a group are one GPU. It is for tests: the
    /// devices share the GPU's memory, and a graph with NCCL's kernels does not end.
    pub fn may_share_a_gpu() -> bool {
        std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|set| set == "1")
    }

    pub(super) fn size(&self) -> usize {
        self.shared.seats.len()
    }

    /// The devices of this one's stage.
    fn stage(&self) -> Peers {
        Peers { first: self.rank / self.shares * self.shares, count: self.shares }
    }

    /// The most bytes of the device's memory that NCCL takes, and its mailbox. They are counted also where devices turn
    /// out not to reach each other, because a plan cannot know.
    pub(super) fn buffer_bytes(&self) -> u64 {
        let (size, shares) = (self.size(), self.shares);
        if size == 1 {
            return 0;
        }
        let (received, sent) = (self.rank >= shares, self.rank + shares < size);
        let messages = Messages { received: received.into(), sent: sent.into() };
        let stage = (1 < shares && shares < size).then(|| communicator_bytes(shares, Messages::default()));
        communicator_bytes(size, messages) + stage.unwrap_or(0) + mailbox_bytes(shares) as u64
    }

    /// Refuses an exchange with devices that have no communicator.
    pub(super) fn supports(&self, op: &Op) -> Result<(), String> {
        let (Op::AllReduce { peers } | Op::AllGather { peers }) = op else { return Ok(()) };
        if peers.count == 1 || peers.count == self.size() || *peers == self.stage() {
            return Ok(());
        }
        let (wanted, stage) = (peers.ranks(), self.stage().ranks());
        Err(format!(
            "devices {wanted:?} cannot add arrays: GPUs do that with their stage, {stage:?}, or with all"
        ))
    }

    /// Brings a device into the group. The last one connects all.
    pub(super) fn join(&self, device: &Arc<Device>) -> Result<()> {
        let mut members = self.members();
        if members.nccl.is_none() {
            members.nccl = Some(Nccl::load()?);
        }
        members.devices[self.rank] = Arc::downgrade(device);
        let watching = self.clone();
        device.watch(move || watching.check());
        if members.devices.iter().all(|device| device.strong_count() > 0) {
            self.connect(&members)?;
        }
        Ok(())
    }

    fn members(&self) -> MutexGuard<'_, Members> {
        self.shared.members.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn seat(&self, rank: usize) -> MutexGuard<'_, Seat> {
        self.shared.seats[rank].lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Connects all devices, while none of them runs.
    fn connect(&self, members: &Members) -> Result<()> {
        let devices: Vec<Arc<Device>> = members.devices.iter().filter_map(Weak::upgrade).collect();
        let Some(nccl) = members.nccl.as_ref().filter(|_| devices.len() == self.size()) else {
            return Err(CudaError::Peer { reason: "a device of the group is closed".into() });
        };
        // First, because a device that has a communicator takes its mailbox to be reset.
        for (stage, devices) in devices.chunks(self.shares).enumerate() {
            self.connect_mailboxes(stage * self.shares, devices)?;
        }
        for (rank, communicator) in nccl.connect(&devices)?.into_iter().enumerate() {
            self.seat(rank).all = Some(communicator);
        }
        if self.shares > 1 && self.shares < self.size() {
            for (stage, devices) in devices.chunks(self.shares).enumerate() {
                for (share, communicator) in nccl.connect(devices)?.into_iter().enumerate() {
                    self.seat(stage * self.shares + share).stage = Some(communicator);
                }
            }
        }
        self.connect_stages(nccl, &devices)
    }

    /// Sends a number from each stage to the next: the library connects a sender and a receiver at their first
    /// exchange.
    fn connect_stages(&self, nccl: &Nccl, devices: &[Arc<Device>]) -> Result<()> {
        let (size, shares) = (self.size(), self.shares);
        let words = |device| CudaMemory::zeroed(device, 2 * size_of::<f32>(), false);
        let memory: Vec<CudaMemory> = devices.iter().map(words).collect::<Result<_>>()?;
        nccl.together(|| {
            for (rank, device) in devices.iter().enumerate() {
                device.bind()?;
                let seat = self.seat(rank);
                let Some(all) = &seat.all else { continue };
                let (sent, received) = (memory[rank].at(0), memory[rank].at(size_of::<f32>()));
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
        devices.iter().try_for_each(|device| device.bind().and_then(|()| device.synchronize()))
    }

    /// The error of a device that waits: a peer has failed, or a connection.
    fn check(&self) -> Result<()> {
        let absent = self.shared.absent.load(Ordering::Acquire);
        if absent != NO_RANK && absent != self.rank {
            let rank = self.rank;
            let reason = format!("device {absent} of the group has failed, and device {rank} waited for it");
            return Err(CudaError::Peer { reason });
        }
        let seat = self.seat(self.rank);
        let failure = [&seat.all, &seat.stage].into_iter().flatten().find_map(Communicator::failure);
        failure.map_or(Ok(()), |error| Err(CudaError::Peer { reason: error.to_string() }))
    }

    /// Ends this device's exchanges, while `drop_graphs` drops the graphs that hold them.
    fn leave(&self, device: &Arc<Device>, drop_graphs: impl FnOnce()) {
        let (all, stage) = {
            let mut seat = self.seat(self.rank);
            if let Some(mailboxes) = &seat.mailboxes {
                mailboxes.stop(self.rank % self.shares);
            }
            (seat.all.take(), seat.stage.take())
        };
        std::thread::scope(|scope| {
            for communicator in [all, stage].into_iter().flatten() {
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
        self.shared.absent.load(Ordering::Acquire) != NO_RANK
    }

    pub(super) fn abandon(&self) {
        let _ = self.shared.absent.compare_exchange(NO_RANK, self.rank, Ordering::AcqRel, Ordering::Acquire);
    }

    /// As [`keel_array::Group::rejoin`]. What was sent and not received would stay in the library's buffers, so all
    /// devices connect again.
    pub(super) fn rejoin(&self, gpu: &Gpu) {
        if !self.has_failed() {
            return;
        }
        // Its own stream may hold exchanges as well, whatever its failure was.
        gpu.session().end_exchanges(gpu);
        let mut members = self.members();
        members.back += 1;
        if members.back == self.size() {
            members.back = 0;
            self.shared.absent.store(NO_RANK, Ordering::Release);
            members.reason = self.connect(&members).err();
            if let Some(error) = &members.reason {
                tracing::error!("the devices cannot be connected again: {error}");
            }
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
        match if of_stage { &seat.stage } else { &seat.all } {
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
        let _ = self.device.bind();
        self.group.leave(&self.device, || ());
        let mailboxes = self.group.seat(self.group.rank).mailboxes.take();
        // The seat is not locked any more: the last one waits for the devices, which look at their seats.
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
mod tests {
    use super::*;

    #[test]
    fn gpus_exchange_with_their_stage_or_with_all() {
        let groups = CudaGroup::of(4, 2);
        let sum = |first, count| Op::AllReduce { peers: Peers { first, count } };
        for (rank, first) in [(0, 0), (1, 0), (2, 2), (3, 2)] {
            assert_eq!(groups[rank].supports(&sum(first, 2)), Ok(()));
            assert_eq!(groups[rank].supports(&sum(0, 4)), Ok(()));
            assert_eq!(groups[rank].supports(&Op::Send { to: 0 }), Ok(()));
        }
        let refusal = groups[1].supports(&sum(0, 3)).expect_err("three are no stage");
        assert!(refusal.contains("devices 0..3 cannot add arrays") && refusal.contains("0..2"), "{refusal}");
    }

    #[test]
    fn a_group_counts_what_nccl_takes_of_each_device() {
        let bytes = |size, shares| -> Vec<u64> {
            CudaGroup::of(size, shares).iter().map(CudaGroup::buffer_bytes).collect()
        };
        assert_eq!(bytes(1, 1), [0]);
        let [tensor, other] = bytes(2, 2)[..] else { unreachable!("two devices") };
        assert!(tensor == other && tensor > 0);
        let [first, last] = bytes(2, 1)[..] else { unreachable!("two devices") };
        assert!(tensor < first && first < last, "a receiver has the buffers of messages: {first}, {last}");
        assert!(bytes(4, 2)[0] > bytes(4, 1)[0], "a stage of several devices has a communicator of its own");
    }

    #[test]
    fn settings_are_made_with_the_first_group() {
        let _group = CudaGroup::of(2, 2);
        assert_eq!(std::env::var("NCCL_NVLS_ENABLE").as_deref(), Ok("0"));
        assert_eq!(std::env::var("NCCL_MAX_NCHANNELS").as_deref(), Ok("16"));
    }

    #[test]
    fn a_device_that_waits_learns_of_one_that_failed() {
        let groups = CudaGroup::of(3, 3);
        assert!(groups.iter().all(|group| group.check().is_ok()));
        groups[1].abandon();
        groups[2].abandon();
        let error = groups[0].check().expect_err("device 1 has failed").to_string();
        assert!(error.contains("device 1 of the group has failed, and device 0 waited for it"), "{error}");
        assert!(groups[1].check().is_ok(), "its own failure is another error");
        let error = groups[0].with(None, |_| Ok(())).expect_err("no device is connected").to_string();
        assert!(error.contains("the devices are not connected"), "{error}");
    }
}
