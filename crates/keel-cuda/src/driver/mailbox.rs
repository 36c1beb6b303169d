//! Memory of each GPU that its peers write, for sums of small arrays; see `kernels/one_shot_all_reduce.cu`.
//!
//! Only mailboxes are mapped for several GPUs. Everything else stays out of reach of the others.

#[cfg(test)]
mod protocol;

use super::device::DRAIN;
use super::nccl::allows_peer_access;
use super::{Device, GRANULE, OPENING, PinnedBuffer, Reservation, driver, explained};
use crate::error::Result;
use cudarc::driver::sys::CUdevice;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Most devices whose arrays are added so. Each writes to all others, so the bytes of a sum grow with their number.
pub(crate) const MAILBOXES_MAX: usize = 8;

/// Bytes of the longest array: 256 KiB, 12 rows of 5,120 columns. Decode steps of few sequences are shorter. In longer
/// arrays bytes count more than latency, and from 3 devices on each of them would send more than NCCL's ring does.
pub(crate) const ONE_SHOT_BYTES_MAX: usize = 256 << 10;

/// Groups of four floats. Each has a thread.
const FOUR_BYTES: usize = 4 * size_of::<f32>();
const GROUPS: usize = ONE_SHOT_BYTES_MAX / FOUR_BYTES;

/// Slots for each group: a fast peer writes the next sum while a slow one still reads the last.
const PARITIES: usize = 2;

/// A word for each thread.
const TURNS_BYTES: usize = GROUPS * size_of::<u32>();

/// Each byte of a slot to which nothing has come; `EMPTY` of the kernel.
const EMPTY: u8 = 0xff;

/// Threads of a block. Small blocks spread over many multiprocessors, and find room next to other kernels.
pub(crate) const ONE_SHOT_THREADS: usize = 128;

/// Bytes of a device's mailbox in a group of `devices`.
pub(crate) fn mailbox_bytes(devices: usize) -> usize {
    if !(2..=MAILBOXES_MAX).contains(&devices) {
        return 0;
    }
    (TURNS_BYTES + slots_bytes(devices)).next_multiple_of(GRANULE)
}

fn slots_bytes(devices: usize) -> usize {
    PARITIES * (devices - 1) * ONE_SHOT_BYTES_MAX
}

/// Blocks that add arrays of `elements` floats.
///
/// They wait for those of the peers. So on a GPU that ranks share, the blocks of all ranks must fit at the same time:
/// 128 of 128 threads each at most, of which a multiprocessor takes 12 or more.
pub(crate) fn one_shot_blocks(elements: usize) -> usize {
    elements.div_ceil(4 * ONE_SHOT_THREADS)
}

/// The kernel's constant `GROUPS`.
pub(crate) const ONE_SHOT_GROUPS: usize = GROUPS;

struct Mailbox {
    memory: Reservation,
    /// A word that tells the device's kernels to wait no more.
    stop: PinnedBuffer,
    /// Dropped last: its context is there until the memory is given back.
    device: Arc<Device>,
}

/// The mailboxes of devices that add small arrays.
pub(crate) struct Mailboxes {
    by_rank: Vec<Mailbox>,
}

impl Mailboxes {
    /// Mailboxes that are [reset](Mailboxes::reset); `None` if a device cannot write to another one's memory, or the
    /// user does not want it to.
    ///
    /// # Errors
    /// The driver's reason.
    pub fn open(devices: &[Arc<Device>]) -> Result<Option<Arc<Mailboxes>>> {
        let bytes = mailbox_bytes(devices.len());
        let is_mapped = devices.iter().all(|device| device.maps_memory);
        let ordinals: Vec<CUdevice> = devices.iter().map(|device| device.ordinal()).collect();
        if bytes == 0 || !is_mapped || !allows_peer_access() || !reach_each_other(&ordinals, can_reach)? {
            return Ok(None);
        }
        let mut mailboxes = Mailboxes { by_rank: Vec::new() };
        for device in devices {
            device.bind()?;
            let Some(mut memory) = Reservation::shared(device, bytes, &ordinals)? else { return Ok(None) };
            memory.grow(device, bytes).map_err(explained(device.ordinal(), OPENING))?;
            let stop = PinnedBuffer::new(device, size_of::<u32>())?;
            mailboxes.by_rank.push(Mailbox { device: Arc::clone(device), memory, stop });
        }
        mailboxes.reset()?;
        Ok(Some(Arc::new(mailboxes)))
    }

    /// Whether they are those of these devices.
    pub fn are_of(&self, devices: &[Arc<Device>]) -> bool {
        let own = self.by_rank.iter().map(|mailbox| Arc::as_ptr(&mailbox.device));
        own.eq(devices.iter().map(Arc::as_ptr))
    }

