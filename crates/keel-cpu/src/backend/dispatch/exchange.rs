//! Exchanges with other devices. One worker does them; the others wait at the barrier after the kernel.

use super::Call;
use crate::pool::Worker;
use keel_array::{ArrayError, Group, Op};

pub(super) fn run(call: &Call<'_>, worker: &Worker<'_>) -> Result<(), ArrayError> {
    if worker.index != 0 {
        return Ok(());
    }
    let Some(group) = call.group else {
        unreachable!("`supports` refuses exchanges of a device without a group")
    };
    let y = &call.outputs[0];
    let outcome = match call.kernel.op {
        Op::Send { to } => {
            let x = call.inputs[0].values::<f32>();
            // SAFETY: only this worker writes.
            let count = unsafe { y.shared::<u32>().range(0..1) };
            count[0] = x.len() as u32;
            group.send(to, x)
        }
        Op::Receive { from } => {
            let y = y.shared::<f32>();
            // SAFETY: only this worker writes.
            group.receive(from, unsafe { y.range(0..y.len()) })
        }
        Op::AllReduce { peers } | Op::ReduceScatter { peers } => {
            let y = y.shared::<f32>();
            // SAFETY: only this worker writes.
            let y = unsafe { y.range(0..y.len()) };
            let (kind, first) = match call.kernel.op {
                Op::ReduceScatter { .. } => ("reduce_scatter", (group.rank() - peers.first) * y.len()),
                _ => ("all_reduce", 0),
            };
            let own = first..first + y.len();
            group.exchange(kind, peers, call.inputs[0].values(), |i, x| match (i, &x[own.clone()]) {
                (0, x) => y.copy_from_slice(x),
                (_, x) => y.iter_mut().zip(x).for_each(|(y, x)| *y += x),
            })
        }
        Op::AllGather { peers } => {
            let (x, y) = (call.inputs[0].values::<f32>(), y.shared::<f32>());
            // SAFETY: only this worker writes.
            let y = unsafe { y.range(0..y.len()) };
            group
                .exchange("all_gather", peers, x, |i, x| y[i * x.len()..(i + 1) * x.len()].copy_from_slice(x))
        }
        ref op => unreachable!("{} is no exchange", op.name()),
    };
    outcome.map_err(|reason| call.error(reason))
}
