//! The persistent thread pool that walks a prepared list of kernels.
//!
//! All workers run the same closure at once and meet at [`Worker::barrier`] between kernels. A step of several hundred
//! kernels therefore costs one wake-up and one barrier per kernel (well under a microsecond each while the workers
//! spin). Idle workers spin briefly, then park.

use crate::isa::Isa;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

/// Spins before a waiting thread yields its time slice: a few microseconds. On a quiet machine a yield returns at once,
/// so waiting stays as fast. On a busy machine the core goes to a thread that can make progress, often the worker that
/// is waited for.
const SPINS_BEFORE_YIELD: u32 = 128;

/// Rounds of waiting after which an idle helper parks: a few hundred microseconds on a quiet machine, longer than the
/// gap between two steps of a generation.
const ROUNDS_BEFORE_PARK: u32 = 2_000;

/// One round of waiting, the `round`-th in a row.
#[inline]
fn relax(round: u32) {
    if round < SPINS_BEFORE_YIELD {
        std::hint::spin_loop();
    } else {
        std::thread::yield_now();
    }
}

/// State shared by the workers of one pool.
struct Shared {
    workers: usize,
    isa: Isa,
    /// Workers that have reached the current barrier.
    arrived: AtomicUsize,
    /// Incremented by the last worker to arrive; the others wait for it to change.
    phase: AtomicUsize,
    /// Next unclaimed unit of the current phase, see [`Worker::claim`].
    cursor: AtomicUsize,
    /// For each worker, the units taken from its share, see [`Worker::claim_near`].
    shares: Box<[Taken]>,
    /// Incremented for each job; workers wait for it to change.
    generation: AtomicUsize,
    /// Helper threads that have left the current job.
    finished: AtomicUsize,
    /// The pool is being dropped.
    closing: AtomicBool,
    /// A worker panicked: the others must not wait for it at a barrier.
    poisoned: AtomicBool,
    job: Mutex<Option<Job>>,
    wake: Condvar,
}

/// Counts of the units taken from a worker's share in one phase: by the worker itself from the front, by others from
/// the back. It has two cache lines of its own, because processors fetch lines in pairs.
#[repr(align(128))]
struct Taken(AtomicU64);

impl Taken {
    /// Bits of each count; the phase takes the bits above both counts.
    const BITS: u32 = 20;

    /// The word for `phase` with no unit taken.
    fn none(phase: usize) -> u64 {
        (phase as u64) << (2 * Self::BITS)
    }

    /// Takes one of `len` units in `phase`.
    fn take(&self, phase: usize, len: usize, from_back: bool) -> Option<usize> {
        let (none, mask) = (Taken::none(phase), (1 << Self::BITS) - 1);
        let mut word = self.0.load(Ordering::Relaxed);
        loop {
            // The first worker of a phase finds the counts of an earlier phase.
            let counts = if (word ^ none) >> (2 * Self::BITS) == 0 { word } else { none };
            let (front, back) = ((counts & mask) as usize, (counts >> Self::BITS & mask) as usize);
            if front + back >= len {
                return None;
            }
            let taken = counts + if from_back { 1 << Self::BITS } else { 1 };
            match self.0.compare_exchange_weak(word, taken, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(if from_back { len - 1 - back } else { front }),
                Err(now) => word = now,
            }
        }
    }
}

/// The closure of the current job, with its lifetime erased.
#[derive(Clone, Copy)]
struct Job {
    run: *const (dyn Fn(&Worker<'_>) + Sync + 'static),
}
// SAFETY: the pointee is Sync, and `ThreadPool::run` keeps it alive until every worker has finished with it.
unsafe impl Send for Job {}

/// One thread's view of the job that its pool runs.
pub struct Worker<'a> {
    /// 0-based index of this thread.
    pub index: usize,
    /// Threads that take part.
    pub count: usize,
    /// Instructions that kernels use.
    pub isa: Isa,
    shared: &'a Shared,
}