    /// Empties all slots and lets kernels wait again. No device may have work under way.
    ///
    /// # Errors
    /// A device still has work after 10 s, or the driver's reason.
    pub fn reset(&self) -> Result<()> {
        // A kernel that still runs on any device could write to the mailboxes of the others.
        self.by_rank.iter().try_for_each(|mailbox| mailbox.device.drain(DRAIN))?;
        let slots = slots_bytes(self.by_rank.len());
        for Mailbox { device, memory, .. } in &self.by_rank {
            device.bind()?;
            let (turns, stream) = (memory.start(), device.stream());
            // SAFETY: within the mailbox, which no kernel uses.
            unsafe {
                driver!(cuMemsetD8Async(turns, 0, TURNS_BYTES, stream))?;
                driver!(cuMemsetD8Async(turns + TURNS_BYTES as u64, EMPTY, slots, stream))?;
            }
            device.drain(DRAIN)?;
        }
        for mailbox in &self.by_rank {
            mailbox.stop.word().store(0, Ordering::Release);
        }
        Ok(())
    }

    /// Ends the sums of a device that wait for a peer, until all are [reset](Mailboxes::reset). Their results are
    /// undefined.
    pub fn stop(&self, rank: usize) {
        self.by_rank[rank].stop.word().store(1, Ordering::Release);
    }

    /// Addresses of the mailboxes, by rank; 0 for those beyond the last.
    pub fn addresses(&self) -> [u64; MAILBOXES_MAX] {
        std::array::from_fn(|rank| self.by_rank.get(rank).map_or(0, |mailbox| mailbox.memory.start()))
    }

    /// Address of the word that stops a device's kernels. The device reads it where the host has it.
    pub fn stop_address(&self, rank: usize) -> u64 {
        self.by_rank[rank].stop.address() as u64
    }
}

impl Drop for Mailboxes {
    /// Each device may write to all mailboxes, so none is freed before all devices have ended their work.
    fn drop(&mut self) {
        let is_done =
            self.by_rank.iter().all(|mailbox| mailbox.device.bind().is_ok() && mailbox.device.is_done());
        for mailbox in self.by_rank.drain(..) {
            if is_done {
                let _ = mailbox.device.bind();
                drop(mailbox);
            } else {
                tracing::error!("a mailbox is not freed: a device has not ended what may use it");
                std::mem::forget(mailbox);
            }
        }
    }
}

/// Whether every device reaches every other one. A device reaches itself.
fn reach_each_other(
    devices: &[CUdevice],
    can_reach: impl Fn(CUdevice, CUdevice) -> Result<bool>,
) -> Result<bool> {
    for &from in devices {
        for &to in devices {
            if from != to && !can_reach(from, to)? {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

fn can_reach(from: CUdevice, to: CUdevice) -> Result<bool> {
    let mut can = 0;
    // SAFETY: devices that exist; the pointer is to a local.
    unsafe { driver!(cuDeviceCanAccessPeer(&mut can, from, to))? };
    Ok(can != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mailbox_has_room_for_all_peers() {
        assert_eq!(ONE_SHOT_BYTES_MAX, 256 << 10);
        let granules: Vec<usize> = (0..=9).map(|devices| mailbox_bytes(devices) / GRANULE).collect();
        assert_eq!(granules, [0, 0, 1, 1, 1, 2, 2, 2, 2, 0]);
        for devices in 2..=MAILBOXES_MAX {
            let slots = PARITIES * (devices - 1) * GROUPS * FOUR_BYTES;
            assert!(TURNS_BYTES + slots <= mailbox_bytes(devices), "{devices} devices");
        }
        assert!(TURNS_BYTES.is_multiple_of(FOUR_BYTES), "slots are aligned");
    }

    #[test]
    fn each_group_has_a_thread_and_each_thread_a_slot() {
        let longest = ONE_SHOT_BYTES_MAX / size_of::<f32>();
        for elements in (1..5000).chain(longest - 5000..=longest) {
            let threads = one_shot_blocks(elements) * ONE_SHOT_THREADS;
            assert!(elements.div_ceil(4) <= threads && threads <= GROUPS, "{elements}: {threads} threads");
        }
        assert_eq!([1, 512, 513, 5120, longest].map(one_shot_blocks), [1, 1, 2, 10, 128]);
    }

    #[test]
    fn devices_add_in_one_shot_only_if_each_reaches_all() {
        let all = |_, _| Ok(true);
        let never = |_, _| Ok(false);
        let not_back = |from, to| Ok((from, to) != (2, 0));
        assert!(reach_each_other(&[0, 1, 2], all).expect("no driver is asked"));
        assert!(!reach_each_other(&[0, 1, 2], not_back).expect("no driver is asked"));
        assert!(reach_each_other(&[0, 1], not_back).expect("no driver is asked"), "2 is not one of them");
        assert!(reach_each_other(&[3, 3], never).expect("no driver is asked"), "one GPU with two ranks");
    }
}
