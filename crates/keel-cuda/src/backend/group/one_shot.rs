//! Sums of small arrays without NCCL.

use super::CudaGroup;
use crate::driver::{Device, MAILBOXES_MAX, Mailboxes, ONE_SHOT_BYTES_MAX, ONE_SHOT_GROUPS, mailbox_bytes};
use crate::error::Result;
use crate::kernels::{KernelKey, ONE_SHOT_ALL_REDUCE};
use keel_array::Peers;
use std::sync::Arc;

/// How a device adds a small array to those of its stage.
#[derive(Clone, Debug)]
pub(in crate::backend) struct OneShot {
    /// Addresses, by rank in the stage; 0 for those beyond the last.
    pub mailboxes: [u64; MAILBOXES_MAX],
    /// The device's rank in the stage.
    pub rank: usize,
    /// Address of the word that stops its kernel.
    pub stop: u64,
    pub kernel: KernelKey,
}

impl CudaGroup {
    /// The kernel that adds small arrays of a stage; `None` if its devices never have mailboxes, because they are too
    /// many, or of several processes.
    pub(in crate::backend) fn one_shot_kernel(&self) -> Option<KernelKey> {
        let key = || {
            KernelKey::new(ONE_SHOT_ALL_REDUCE, "one_shot_all_reduce")
                .define("COUNT", self.shares)
                .define("GROUPS", ONE_SHOT_GROUPS)
                .define("SHARED_GPU", u8::from(self.shared.may_share_a_gpu))
        };
        (mailbox_bytes(self.shares) > 0 && self.is_local_stage(self.stage().first)).then(key)
    }

    /// Opens the mailboxes of a stage whose first rank is `first`, or resets them.
    pub(super) fn connect_mailboxes(&self, first: usize, devices: &[Arc<Device>]) -> Result<()> {
        let before = self.seat(first).mailboxes.clone().filter(|mailboxes| mailboxes.are_of(devices));
        let mailboxes = match before {
            Some(mailboxes) => mailboxes.reset().map(|()| Some(mailboxes))?,
            None => Mailboxes::open(devices).unwrap_or_else(|error| {
                tracing::warn!("small sums take NCCL: the devices' mailboxes cannot be opened: {error}");
                None
            }),
        };
        for rank in first..first + devices.len() {
            let replaced = std::mem::replace(&mut self.seat(rank).mailboxes, mailboxes.clone());
            // After the seat's lock is released: the last drop waits for the devices, which lock their seats.
            drop(replaced);
        }
        Ok(())
    }

    /// Whether mailboxes have room for arrays of `elements` floats of `peers`. The same for all of them, so all choose
    /// alike.
    fn is_one_shot(&self, peers: Peers, elements: usize) -> bool {
        peers == self.stage() && elements <= ONE_SHOT_BYTES_MAX / size_of::<f32>()
    }

    /// How to add arrays of `elements` floats with `peers` by mailboxes; `None` if NCCL adds them.
    pub(in crate::backend) fn one_shot(&self, peers: Peers, elements: usize) -> Option<OneShot> {
        if !self.is_one_shot(peers, elements) {
            return None;
        }
        let seat = self.seat(self.rank);
        // Mailboxes outlast a failure. They are reset before the devices are connected again.
        let mailboxes = seat.mailboxes.as_ref().filter(|_| seat.links.is_some())?;
        let (rank, kernel) = (self.rank - peers.first, self.one_shot_kernel()?);
        Some(OneShot { mailboxes: mailboxes.addresses(), rank, stop: mailboxes.stop_address(rank), kernel })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::group::Role;
    use crate::backend::group::tests::Told;
    use crate::driver::{Extent, communicator_bytes};

    #[test]
    fn small_sums_of_a_stage_take_mailboxes() {
        let groups = CudaGroup::of(4, 2);
        let stage = |first| Peers { first, count: 2 };
        for (group, first) in groups.iter().zip([0, 0, 2, 2]) {
            assert!(group.is_one_shot(stage(first), 1) && group.is_one_shot(stage(first), 65_536));
            assert!(!group.is_one_shot(stage(first), 65_537), "too long");
            assert!(!group.is_one_shot(Peers { first: 0, count: 4 }, 1), "no mailboxes of all");
            assert!(group.one_shot(stage(first), 1).is_none(), "no device is connected");
        }
    }

    #[test]
    fn the_mailboxes_of_a_stage_are_counted() {
        let with = |size, shares| CudaGroup::of(size, shares)[0].buffer_bytes();
        let nccl = |devices| communicator_bytes(Extent { devices, ..Extent::default() });
        assert_eq!(with(2, 2), nccl(2) + (2 << 20));
        assert_eq!(with(8, 8), nccl(8) + (4 << 20));
        assert_eq!(with(9, 9), nccl(9), "too many for mailboxes");
        assert!(CudaGroup::of(4, 2)[0].one_shot_kernel().is_some());
        assert!(CudaGroup::of(4, 1)[0].one_shot_kernel().is_none(), "stages of one device add nothing");
    }

    /// Ranks 1 to 3 of three stages of two: the stages of ranks 0 and 1, and of ranks 2 and 3.
    #[test]
    fn only_a_stage_of_one_process_has_mailboxes() {
        let groups = CudaGroup::across(6, 2, 1..4, Role::Follows(Told::new()));
        let adds: Vec<bool> = groups.iter().map(|group| group.one_shot_kernel().is_some()).collect();
        assert_eq!(adds, [false, true, true]);
        let planned = CudaGroup::planned(6, 2);
        for group in groups {
            assert_eq!(group.buffer_bytes(), planned[group.rank].buffer_bytes(), "device {}", group.rank);
        }
    }
}