impl Worker<'_> {
    /// Waits until all workers are here. Everything written before the barrier is visible to all of them after it.
    pub fn barrier(&self) {
        let shared = self.shared;
        let phase = shared.phase.load(Ordering::Acquire);
        if shared.arrived.fetch_add(1, Ordering::AcqRel) + 1 == shared.workers {
            shared.arrived.store(0, Ordering::Relaxed);
            shared.cursor.store(0, Ordering::Relaxed);
            shared.phase.store(phase.wrapping_add(1), Ordering::Release);
            return;
        }
        let mut round = 0u32;
        while shared.phase.load(Ordering::Acquire) == phase {
            assert!(!shared.poisoned.load(Ordering::Relaxed), "another worker of this pool panicked");
            relax(round);
            round = round.saturating_add(1);
        }
    }

    /// This worker's fixed share of `0..total`, cut at multiples of `grain`.
    pub fn split(&self, total: usize, grain: usize) -> Range<usize> {
        self.share_of(self.index, total, grain)
    }

    fn share_of(&self, index: usize, total: usize, grain: usize) -> Range<usize> {
        let grains = total.div_ceil(grain);
        let start = grains * index / self.count * grain;
        let end = grains * (index + 1) / self.count * grain;
        start.min(total)..end.min(total)
    }

    /// Pieces of `0..total` of `grain` units, first come, first served. At most one such loop may run between two
    /// barriers: all loops share one cursor, which the barrier resets.
    pub fn claim(&self, total: usize, grain: usize) -> impl Iterator<Item = Range<usize>> + '_ {
        std::iter::from_fn(move || {
            let start = self.shared.cursor.fetch_add(grain, Ordering::Relaxed);
            (start < total).then(|| start..(start + grain).min(total))
        })
    }

    /// Pieces of `0..total`, each of one unit unless there are more units than the counts can hold. First come the
    /// pieces of this worker's share ([`Worker::split`]) in order, so that it reads one stream. Then come the units
    /// left in the shares of other workers, from the back. As with [`Worker::claim`], every worker makes the call, once
    /// between two barriers.
    pub fn claim_near(&self, total: usize) -> impl Iterator<Item = Range<usize>> + '_ {
        let phase = self.shared.phase.load(Ordering::Acquire);
        let grain = total.div_ceil(self.count << (Taken::BITS - 1)).max(1);
        let mut visited = 0;
        std::iter::from_fn(move || {
            while visited < self.count {
                let owner = (self.index + visited) % self.count;
                let share = self.share_of(owner, total, grain);
                let taken = self.shared.shares[owner].take(phase, share.len().div_ceil(grain), visited > 0);
                if let Some(i) = taken {
                    let start = share.start + i * grain;
                    return Some(start..(start + grain).min(share.end));
                }
                visited += 1;
            }
            None
        })
    }
}

/// A fixed set of threads; the caller of [`ThreadPool::run`] is one of them.
pub struct ThreadPool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// One job at a time.
    running: Mutex<()>,
}

impl ThreadPool {
    /// A pool of `workers` threads in total (at least one), including the caller of `run`, with the best instructions
    /// of this machine.
    pub fn new(workers: usize) -> ThreadPool {
        ThreadPool::at(workers, Isa::best())
    }

    /// Like [`ThreadPool::new`], with the instructions of `isa`, or the machine's best if that is lower.
    pub fn at(workers: usize, isa: Isa) -> ThreadPool {
        let workers = workers.max(1);
        let shared = Arc::new(Shared {
            workers,
            isa: isa.min(Isa::best()),
            arrived: AtomicUsize::new(0),
            phase: AtomicUsize::new(0),
            cursor: AtomicUsize::new(0),
            shares: (0..workers).map(|_| Taken(AtomicU64::new(0))).collect(),
            generation: AtomicUsize::new(0),
            finished: AtomicUsize::new(0),
            closing: AtomicBool::new(false),
            poisoned: AtomicBool::new(false),
            job: Mutex::new(None),
            wake: Condvar::new(),
        });
        let threads = (1..workers)
            .map(|index| {
                let shared = Arc::clone(&shared);
                std::thread::Builder::new()
                    .name(format!("keel-cpu-{index}"))
                    .spawn(move || serve(&shared, index))
                    .expect("the system refused to start a worker thread")
            })
            .collect();
        ThreadPool { shared, threads, running: Mutex::new(()) }
    }

