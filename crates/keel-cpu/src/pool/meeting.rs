//! Where the threads of a pool meet: a job is handed to all of them, they meet at barriers within it, and each says
//! when it has finished.
//!
//! `tests/interleavings.rs` compiles this file with loom's types and checks each order of the threads' steps.

use crate::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use crate::sync::{Condvar, Mutex, MutexGuard, Patience};

/// State shared by the workers of one pool. The caller of the pool is a worker; the others are helpers.
pub(crate) struct Meeting<J> {
    workers: usize,
    /// Workers that have reached the current barrier.
    arrived: AtomicUsize,
    /// Incremented by the last worker to arrive; the others wait for it to change.
    phase: AtomicUsize,
    /// Next unclaimed unit of the current phase, see [`Meeting::claim`].
    cursor: AtomicUsize,
    /// For each worker, the units taken from its share, see [`Meeting::take`].
    shares: Box<[Taken]>,
    /// Incremented for each job; helpers wait for it to change.
    generation: AtomicUsize,
    /// Helpers that have left the current job.
    finished: AtomicUsize,
    /// The pool is being dropped.
    closing: AtomicBool,
    /// A worker panicked: the others must not wait for it at a barrier.
    poisoned: AtomicBool,
    job: Mutex<Option<J>>,
    patience: Patience,
    /// Threads that sleep, or are about to. They hold the lock of `job` when they count themselves.
    sleepers: AtomicUsize,
    wake: Condvar,
}

/// Counts of the units taken from a worker's share in one phase: by the worker itself from the front, by others from
/// the back. It has two cache lines of its own, because processors fetch lines in pairs.
#[repr(align(128))]
struct Taken(AtomicU64);

impl Taken {
    /// The word for `phase` with no unit taken. The phase takes the bits above both counts.
    fn none(phase: usize) -> u64 {
        (phase as u64) << (2 * COUNT_BITS)
    }

    /// Takes one of `len` units in `phase`.
    fn take(&self, phase: usize, len: usize, from_back: bool) -> Option<usize> {
        let (none, mask) = (Taken::none(phase), (1 << COUNT_BITS) - 1);
        let mut word = self.0.load(Ordering::Relaxed);
        loop {
            // The first worker of a phase finds the counts of an earlier phase.
            let counts = if (word ^ none) >> (2 * COUNT_BITS) == 0 { word } else { none };
            let (front, back) = ((counts & mask) as usize, (counts >> COUNT_BITS & mask) as usize);
            if front + back >= len {
                return None;
            }
            let taken = counts + if from_back { 1 << COUNT_BITS } else { 1 };
            match self.0.compare_exchange_weak(word, taken, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(if from_back { len - 1 - back } else { front }),
                Err(now) => word = now,
            }
        }
    }
}

/// Bits of each of the two counts of a share.
pub(crate) const COUNT_BITS: u32 = 20;

impl<J: Copy> Meeting<J> {
    /// For the caller and `workers - 1` helpers.
    pub fn new(workers: usize) -> Meeting<J> {
        Meeting {
            workers,
            arrived: AtomicUsize::new(0),
            phase: AtomicUsize::new(0),
            cursor: AtomicUsize::new(0),
            shares: (0..workers).map(|_| Taken(AtomicU64::new(0))).collect(),
            generation: AtomicUsize::new(0),
            finished: AtomicUsize::new(0),
            closing: AtomicBool::new(false),
            poisoned: AtomicBool::new(false),
            job: Mutex::new(None),
            patience: Patience::new(),
            sleepers: AtomicUsize::new(0),
            wake: Condvar::new(),
        }
    }

    pub fn workers(&self) -> usize {
        self.workers
    }

    /// Begins a job, and hands it to the helpers. Only the caller does, when the last job has ended.
    pub fn begin(&self, job: J) {
        self.arrived.store(0, Ordering::Relaxed);
        self.cursor.store(0, Ordering::Relaxed);
        self.poisoned.store(false, Ordering::Relaxed);
        // A phase that this job does not reach, so that the counts of the last job do not apply.
        let before = Taken::none(self.phase.load(Ordering::Relaxed).wrapping_sub(1));
        self.shares.iter().for_each(|share| share.0.store(before, Ordering::Relaxed));
        if self.workers == 1 {
            return;
        }
        self.finished.store(0, Ordering::Relaxed);
        *self.lock() = Some(job);
        self.generation.fetch_add(1, Ordering::Release);
        self.wake_sleepers();
    }

