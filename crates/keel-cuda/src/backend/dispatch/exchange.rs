//! Exchanges with other devices, by NCCL on the device's stream. All devices come to them in the same order, each on a
//! thread of its own; a graph may hold them.
//!
//! Small arrays of a stage are added in one shot, in the order of ranks, where its devices reach each other's memory.
//! The library adds the others. A sum of two arrays has the same bits in any order. The library adds more of them in an
//! order that depends on sizes and connections, so in the deterministic mode the arrays are gathered in scratch and
//! added by rank. A sum in parts never takes one shot.

use super::{Call, Geometry};
use crate::backend::Mode;
use crate::backend::group::{CudaGroup, OneShot};
use crate::driver::{Communicator, ONE_SHOT_THREADS, driver, one_shot_blocks};
use crate::error::Result;
use crate::kernels::{EXCHANGE, KernelKey};
use crate::parameters::{AddShares, OneShotAllReduce, Wide};
use keel_array::{ArrayError, Kernel, Op, Peers};

/// Whether the arrays of these devices are added by rank here.
fn adds_by_rank(peers: Peers, mode: Mode) -> bool {
    mode.is_deterministic() && peers.count > 2
}

/// Scratch for the arrays of all devices, where they are added here.
pub(super) fn workspace_bytes(kernel: &Kernel, mode: Mode) -> usize {
    match kernel.op {
        Op::AllReduce { peers } | Op::ReduceScatter { peers } if adds_by_rank(peers, mode) => {
            peers.count * kernel.inputs[0].layout.shape.elements() * size_of::<f32>()
        }
        _ => 0,
    }
}

pub(super) fn run(call: &Call<'_>) -> Result<(), ArrayError> {
    let (device, y) = (&*call.gpu.device, &call.outputs[0]);
    let x = call.inputs.first();
    let (from, count) = x.map_or((0, 0), |x| (x.address, x.len()));
    match call.kernel.op {
        Op::Send { to } => {
            write_count(call, count)?;
            // SAFETY: the operand was checked against its memory, which the launch owns.
            exchange(call, None, |all| unsafe { all.send(from, count, to, device) })
        }
        Op::Receive { from } => {
            // SAFETY: as above.
            exchange(call, None, |all| unsafe { all.receive(y.address, y.len(), from, device) })
        }
        ref op if op.peers().is_some_and(|peers| peers.count == 1) => {
            let copied = call.copy(from, y.address, count * size_of::<f32>());
            copied.map_err(|e| e.in_op(call.kernel.op.name()))
        }
        Op::AllReduce { peers } => all_reduce(call, peers, from, count),
        Op::AllGather { peers } => {
            // SAFETY: as above; the result has room for the arrays of all devices.
            exchange(call, Some(peers), |c| unsafe { c.all_gather(from, y.address, count, device) })
        }
        Op::ReduceScatter { peers } if adds_by_rank(peers, call.mode) => {
            add_by_rank(call, peers, (group(call).rank - peers.first) * y.len())
        }
        Op::ReduceScatter { peers } => {
            // SAFETY: as above; the operand has a part of the result's size for each device.
            exchange(call, Some(peers), |c| unsafe { c.reduce_scatter(from, y.address, y.len(), device) })
        }
        ref op => unreachable!("{} is no exchange", op.name()),
    }
}

/// Puts the sum of the arrays of `peers`, `count` floats each, on the stream.
fn all_reduce(call: &Call<'_>, peers: Peers, from: u64, count: usize) -> Result<(), ArrayError> {
    let (device, y) = (&*call.gpu.device, call.outputs[0].address);
    if let Some(one_shot) = group(call).one_shot(peers, count) {
        return add_in_one_shot(call, &one_shot);
    }
    if adds_by_rank(peers, call.mode) {
        return add_by_rank(call, peers, 0);
    }
    // SAFETY: the operands were checked against their memory, which the launch owns.
    exchange(call, Some(peers), |c| unsafe { c.all_reduce(from, y, count, device) })
}

/// Gathers the arrays of `peers` in scratch. Then adds their elements from `first` on, as many as the result has.
fn add_by_rank(call: &Call<'_>, peers: Peers, first: usize) -> Result<(), ArrayError> {
    let (device, x, y) = (&*call.gpu.device, &call.inputs[0], &call.outputs[0]);
    let (scratch, n, stride) = (call.scratch, y.len(), x.len());
    // SAFETY: the operand was checked against its memory, and the scratch has room for the arrays of all devices. The
    // launch owns both.
    exchange(call, Some(peers), |c| unsafe { c.all_gather(x.address, scratch, stride, device) })?;
    let shares = scratch + (first * size_of::<f32>()) as u64;
    let parameters = AddShares { shares, y: y.address, n: Wide(n), stride: Wide(stride), count: peers.count };
    call.launch(&KernelKey::new(EXCHANGE, "add_shares"), Geometry::elements(n), &parameters)
}

/// Unlike NCCL's kernels, this one waits for the kernels before it, and later kernels wait for its end. So kernels
/// around it may overlap as usual.
fn add_in_one_shot(call: &Call<'_>, one_shot: &OneShot) -> Result<(), ArrayError> {
    let n = call.inputs[0].len();
    let blocks = one_shot_blocks(n);
    let geometry = Geometry { grid: (blocks, 1, 1), block: (ONE_SHOT_THREADS, 1, 1), shared_bytes: 0 };
    let parameters = OneShotAllReduce {
        x: call.inputs[0].address,
        y: call.outputs[0].address,
        n,
        mailboxes: one_shot.mailboxes,
        rank: one_shot.rank,
        stop: one_shot.stop,
    };
    call.launch(&one_shot.kernel, geometry, &parameters)
}

fn group<'a>(call: &Call<'a>) -> &'a CudaGroup {
    let Some(membership) = &call.gpu.membership else {
        unreachable!("`supports` refuses exchanges of a device without a group")
    };
    &membership.group
}

/// Puts the result of a send on the stream.
fn write_count(call: &Call<'_>, count: usize) -> Result<(), ArrayError> {
    if call.gpu.is_listing() {
        return Ok(());
    }
    let (to, stream) = (call.outputs[0].address, call.gpu.device.stream());
    let count = u32::try_from(count).map_err(|_| call.error(format!("{count} elements at once")))?;
    // SAFETY: one word, which was checked against its memory.
    let written = unsafe { driver!(cuMemsetD32Async(to, count, 1, stream)) };
    written.map_err(|e| e.in_op(call.kernel.op.name()))
}

/// Puts an exchange with `peers`, or with one of all devices, on the stream.
fn exchange(
    call: &Call<'_>,
    peers: Option<Peers>,
    work: impl FnOnce(&Communicator) -> Result<()>,
) -> Result<(), ArrayError> {
    // NCCL's kernels do not take part in the overlap of launches. So the next kernel is launched without overlap.
    call.settle();
    if call.gpu.is_listing() {
        return Ok(());
    }
    group(call).with(peers, work).map_err(|e| e.in_op(call.kernel.op.name()))?;
    call.gpu.hold_next();
    Ok(())
}