    /// Instructions that the workers use.
    pub fn isa(&self) -> Isa {
        self.shared.isa
    }

    /// Threads that take part in a job, the caller included.
    pub fn workers(&self) -> usize {
        self.shared.workers
    }

    /// Runs `job` once on every worker and returns when all have finished.
    ///
    /// # Panics
    /// If the job panics on any worker. The pool stays usable.
    pub fn run<F: Fn(&Worker<'_>) + Sync>(&self, job: F) {
        let _one_at_a_time = self.running.lock().unwrap_or_else(|e| e.into_inner());
        let shared = &*self.shared;
        shared.arrived.store(0, Ordering::Relaxed);
        shared.cursor.store(0, Ordering::Relaxed);
        shared.poisoned.store(false, Ordering::Relaxed);
        // A phase that this job does not reach, so that the counts of the last job do not apply.
        let before = Taken::none(shared.phase.load(Ordering::Relaxed).wrapping_sub(1));
        shared.shares.iter().for_each(|share| share.0.store(before, Ordering::Relaxed));
        let job: &(dyn Fn(&Worker<'_>) + Sync) = &job;
        // SAFETY: only the lifetime changes. Workers use the pointer only until all have counted themselves finished,
        // below. `job` is alive until then, and the pointer is removed from the slot before this function returns.
        let run: *const (dyn Fn(&Worker<'_>) + Sync + 'static) = unsafe { std::mem::transmute(job) };
        if shared.workers > 1 {
            shared.finished.store(0, Ordering::Relaxed);
            let mut slot = shared.job.lock().unwrap_or_else(|e| e.into_inner());
            *slot = Some(Job { run });
            // Under the lock: a helper that is about to park must not miss the new generation.
            shared.generation.fetch_add(1, Ordering::Release);
            drop(slot);
            shared.wake.notify_all();
        }
        let worker = Worker { index: 0, count: shared.workers, isa: shared.isa, shared };
        let outcome = run_guarded(&worker, Job { run });
        let mut round = 0u32;
        while shared.finished.load(Ordering::Acquire) + 1 < shared.workers {
            relax(round);
            round = round.saturating_add(1);
        }
        *shared.job.lock().unwrap_or_else(|e| e.into_inner()) = None;
        if let Err(panic) = outcome {
            std::panic::resume_unwind(panic);
        }
        assert!(!shared.poisoned.load(Ordering::Relaxed), "a worker thread panicked while running a kernel");
    }
}

/// Runs the job. A panic is recorded where the barrier sees it, so that no other worker waits for this one.
fn run_guarded(worker: &Worker<'_>, job: Job) -> std::thread::Result<()> {
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        // SAFETY: `ThreadPool::run` keeps the closure alive until every worker has counted itself finished.
        unsafe { (*job.run)(worker) }
    }));
    if outcome.is_err() {
        worker.shared.poisoned.store(true, Ordering::Release);
    }
    outcome
}

/// The life of a helper thread: wait for a job, run it, count itself finished.
fn serve(shared: &Shared, index: usize) {
    let mut seen = 0;
    while let Some((generation, job)) = next_job(shared, seen) {
        seen = generation;
        // `run_guarded` has recorded a panic in `poisoned`; the caller of `run` raises it.
        let _ = run_guarded(&Worker { index, count: shared.workers, isa: shared.isa, shared }, job);
        shared.finished.fetch_add(1, Ordering::Release);
    }
}