    /// Waits until all helpers have left the job. Their writes are then visible to the caller.
    pub fn end(&self) {
        self.wait_until(|| self.finished.load(Ordering::Acquire) + 1 == self.workers);
        *self.lock() = None;
    }

    /// A helper waits for a job newer than generation `seen`; `None` when the pool closes.
    pub fn next_job(&self, seen: usize) -> Option<(usize, J)> {
        let closing = || self.closing.load(Ordering::Acquire);
        self.wait_until(|| self.generation.load(Ordering::Acquire) != seen || closing());
        if closing() {
            return None;
        }
        let job = self.lock().expect("a job stays until all helpers have left it");
        Some((self.generation.load(Ordering::Acquire), job))
    }

    /// A helper has left the job.
    pub fn finish(&self) {
        if self.finished.fetch_add(1, Ordering::Release) + 2 == self.workers {
            self.wake_sleepers();
        }
    }

    /// Ends the helpers that wait for a job.
    pub fn close(&self) {
        self.closing.store(true, Ordering::Release);
        self.wake_sleepers();
    }

    /// Waits until all workers are here. Everything written before the barrier is visible to all of them after it.
    /// False if a worker has panicked and never comes.
    #[inline]
    pub fn barrier(&self) -> bool {
        let phase = self.phase.load(Ordering::Acquire);
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.workers {
            self.arrived.store(0, Ordering::Relaxed);
            self.cursor.store(0, Ordering::Relaxed);
            self.phase.store(phase.wrapping_add(1), Ordering::Release);
            self.wake_sleepers();
            return true;
        }
        let all_are_here = || self.phase.load(Ordering::Acquire) != phase;
        self.wait_until(|| all_are_here() || self.poisoned.load(Ordering::Relaxed));
        all_are_here()
    }

    /// A worker has panicked.
    pub fn poison(&self) {
        self.poisoned.store(true, Ordering::Release);
        self.wake_sleepers();
    }

    /// Whether a worker has panicked in the job that has ended.
    pub fn is_poisoned(&self) -> bool {
        self.poisoned.load(Ordering::Relaxed)
    }

    /// The start of the next `grain` units of the current phase.
    #[inline]
    pub fn claim(&self, grain: usize) -> usize {
        self.cursor.fetch_add(grain, Ordering::Relaxed)
    }

    /// The current phase.
    #[inline]
    pub fn phase(&self) -> usize {
        self.phase.load(Ordering::Acquire)
    }

    /// Takes one of the `len` units of a worker's share in `phase`: the worker itself from the front, others from the
    /// back. `None` if all are taken.
    #[inline]
    pub fn take(&self, owner: usize, phase: usize, len: usize, from_back: bool) -> Option<usize> {
        self.shares[owner].take(phase, len, from_back)
    }

    /// Waits while [`Patience`] lasts, then sleeps. The thread that makes `ready` true calls `wake_sleepers`
    /// afterwards.
    #[inline]
    fn wait_until(&self, ready: impl Fn() -> bool) {
        let mut round = 0;
        while !ready() {
            if !self.patience.lasts(round) {
                return self.sleep_until(ready);
            }
            round += 1;
        }
    }

    #[cold]
    fn sleep_until(&self, ready: impl Fn() -> bool) {
        let mut job = self.lock();
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        // With the fence of `wake_sleepers`: this thread sees that `ready` is true, or the other one sees that it
        // sleeps.
        fence(Ordering::SeqCst);
        while !ready() {
            job = self.wake.wait(job).unwrap_or_else(|e| e.into_inner());
        }
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
    }

    fn wake_sleepers(&self) {
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            // A thread that has counted itself holds the lock until it sleeps.
            drop(self.lock());
            self.wake.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<J>> {
        self.job.lock().unwrap_or_else(|e| e.into_inner())
    }
}
