//! The synchronisation of files that `tests/interleavings.rs` compiles with loom's types instead.

pub(crate) use std::sync::{Arc, Condvar, Mutex, MutexGuard, atomic};

/// Spins before a waiting thread yields its time slice: a few microseconds. On a quiet machine a yield returns at once,
/// so waiting stays as fast. On a busy machine the core goes to a thread that can make progress, often the worker that
/// is waited for.
const SPINS_BEFORE_YIELD: u32 = 128;

/// Rounds of waiting after which an idle helper parks: a few hundred microseconds on a quiet machine, longer than the
/// gap between two steps of a generation.
pub(crate) const ROUNDS_BEFORE_PARK: u32 = 2_000;

/// One round of waiting, the `round`-th in a row.
#[inline]
pub(crate) fn relax(round: u32) {
    if round < SPINS_BEFORE_YIELD {
        std::hint::spin_loop();
    } else {
        std::thread::yield_now();
    }
}
