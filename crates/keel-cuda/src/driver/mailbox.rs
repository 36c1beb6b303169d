//! Memory of each GPU that its peers write, for sums of small arrays; see `kernels/one_shot_sum.cu`.
//!
//! Only mailboxes are mapped for several GPUs. Everything else stays out of reach of the others.

#[cfg(test)]
mod protocol;

use super::device::DRAIN;
use super::nccl::allows_peer_access;
use super::{Device, GRANULE, PinnedBuffer, Reservation, driver};
use crate::error::Result;
use cudarc::driver::sys::CUdevice;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Most devices whose arrays are added so. Each writes to all others, so the bytes of a sum grow with their number.
pub(crate) const MAILBOXES_MAX: usize = 8;

/// Blocks of the kernel. They are few, so that the kernels of several ranks run at the same time on one GPU.
const BLOCKS: usize = 16;

/// Groups of four floats that a block adds.
const SLICE: usize = 1024;
const FOUR_BYTES: usize = 4 * size_of::<f32>();

/// Places for each slice: a fast peer writes the next sum while a slow one still reads the last.
const PARITIES: usize = 2;

/// A block's flags, and its progress.
const LINE_BYTES: usize = 128;
const HEAD_BYTES: usize = 2 * BLOCKS * LINE_BYTES;

/// Bytes of the longest array: 256 KiB, 12 rows of 5,120 columns. Decode steps of few sequences are shorter. In longer
/// arrays bytes count more than latency, and from 3 devices on each of them would send more than NCCL's ring does.
pub(crate) const ONE_SHOT_BYTES_MAX: usize = BLOCKS * SLICE * FOUR_BYTES;

/// Threads of a block, each of which takes a group of four floats at a time.
pub(crate) const ONE_SHOT_THREADS: usize = 256;

/// Bytes of a device's mailbox in a group of `devices`.
pub(crate) fn mailbox_bytes(devices: usize) -> usize {
    if !(2..=MAILBOXES_MAX).contains(&devices) {
        return 0;
    }
    (HEAD_BYTES + PARITIES * (devices - 1) * ONE_SHOT_BYTES_MAX).next_multiple_of(GRANULE)
}

/// Blocks that add arrays of `elements` floats.
pub(crate) fn one_shot_blocks(elements: usize) -> usize {
    elements.div_ceil(4 * ONE_SHOT_THREADS).clamp(1, BLOCKS)
}

/// The kernel's constants.
pub(crate) const ONE_SHOT_CONSTANTS: [(&str, usize); 3] =
    [("BLOCKS", BLOCKS), ("SLICE", SLICE), ("PARITIES", PARITIES)];

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
            memory.grow(device, bytes)?;
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

    /// Forgets what was sent, and lets kernels wait again. No device runs.
    ///
    /// # Errors
    /// A device does run.
    pub fn reset(&self) -> Result<()> {
        // What still runs anywhere could write to the others.
        self.by_rank.iter().try_for_each(|mailbox| mailbox.device.drain(DRAIN))?;
        for Mailbox { device, memory, .. } in &self.by_rank {
            device.bind()?;
            // SAFETY: within the mailbox, which no kernel uses.
            unsafe { driver!(cuMemsetD8Async(memory.start(), 0, HEAD_BYTES, device.stream()))? };
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
            let slots = PARITIES * (devices - 1) * BLOCKS * SLICE * FOUR_BYTES;
            assert!(HEAD_BYTES + slots <= mailbox_bytes(devices), "{devices} devices");
        }
    }

    /// A block's line holds its flags of all peers, and its slice is no longer than a slot.
    #[test]
    fn blocks_stay_within_their_slots() {
        assert!(MAILBOXES_MAX * size_of::<u32>() <= LINE_BYTES);
        let longest = ONE_SHOT_BYTES_MAX / size_of::<f32>();
        for elements in (1..5000).chain(longest - 5000..=longest) {
            let (fours, blocks) = (elements.div_ceil(4), one_shot_blocks(elements));
            let slice = fours.div_ceil(blocks);
            assert!(
                (1..=BLOCKS).contains(&blocks) && slice <= SLICE,
                "{elements}: {slice} in {blocks} blocks"
            );
        }
        assert_eq!([1, 1024, 1025, 5120, longest].map(one_shot_blocks), [1, 1, 2, 5, 16]);
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
