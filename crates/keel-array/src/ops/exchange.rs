//! Exchanges between the devices of a group: the operations of a model that is split over several of them.
//!
//! Each device has a runtime and runs a program of its own. Programs meet in these operations: a device waits in one
//! until its peers have come to theirs. So all devices must come to their exchanges in the same order.

use serde::{Deserialize, Serialize};

use super::Op;
use super::fast::expect_f32_in;
use crate::{Array, ArrayError, DType, Result, Runtime, Shape};

/// A device's place in its group, as its backend knows it.
pub trait Group: Send + Sync {
    /// The device's number, from 0 on.
    fn rank(&self) -> usize;

    /// How many devices there are.
    fn size(&self) -> usize;

    /// Whether all devices can compute at the same time. Those of a CPU with fewer threads take turns.
    fn is_concurrent(&self) -> bool {
        true
    }

    /// Whether some of its devices are in other processes.
    fn spans_processes(&self) -> bool {
        false
    }

    /// Tells the others that this device does not come to its exchanges any more: its step has failed. They stop
    /// waiting for it, with an error.
    fn abandon(&self);

    /// Forgets a failed step. Called for every device of the group, after the host has waited for that step on each of
    /// them. Steps that were begun after it end in this call, and their results are undefined.
    fn rejoin(&self);
}

/// Devices of a group with consecutive ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Peers {
    /// The first of them.
    pub first: usize,
    /// How many there are.
    pub count: usize,
}

impl Peers {
    /// Whether this device is one of them.
    pub fn contains(self, rank: usize) -> bool {
        self.ranks().contains(&rank)
    }

    /// Their ranks, in order.
    pub fn ranks(self) -> std::ops::Range<usize> {
        self.first..self.first + self.count
    }
}

impl Op {
    /// The devices of an exchange of several, this one among them; `None` for all other operations.
    pub fn peers(&self) -> Option<Peers> {
        match *self {
            Op::AllReduce { peers } | Op::AllGather { peers } | Op::ReduceScatter { peers } => Some(peers),
            _ => None,
        }
    }

    /// Checks that a device of this group can come to this exchange. Operations that are none are always possible.
    ///
    /// # Errors
    /// One sentence.
    pub fn check_exchange(&self, group: Option<&dyn Group>) -> Result<(), String> {
        let (peers, is_collective) = match (self.peers(), self) {
            (Some(peers), _) => (peers, true),
            (None, &(Op::Send { to: peer } | Op::Receive { from: peer })) => {
                (Peers { first: peer, count: 1 }, false)
            }
            (None, _) => return Ok(()),
        };
        let Some(group) = group else {
            return Err("this device is alone; make a group of devices first".into());
        };
        let (rank, size, ranks) = (group.rank(), group.size(), peers.ranks());
        if ranks.is_empty() || ranks.end > size {
            return Err(format!("devices {ranks:?} are not all in the group, which has {size}"));
        }
        match peers.contains(rank) == is_collective {
            true => Ok(()),
            false if is_collective => Err(format!("device {rank} is not one of the devices {ranks:?}")),
            false => Err(format!("device {rank} cannot exchange with itself")),
        }
    }
}

impl Array {
    /// Hands the elements to device `to` of the group, which must [receive](Array::receive) them. The result, u32
    /// `[1]`, is the number of elements. It exists so that a program can ask for the transfer.
    ///
    /// # Memory
    /// None except the result: the device waits until its peer has the elements.
    ///
    /// # Errors
    /// If this is no f32 array.
    pub fn send(&self, to: usize) -> Result<Array> {
        expect_f32_in("send", "x", self)?;
        Array::build(Op::Send { to }, &[self], Shape::from([1]), DType::U32)
    }

    /// The f32 elements that device `from` of the group sends.
    ///
    /// # Errors
    /// If the shape is too large to address.
    pub fn receive(runtime: &Runtime, shape: impl Into<Shape>, from: usize) -> Result<Array> {
        Array::create(runtime, Op::Receive { from }, shape.into(), DType::F32)
    }

