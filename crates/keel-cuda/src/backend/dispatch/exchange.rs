//! Exchanges with other devices, by NCCL on the device's stream. All devices come to them in the same order, each on a
//! thread of its own; a graph may hold them.
//!
//! A sum of two arrays has the same bits in any order. The library adds more of them in an order that depends on sizes
//! and connections, so in the deterministic mode the arrays are gathered in scratch and added by rank.

use super::{Call, Geometry};
use crate::backend::Mode;
use crate::driver::{Arguments, Communicator, driver};
use crate::error::Result;
use crate::kernels::{EXCHANGE, KernelKey};
use keel_array::{ArrayError, Kernel, Op, Peers};

/// Whether the arrays of these devices are added by rank here.
fn adds_by_rank(peers: Peers, mode: Mode) -> bool {
    mode.deterministic && peers.count > 2
}

/// Scratch for the arrays of all devices, where they are added here.
pub(super) fn workspace_bytes(kernel: &Kernel, mode: Mode) -> usize {
    match kernel.op {
        Op::AllReduce { peers } if adds_by_rank(peers, mode) => {
            peers.count * kernel.outputs[0].layout.shape.elements() * size_of::<f32>()
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
        Op::AllReduce { peers } | Op::AllGather { peers } if peers.count == 1 => {
            let copied = call.copy(from, y.address, count * size_of::<f32>());
            copied.map_err(|e| e.in_op(call.kernel.op.name()))
        }
        Op::AllReduce { peers } if adds_by_rank(peers, call.mode) => {
            let scratch = call.scratch;
            // SAFETY: as above; the scratch has room for the arrays of all devices.
            exchange(call, Some(peers), |c| unsafe { c.all_gather(from, scratch, count, device) })?;
            let arguments =
                Arguments::default().pointer(scratch).pointer(y.address).u64(count).u32(peers.count);
            call.launch(&KernelKey::new(EXCHANGE, "add_shares"), Geometry::elements(count), arguments)
        }
        Op::AllReduce { peers } => {
            // SAFETY: as above.
            exchange(call, Some(peers), |c| unsafe { c.all_reduce(from, y.address, count, device) })
        }
        Op::AllGather { peers } => {
            // SAFETY: as above; the result has room for the arrays of all devices.
            exchange(call, Some(peers), |c| unsafe { c.all_gather(from, y.address, count, device) })
        }
        ref op => unreachable!("{} is no exchange", op.name()),
    }
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
    if call.gpu.is_listing() {
        return Ok(());
    }
    let Some(membership) = &call.gpu.membership else {
        unreachable!("`supports` refuses exchanges of a device without a group")
    };
    membership.group.with(peers, work).map_err(|e| e.in_op(call.kernel.op.name()))?;
    // The library's kernels wait for all kernels before them, and need not be followed by the kernel's own end: so the
    // next kernel must not start early.
    call.gpu.hold_next();
    call.settle();
    Ok(())
}