/// Spins, then parks, until a job newer than generation `seen` is there; `None` when the pool closes.
fn next_job(shared: &Shared, seen: usize) -> Option<(usize, Job)> {
    for round in 0..ROUNDS_BEFORE_PARK {
        if shared.generation.load(Ordering::Acquire) != seen {
            break;
        }
        relax(round);
    }
    let mut job = shared.job.lock().unwrap_or_else(|e| e.into_inner());
    loop {
        if shared.closing.load(Ordering::Acquire) {
            return None;
        }
        let generation = shared.generation.load(Ordering::Acquire);
        if let (true, Some(job)) = (generation != seen, *job) {
            return Some((generation, job));
        }
        job = shared.wake.wait(job).unwrap_or_else(|e| e.into_inner());
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        {
            let _job = self.shared.job.lock().unwrap_or_else(|e| e.into_inner());
            self.shared.closing.store(true, Ordering::Release);
        }
        self.shared.wake.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_is_claimed_once_in_every_phase() {
        for workers in [1, 2, 3] {
            let pool = ThreadPool::new(workers);
            let counts: Vec<AtomicUsize> = (0..1001).map(|_| AtomicUsize::new(0)).collect();
            for _ in 0..50 {
                pool.run(|worker| {
                    for _ in 0..10 {
                        for unit in worker.claim(counts.len(), 7).flatten() {
                            counts[unit].fetch_add(1, Ordering::Relaxed);
                        }
                        worker.barrier();
                    }
                });
            }
            assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 500));
        }
    }

    #[test]
    fn every_unit_is_claimed_once_whoever_is_slow() {
        for (workers, slow) in [(1, 0), (2, 0), (2, 1), (3, 1)] {
            let pool = ThreadPool::new(workers);
            for total in [0, 1, 2, 3, 101] {
                let counts: Vec<AtomicUsize> = (0..total).map(|_| AtomicUsize::new(0)).collect();
                for job in 0..10 {
                    pool.run(|worker| {
                        for phase in 0..3 {
                            let mut own = worker.split(total, 1);
                            let mut stolen = false;
                            for unit in worker.claim_near(total).flatten() {
                                counts[unit].fetch_add(1, Ordering::Relaxed);
                                stolen |= !worker.split(total, 1).contains(&unit);
                                assert!(stolen || own.next() == Some(unit), "a share is walked in order");
                                if worker.index == slow && (job + phase) % 2 == 0 {
                                    std::thread::yield_now();
                                }
                            }
                            // A job may end without a barrier; the next job then starts in the same phase.
                            if phase < 2 {
                                worker.barrier();
                            }
                        }
                    });
                }
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 30), "{total}: {counts:?}");
            }
        }
    }

    #[test]
    fn more_units_than_can_be_counted_are_claimed_in_pieces() {
        let (total, pool) = ((3 << Taken::BITS) + 5, ThreadPool::new(2));
        let claimed = AtomicUsize::new(0);
        pool.run(|worker| {
            let units: usize = worker.claim_near(total).map(|piece| piece.len()).sum();
            claimed.fetch_add(units, Ordering::Relaxed);
        });
        assert_eq!(claimed.into_inner(), total);
    }

    #[test]
    fn fixed_shares_cover_the_whole_range_without_overlap() {
        let pool = ThreadPool::new(3);
        let shares = Mutex::new(Vec::new());
        pool.run(|worker| shares.lock().unwrap().push(worker.split(1000, 64)));
        let mut shares = shares.into_inner().unwrap();
        shares.sort_by_key(|r| r.start);
        assert_eq!((shares[0].start, shares[2].end), (0, 1000));
        assert!(shares.windows(2).all(|w| w[0].end == w[1].start && w[0].end % 64 == 0));
    }

    #[test]
    fn a_panicking_job_is_raised_and_the_pool_stays_usable() {
        let pool = ThreadPool::new(2);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.run(|worker| {
                assert!(worker.index != 1, "planted");
                worker.barrier();
            });
        }));
        assert!(result.is_err());
        let ran = AtomicUsize::new(0);
        pool.run(|_| {
            ran.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(ran.load(Ordering::Relaxed), 2);
    }
}
