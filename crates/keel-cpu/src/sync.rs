//! The synchronisation of files that `tests/interleavings.rs` compiles with loom's types instead.

pub(crate) use std::sync::{Arc, Condvar, Mutex, MutexGuard, atomic};

use std::time::{Duration, Instant};

use atomic::{AtomicU64, Ordering};

/// Spins before a waiting thread yields its time slice: a few microseconds. On a quiet machine a yield returns at once,
/// so waiting stays as fast.
const SPINS_BEFORE_YIELD: u32 = 128;

/// Rounds of waiting after which a thread sleeps: a few hundred microseconds on a quiet machine, longer than the gap
/// between two steps of a generation.
const ROUNDS_BEFORE_SLEEP: u32 = 2_000;

/// A yield of this length went to a program that keeps the core busy. Threads that only answer a request or a device
/// give it back sooner.
const BUSY_YIELD: Duration = Duration::from_millis(1);

/// How long threads sleep instead of yielding after such a yield, in microseconds: the first time, and at most. Each
/// yield that shows the same again doubles it, so that finding out takes little of the time on a machine that stays
/// busy, and one interruption costs little on a quiet one.
const BUSY_US: std::ops::RangeInclusive<u64> = 10_000..=160_000;

/// How long a thread of a pool waits awake.
///
/// A thread that yields on a busy machine gives up its time slice, at each barrier, and gets it back some milliseconds
/// later. A thread that sleeps keeps its claim to the core, but waking it takes as long as a short kernel. So threads
/// yield until a yield shows that the machine is busy, then sleep for a while.
pub(crate) struct Patience {
    start: Instant,
    /// The machine counts as busy until then, in microseconds since `start`.
    busy_until: AtomicU64,
    /// How long the machine counts as busy after the next yield that shows it, in microseconds.
    busy_us: AtomicU64,
}

impl Patience {
    pub fn new() -> Patience {
        Patience {
            start: Instant::now(),
            busy_until: AtomicU64::new(0),
            busy_us: AtomicU64::new(*BUSY_US.start()),
        }
    }

    /// The `round`-th round of waiting in a row. False if the thread is to sleep.
    #[inline]
    pub fn lasts(&self, round: u32) -> bool {
        if round < SPINS_BEFORE_YIELD {
            std::hint::spin_loop();
            return true;
        }
        round < ROUNDS_BEFORE_SLEEP && self.yields()
    }

    /// Yields, unless the machine is busy.
    fn yields(&self) -> bool {
        let before = self.start.elapsed();
        if self.is_busy(before) {
            return false;
        }
        std::thread::yield_now();
        self.note_yield(before, self.start.elapsed());
        true
    }

    fn is_busy(&self, now: Duration) -> bool {
        (now.as_micros() as u64) < self.busy_until.load(Ordering::Relaxed)
    }

    fn note_yield(&self, before: Duration, after: Duration) {
        let busy_us = self.busy_us.load(Ordering::Relaxed);
        if after - before >= BUSY_YIELD {
            self.busy_until.store(after.as_micros() as u64 + busy_us, Ordering::Relaxed);
            self.busy_us.store((2 * busy_us).min(*BUSY_US.end()), Ordering::Relaxed);
        } else if busy_us > *BUSY_US.start() {
            self.busy_us.store(*BUSY_US.start(), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn a_yield_that_takes_long_lets_threads_sleep_for_a_while() {
        let patience = Patience::new();
        patience.note_yield(ms(0), Duration::from_micros(900));
        assert!(!patience.is_busy(ms(1)), "a short one shows nothing");
        // The machine stays busy.
        let mut at = ms(1);
        for busy in [10, 20, 40, 80, 160, 160].map(ms) {
            patience.note_yield(at, at + ms(3));
            at += ms(3) + busy;
            assert!(patience.is_busy(at - ms(1)) && !patience.is_busy(at));
        }
        // It is quiet, then interrupted once.
        patience.note_yield(at, at);
        patience.note_yield(at, at + ms(2));
        assert!(patience.is_busy(at + ms(11)) && !patience.is_busy(at + ms(12)));
    }

    #[test]
    fn a_thread_spins_then_yields_then_sleeps() {
        let patience = Patience::new();
        assert!(patience.lasts(0) && patience.lasts(SPINS_BEFORE_YIELD - 1));
        assert!(!patience.lasts(ROUNDS_BEFORE_SLEEP));
        patience.busy_until.store(u64::MAX, Ordering::Relaxed);
        assert!(patience.lasts(0), "it spins on a busy machine, too");
        assert!(!patience.lasts(SPINS_BEFORE_YIELD));
    }
}