    /// `y = x_first + x_(first + 1) + ...`, the sum of the arrays of all `peers`. All devices get the same bits. The
    /// order is this one, except that a GPU adds more than two arrays in another order unless it is deterministic.
    ///
    /// # Errors
    /// If this is no f32 array.
    pub fn all_reduce(&self, peers: Peers) -> Result<Array> {
        expect_f32_in("all_reduce", "x", self)?;
        Array::build(Op::AllReduce { peers }, &[self], self.shape().clone(), DType::F32)
    }

    /// The arrays of all `peers` along a new first axis, `[peers, ..]`.
    ///
    /// # Errors
    /// If this is no f32 array, or the result is too large to address.
    pub fn all_gather(&self, peers: Peers) -> Result<Array> {
        expect_f32_in("all_gather", "x", self)?;
        let shape = [peers.count].into_iter().chain(self.shape().iter().copied()).collect();
        Array::build(Op::AllGather { peers }, &[self], shape, DType::F32)
    }

    /// This device's part of the sum over `peers`. Peer `r`, counted from 0, gets
    /// `y = x_first[rows] + x_(first + 1)[rows] + ...` with `rows = r * n / count .. (r + 1) * n / count`. So
    /// [`all_gather`](Array::all_gather) of the parts has the elements of [`all_reduce`](Array::all_reduce).
    ///
    /// The order of addition is the order of ranks, except that a GPU adds more than two arrays in another order unless
    /// it is deterministic.
    ///
    /// # Shapes
    /// x `[n, ..]`, the same for all peers, where `count` divides `n`; y `[n / count, ..]`.
    ///
    /// # Dtypes
    /// f32; sums are f32.
    ///
    /// # Errors
    /// If this is no f32 array, or its first axis cannot be cut into a part for each peer.
    pub fn reduce_scatter(&self, peers: Peers) -> Result<Array> {
        expect_f32_in("reduce_scatter", "x", self)?;
        // A group without devices is refused by `check_exchange`, as for the other exchanges.
        let (shape, count) = (self.shape(), peers.count.max(1));
        let reason = match shape.split_first() {
            Some((n, rest)) if n.is_multiple_of(count) => {
                let shape = [n / count].into_iter().chain(rest.iter().copied()).collect();
                return Array::build(Op::ReduceScatter { peers }, &[self], shape, DType::F32);
            }
            Some((n, _)) => format!(
                "x {shape} has {n} rows, which {count} devices cannot share equally; pad it to a multiple of \
                 {count} rows"
            ),
            None => format!("x {shape} has no rows that {count} devices can share; reshape it to [n, ..]"),
        };
        Err(ArrayError::Argument { op: "reduce_scatter", reason })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Member(usize, usize);

    impl Group for Member {
        fn rank(&self) -> usize {
            self.0
        }
        fn size(&self) -> usize {
            self.1
        }
        fn abandon(&self) {}
        fn rejoin(&self) {}
    }

    #[test]
    fn an_exchange_that_cannot_happen_is_refused() {
        let refusal = |op: Op, rank| op.check_exchange(Some(&Member(rank, 3))).err().unwrap_or_default();
        let sum = |first, count| Op::AllReduce { peers: Peers { first, count } };
        assert_eq!(refusal(Op::Send { to: 2 }, 0), "");
        assert_eq!(refusal(sum(1, 2), 1), "");
        assert_eq!(refusal(Op::Copy, 1), "");
        assert_eq!(refusal(Op::Send { to: 0 }, 0), "device 0 cannot exchange with itself");
        assert!(
            refusal(Op::Receive { from: 3 }, 0)
                .contains("devices 3..4 are not all in the group, which has 3")
        );
        assert!(refusal(sum(1, 2), 0).contains("device 0 is not one of the devices 1..3"));
        assert!(refusal(sum(1, 0), 1).contains("not all in the group"));
        let part = |first, count| Op::ReduceScatter { peers: Peers { first, count } };
        assert_eq!(refusal(part(0, 2), 1), "");
        assert_eq!(refusal(part(0, 2), 2), "device 2 is not one of the devices 0..2");
        let alone = Op::Send { to: 1 }.check_exchange(None).expect_err("there is nobody");
        assert!(alone.contains("this device is alone"), "{alone}");
    }
}
