//! The laws of the array runtime, on the CPU: who owns memory and for how long, how much is submitted at once, and that
//! lazy evaluation changes no bit. The numbered failures are those of the design.

mod arena;
mod bounds;
mod custom_kernels;
mod ownership;
mod prepared;
mod random_graphs;
mod refusals;
mod submission;
mod watched;
mod weights;

use keel_array::{Runtime, RuntimeOptions};
use keel_cpu::{CpuBackend, CpuOptions};
use keel_testkit::checks::ownership::counting;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// Two workers; freed memory is filled with NaN.
fn backend() -> CpuBackend {
    CpuBackend::new(CpuOptions { threads: Some(2), poison_freed: true, ..CpuOptions::default() })
}

fn runtime_with(options: RuntimeOptions) -> Runtime {
    Runtime::new(Arc::new(backend()), options)
}

fn runtime() -> Runtime {
    runtime_with(RuntimeOptions::default())
}

/// Bytes that the ledger counts, of all categories.
fn active(runtime: &Runtime) -> u64 {
    runtime.ledger().active().total()
}

/// Does `work` while another thread gives the runtime's idle memory back, again and again. Without pauses it would take
/// the device before anyone else could.
fn while_resting(runtime: &Runtime, work: impl FnOnce()) {
    const PAUSE: Duration = Duration::from_micros(50);
    let (working, ended) = channel::<()>();
    std::thread::scope(move |scope| {
        scope.spawn(move || {
            while ended.recv_timeout(PAUSE) == Err(RecvTimeoutError::Timeout) {
                runtime.release_idle_memory();
            }
        });
        // It is dropped when the work ends, also by a panic.
        let _working = working;
        work();
    });
}
